package bgp_test

import (
	"encoding/binary"
	"fmt"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A router that sends 400,000 routes costs no memory, and is reported.
func TestFullTable(t *testing.T) {
	const routes, perUpdate = 400_000, 1000
	l := must.Get(net.Listen("tcp4", "127.0.0.1:0"))(t)
	defer l.Close()
	o := (&router{port: l.Addr().(*net.TCPAddr).AddrPort().Port()}).options()
	o.Peers[0].HoldTime, o.Peers[0].MaxReceived = 90*time.Second, 1000
	s := newSpeaker(t, o)
	must.Run(t, s.Run)
	must.Do(t, s.Set(t.Context(), announcements(vip4)))
	tcp := must.Get(l.Accept())(t)
	c := attacker(t, tcp)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for n := 0; n < routes; n += perUpdate {
		nlri := make([]byte, 0, 4*perUpdate)
		for i := range perUpdate {
			nlri = append(nlri, 24)
			nlri = append(nlri, binary.BigEndian.AppendUint32(nil, uint32(n+i)<<8)[:3]...)
		}
		for len(nlri) > 0 {
			part := nlri[:min(len(nlri), 4000)]
			nlri = nlri[len(part):]
			m := update("40 01 01 00 40 02 06 0201 0000fbf4 40 03 04 7f000001", fmt.Sprintf("%x", part))
			must.Get(c.Write(m))(t)
		}
	}
	labtest.Until(t, timeout, "all are counted and reported", func() error {
		p := s.Peers()[0]
		if p.Received != routes || !strings.Contains(p.LastError, "more routes than max_received = 1000") {
			return fmt.Errorf("peer %+v", p)
		}
		return nil
	})
	if grown := int64(heap()) - int64(before); grown > 8<<20 {
		t.Errorf("the heap has grown by %d bytes", grown)
	}
	if p := s.Peers()[0]; p.State != "established" {
		t.Errorf("peer %+v", p)
	}
}
