package bfd

import (
	"bytes"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The status of a session shows a discarded packet only for some time, because the next packet may arrive years later.
func TestDiscardedIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := Neighbor{Addr: netip.MustParseAddr("192.0.2.1"), Multihop: true, MinTTL: 255}
		s := &session{Neighbor: n, machine: newMachine(1, interval100, 3)}
		m := &Monitor{sessions: []*session{s}}
		const reason = "TTL below min_ttl"
		for range 2 {
			must.Equal(t, reason, m.receive(datagram{from: n.Addr, ttl: 254, multihop: true}))
			for _, want := range []string{reason, ""} {
				got := m.Sessions()[0].Discarded
				must.True(t, got == want, "%q, want %q", got, want)
				time.Sleep(discardedTime)
			}
		}
	})
}

// Changed receives each state, even if packets that arrive together cause several changes.
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
		reason := m.receive(d)
		must.Need(t, reason == "", "%v is discarded: %s", state, reason)
	}
	want := []change{{Down, Up}, {Up, Down}, {Down, Init}}
	must.True(t, slices.Equal(got, want), "%v, want %v", got, want)
}

// A packet whose handling panics is lost, and the session continues with the next one.
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
	must.True(t, m.handle(d) != "" && s.state == Down && b.Panics()[lb.PartBFD] == 1,
		"state %v, panics %v; want a packet that is lost", s.state, b.Panics())
	on = false
	must.True(t, m.handle(d) == "" && s.state == Init, "state %v; want the next packet handled", s.state)
}

// A packet is accepted if it has crossed at most the allowed routers, has arrived on the session's interface or device,
// and belongs to the session.
func TestRefuse(t *testing.T) {
	const one, many = false, true
	const otherInterface = "not from the interface of the neighbor"
	for _, row := range []struct {
		name     string
		multihop bool
		device   device // of the session; zero for none
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
		must.Row(t, row.name, row.want, s.refuse(&d))
	}
}

// Run waits for a port that is in use for a moment. A port that stays in use is an error.
func TestPortInUse(t *testing.T) {
	h := labtest.Host(t, labtest.New(t), "node")
	err := h.Do(func() error {
		var first, second Monitor
		first.devices, second.devices = map[string]*device{}, map[string]*device{}
		if err := first.open(); err != nil {
			return err
		}
		err := second.open()
		must.True(t, err != nil && len(second.devices) == 0, "the ports of another one were opened: %v", err)
		time.AfterFunc(5*bindRetry, first.closeDevices)
		err = second.open()
		second.closeDevices()
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

var sample = Packet{
	State: Up, Diag: DiagTimeExpired, Poll: true, Independent: true, Multiplier: 3, MyDiscriminator: 0x01020304,
	YourDiscriminator: 0x05060708, DesiredMinTx: 100 * time.Millisecond, RequiredMinRx: 300 * time.Millisecond,
	RequiredMinEchoRx: 50 * time.Microsecond,
}

// The expected bytes are literal, because a decoder that merely agrees with its encoder would prove nothing.
var sampleBytes = []byte{0x21, 0xe8, 3, 24, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 0x86, 0xa0, 0, 4, 0x93, 0xe0, 0, 0, 0, 50}

func TestPacketOnTheWire(t *testing.T) {
	got := sample.Append(nil)
	must.True(t, bytes.Equal(got, sampleBytes), "Append: % x, want % x", got, sampleBytes)
	packet, err := Parse(append(bytes.Clone(sampleBytes), 1, 2, 3))
	must.True(t, err == nil && packet == sample, "Parse: %+v, %v, want %+v", packet, err, sample)
	p := Packet{State: Down, Final: true, Demand: true, Multiplier: 1, MyDiscriminator: 1}
	packet, err = Parse(p.Append(nil))
	must.True(t, err == nil && packet == p, "Parse: %+v, %v, want %+v", packet, err, p)
}

func TestParseRefuses(t *testing.T) {
	for name, c := range map[string]struct {
		at    int
		value byte
		want  string
	}{
		"version 0":                        {0, 0x01, "version 0"},
		"version 2":                        {0, 0x41, "version 2"},
		"length below the header":          {3, 23, "length 23"},
		"length beyond the datagram":       {3, 25, "length 25"},
		"authentication":                   {1, 0xec, "authenticated"},
		"multipoint":                       {1, 0xe9, "multipoint"},
		"multiplier 0":                     {2, 0, "multiplier"},
		"up without a discriminator of us": {1, 0xc8, ""},
	} {
		b := bytes.Clone(sampleBytes)
		b[c.at] = c.value
		_, err := Parse(b)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: error %v, want %q", name, err, c.want)
		}
	}
	for name, clear := range map[string][2]int{
		"the sender's discriminator": {4, 8}, "without the receiver's": {8, 12},
	} {
		b := bytes.Clone(sampleBytes)
		copy(b[clear[0]:clear[1]], make([]byte, 4))
		_, err := Parse(b)
		must.True(t, err != nil && strings.Contains(err.Error(), name), "%s: error %v", name, err)
	}
	_, err := Parse(sampleBytes[:23])
	must.True(t, err != nil, "23 bytes were parsed")
}

func FuzzParse(f *testing.F) {
	f.Add(sampleBytes)
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := Parse(b)
		if err != nil {
			return
		}
		again, err := Parse(p.Append(nil))
		must.True(t, err == nil && again == p, "%+v becomes %+v, %v", p, again, err)
	})
}
