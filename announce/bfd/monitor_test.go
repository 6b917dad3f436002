package bfd

import (
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
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
