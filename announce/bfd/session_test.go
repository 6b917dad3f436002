package bfd

import (
	"math/rand/v2"
	"testing"
	"time"
)

var start = time.Unix(1_000_000, 0)

const interval100 = 100 * time.Millisecond

func machines() (a, b *machine) {
	return newMachine(1, interval100, 3), newMachine(2, interval100, 3)
}

// pass gives the packet of one machine to the other, and its answer back.
func pass(t *testing.T, from, to *machine, now time.Time) {
	t.Helper()
	p, err := Parse(from.packet(false).Append(nil))
	if err != nil {
		t.Fatal(err)
	}
	if to.receive(p, now) {
		from.receive(to.packet(true), now)
	}
}

// up makes both sessions come up in three packets (RFC 5880, section 6.2), with one poll sequence each.
func up(t *testing.T) (a, b *machine) {
	t.Helper()
	a, b = machines()
	for range 2 {
		pass(t, a, b, start)
		pass(t, b, a, start)
	}
	if a.state != Up || b.state != Up {
		t.Fatalf("states %v and %v, want up", a.state, b.state)
	}
	pass(t, a, b, start)
	pass(t, b, a, start)
	if a.polling || b.polling {
		t.Fatal("a poll sequence did not end")
	}
	return a, b
}

// The state machine of section 6.2.
func TestStates(t *testing.T) {
	for _, c := range []struct {
		state, received, want State
		diag                  Diag
	}{
		{Down, Down, Init, DiagNone}, {Down, Init, Up, DiagNone}, {Down, Up, Down, DiagNone},
		{Down, AdminDown, Down, DiagNone},
		{Init, Down, Init, DiagNone}, {Init, Init, Up, DiagNone}, {Init, Up, Up, DiagNone},
		{Init, AdminDown, Down, DiagNeighborDown},
		{Up, Down, Down, DiagNeighborDown}, {Up, Init, Up, DiagNone}, {Up, Up, Up, DiagNone},
		{Up, AdminDown, Down, DiagNeighborDown},
		{AdminDown, Down, AdminDown, DiagNone}, {AdminDown, Up, AdminDown, DiagNone},
	} {
		m := newMachine(1, interval100, 3)
		m.state = c.state
		m.receive(Packet{State: c.received, Multiplier: 3, MyDiscriminator: 2, YourDiscriminator: 1}, start)
		if m.state != c.want || m.diag != c.diag {
			t.Errorf("%v, received %v: %v, %v; want %v, %v", c.state, c.received, m.state, m.diag, c.want, c.diag)
		}
	}
}

// While it is not up, a session sends at most one packet a second (section 6.8.3); then as configured on both sides.
func TestIntervals(t *testing.T) {
	a, _ := machines()
	if d := a.pause(0.999); d < 990*time.Millisecond || d > time.Second {
		t.Errorf("down: %v, want at most 1s", d)
	}
	a, b := up(t)
	least, most := time.Hour, time.Duration(0)
	for range 1000 {
		d := a.pause(rand.Float64())
		least, most = min(least, d), max(most, d)
	}
	if least < 75*time.Millisecond || least > 78*time.Millisecond || most > interval100 || most < 97*time.Millisecond {
		t.Errorf("up: from %v to %v, want 75ms to 100ms", least, most)
	}
	a.multiplier = 1
	if d := a.pause(0.999); d > 90*time.Millisecond {
		t.Errorf("multiplier 1: %v, want at most 90ms (section 6.8.7)", d)
	}
	b.interval = 300 * time.Millisecond // its next packet says so
	pass(t, b, a, start)
	if d := a.pause(1); d < 270*time.Millisecond || d > 300*time.Millisecond {
		t.Errorf("the neighbor receives every 300ms: %v", d)
	}
	if d := a.detectionTime(); d != 900*time.Millisecond {
		t.Errorf("detection time %v, want 900ms", d)
	}
}

func TestDetection(t *testing.T) {
	a, b := up(t)
	if at := a.expires(); at != start.Add(300*time.Millisecond) {
		t.Fatalf("expires at %v after the last packet, want 300ms", at.Sub(start))
	}
	a.expire(start.Add(299 * time.Millisecond))
	if a.state != Up {
		t.Error("the session failed before its detection time")
	}
	pass(t, b, a, start.Add(299*time.Millisecond))
	a.expire(start.Add(598 * time.Millisecond))
	if a.state != Up {
		t.Error("a packet did not renew the session")
	}
	a.expire(start.Add(599 * time.Millisecond))
	p := a.packet(false)
	if a.state != Down || p.Diag != DiagTimeExpired || p.YourDiscriminator != 0 {
		t.Errorf("after the detection time: %+v", p)
	}
	if !a.expires().IsZero() {
		t.Error("a session that failed expires again")
	}
	// The neighbor hears it and both come up again.
	for range 3 {
		pass(t, a, b, start.Add(time.Second))
		pass(t, b, a, start.Add(time.Second))
	}
	if a.state != Up || b.state != Up {
		t.Errorf("states %v and %v, want up again", a.state, b.state)
	}
}

func TestPlannedEnd(t *testing.T) {
	a, b := up(t)
	a.end()
	p := a.packet(false)
	if p.State != AdminDown || p.Diag != DiagAdminDown || p.Poll {
		t.Errorf("packet %+v", p)
	}
	pass(t, a, b, start)
	if b.state != Down || b.diag != DiagNeighborDown || b.remoteDiag != DiagAdminDown {
		t.Errorf("the neighbor: %v, %v", b.state, b.diag)
	}
	pass(t, b, a, start)
	if a.state != AdminDown {
		t.Errorf("state %v after a packet, want admin-down", a.state)
	}
}

// Section 6.8.7: no periodic packets while the neighbor demands it, but polls and their answers.
func TestDemandAndPoll(t *testing.T) {
	a, _ := up(t)
	demand := Packet{
		State: Up, Demand: true, Multiplier: 3, MyDiscriminator: 2, YourDiscriminator: 1, RequiredMinRx: interval100,
		DesiredMinTx: interval100,
	}
	if a.receive(demand, start); a.periodic() {
		t.Error("periodic packets are sent although the neighbor demands none")
	}
	demand.Poll = true
	if !a.receive(demand, start) {
		t.Error("a poll is not answered")
	}
	if p := a.packet(true); !p.Final || p.Poll {
		t.Errorf("answer %+v", p)
	}
	demand.State = Down
	if a.receive(demand, start); !a.periodic() {
		t.Error("no packets although the session is down")
	}
	demand.RequiredMinRx = 0
	if a.receive(demand, start); a.periodic() {
		t.Error("packets are sent to a neighbor that wants none")
	}
}

// Whatever arrives, the session neither answers with a packet that its own parser refuses nor comes up without a
// neighbor that names its discriminator.
func FuzzSession(f *testing.F) {
	f.Add(sampleBytes, uint16(10))
	f.Fuzz(func(t *testing.T, b []byte, pause uint16) {
		m, now := newMachine(1, interval100, 3), start
		for len(b) >= packetLen {
			p, err := Parse(b[:packetLen])
			b = b[packetLen:]
			now = now.Add(time.Duration(pause) * time.Millisecond)
			m.expire(now)
			if err != nil || p.YourDiscriminator != 0 && p.YourDiscriminator != m.local {
				continue
			}
			before := m.state
			m.receive(p, now)
			if before != Up && m.state == Up && p.YourDiscriminator == 0 {
				t.Errorf("%+v brought the session up", p)
			}
			if d := m.pause(0.5); d < 75*time.Millisecond {
				t.Errorf("packets are sent every %v", d)
			}
			if _, err := Parse(m.packet(false).Append(nil)); err != nil {
				t.Errorf("%+v: %v", m.packet(false), err)
			}
		}
	})
}
