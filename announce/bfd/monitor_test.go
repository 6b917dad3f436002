package bfd

import (
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A discarded packet is the state of its session for some time only: the next one may be years later.
func TestDiscardedIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := Neighbor{Addr: netip.MustParseAddr("192.0.2.1"), Multihop: true, MinTTL: 255}
		s := &session{Neighbor: n, machine: newMachine(1, interval100, 3)}
		m := &Monitor{sessions: []*session{s}}
		const reason = "TTL below min_ttl"
		for range 2 {
			if got := m.receive(datagram{from: n.Addr, ttl: 254, multihop: true}); got != reason {
				t.Fatalf("discarded: %q, want %q", got, reason)
			}
			for _, want := range []string{reason, ""} {
				if got := m.Sessions()[0].Discarded; got != want {
					t.Errorf("%q, want %q", got, want)
				}
				time.Sleep(discardedTime)
			}
		}
	})
}

// Changed is told each state, also when packets that arrive together cause several.
func TestChangedIsToldEachState(t *testing.T) {
	type change struct{ before, after State }
	var got []change
	n := Neighbor{Addr: netip.MustParseAddr("127.0.0.1"), Multihop: true}
	s := &session{Neighbor: n, machine: newMachine(1, interval100, 3), reported: Down, socket: -1}
	m := &Monitor{
		o: Options{Log: slog.New(slog.DiscardHandler), Changed: func(before State, s Status) {
			got = append(got, change{before, s.State})
		}},
		sessions: []*session{s},
	}
	for _, state := range []State{Init, Up, Down, Down} {
		d := datagram{from: n.Addr, multihop: true, device: &device{}}
		d.Packet = Packet{State: state, Multiplier: 3, MyDiscriminator: 2, YourDiscriminator: 1}
		if reason := m.receive(d); reason != "" {
			t.Fatalf("%v is discarded: %s", state, reason)
		}
	}
	if want := []change{{Down, Up}, {Up, Down}, {Down, Init}}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// A packet that panics is lost, and the session goes on with the next.
func TestPanicOfAPacket(t *testing.T) {
	n := Neighbor{Addr: netip.MustParseAddr("127.0.0.1"), Multihop: true}
	s := &session{Neighbor: n, machine: newMachine(1, interval100, 3), reported: Down, socket: -1}
	on := true
	b := &lb.Boundary{Log: slog.New(slog.DiscardHandler), Before: func(lb.Part, string) {
		if on {
			panic("injected")
		}
	}}
	m := &Monitor{o: Options{Log: slog.New(slog.DiscardHandler), Boundary: b}, sessions: []*session{s}}
	d := datagram{from: n.Addr, multihop: true, device: &device{}}
	d.Packet = Packet{State: Down, Multiplier: 3, MyDiscriminator: 2}
	if m.handle(d) == "" || s.state != Down || b.Panics()[lb.PartBFD] != 1 {
		t.Errorf("state %v, panics %v; want a packet that is lost", s.state, b.Panics())
	}
	if on = false; m.handle(d) != "" || s.state != Init {
		t.Errorf("state %v; want the next packet handled", s.state)
	}
}

// A packet counts if it has crossed no router too many, has arrived by the interface or the device of the session, and
// belongs to it.
func TestRefuse(t *testing.T) {
	const one, many = false, true
	const otherInterface = "not from the interface of the neighbor"
	for _, row := range []struct {
		name     string
		multihop bool
		device   device // of the session; zero: none
		state    State
		change   func(*datagram)
		want     string
	}{
		{"valid", one, device{}, Up, func(*datagram) {}, ""},
		{"routed", one, device{}, Up, func(d *datagram) { d.ttl = 254 }, "TTL below 255"},
		{"other interface", one, device{}, Up, func(d *datagram) { d.ifindex = 8 }, otherInterface},
		{"no interface", one, device{}, Up, func(d *datagram) { d.ifindex = 0 }, otherInterface},
		{"lowest TTL", many, device{}, Up, func(d *datagram) { d.ttl = 250 }, ""},
		{"TTL too low", many, device{}, Up, func(d *datagram) { d.ttl = 249 }, "TTL below min_ttl"},
		{"any interface", many, device{}, Up, func(d *datagram) { d.ifindex = 8 }, ""},
		{"by a VRF", many, device{}, Up, func(d *datagram) { d.device.vrf = 9 }, "not from the device of the session"},
		{"its device", many, device{index: 7}, Up, func(*datagram) {}, ""},
		{"other device", many, device{index: 6}, Up, func(*datagram) {}, "not from the device of the session"},
		{"socket of its device", many, device{index: 6}, Up, func(d *datagram) { d.device.index = 6 }, ""},
		{"VRF of its device", many, device{index: 6}, Up, func(d *datagram) { d.device.vrf = 6 }, ""},
		{"no discriminator", one, device{}, Up, func(d *datagram) { d.YourDiscriminator = 0 },
			"no discriminator while up"},
		{"no discriminator yet", one, device{}, Down, func(d *datagram) { d.YourDiscriminator = 0 }, ""},
		{"of another session", one, device{}, Down, func(d *datagram) { d.YourDiscriminator = 5 }, "no session"},
	} {
		s := &session{
			Neighbor: Neighbor{Addr: netip.MustParseAddr("192.0.2.1"), Multihop: row.multihop, MinTTL: 250},
			machine:  newMachine(1, interval100, 3), ifindex: 7, lookedUp: time.Now(), device: &row.device,
		}
		if s.state = row.state; row.device.index != 0 {
			s.Device = "eth0"
		}
		d := datagram{from: s.Addr, ttl: 255, ifindex: 7, multihop: row.multihop, device: &device{}}
		d.YourDiscriminator = 1
		row.change(&d)
		if got := s.refuse(&d); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}

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
