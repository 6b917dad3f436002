package bfd

import (
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A port that is in use for a moment is waited for; one that stays in use is an error.
func TestPortInUse(t *testing.T) {
	h := labtest.Host(t, labtest.New(t), "node")
	err := h.Do(func() error {
		var first, second Monitor
		first.devices, second.devices = map[string]*device{}, map[string]*device{}
		if err := first.open(); err != nil {
			return err
		}
		if err := second.open(); err == nil || len(second.devices) > 0 {
			t.Errorf("the ports of another one were opened: %v", err)
		}
		time.AfterFunc(5*bindRetry, first.closeDevices)
		err := second.open()
		second.closeDevices()
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// A Source that the kernel has chosen already does not end the session, another one does.
func TestSameSource(t *testing.T) {
	m := must.Get(New(Options{}))(t)
	n := Neighbor{Addr: netip.MustParseAddr("127.0.0.1"), Interval: time.Second, Multiplier: 3}
	m.Set([]Neighbor{n})
	session := m.sessions[0]
	n.Source = n.Addr
	m.Set([]Neighbor{n})
	if m.sessions[0] != session || session.Source != n.Source {
		t.Error("the session has ended")
	}
	n.Source = netip.MustParseAddr("127.0.0.2")
	m.Set([]Neighbor{n})
	if len(m.sessions) != 1 || m.sessions[0] == session {
		t.Error("the session goes on with another source")
	}
}
