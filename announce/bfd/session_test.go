package bfd

import (
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var start = time.Unix(1_000_000, 0)

const interval100 = 100 * time.Millisecond

func machines() (a, b *machine) {
	return newMachine(1, interval100, 3), newMachine(2, interval100, 3)
}

// pass passes a packet from one machine to the other, and returns any response.
func pass(t *testing.T, from, to *machine, now time.Time) {
	t.Helper()
	p := must.Get(Parse(from.packet(false).Append(nil)))(t)
	if to.receive(p, now) {
		from.receive(to.packet(true), now)
	}
}

// up brings both sessions up with three packets (RFC 5880, section 6.2) and one poll sequence each.
func up(t *testing.T) (a, b *machine) {
	t.Helper()
	a, b = machines()
	for range 2 {
		pass(t, a, b, start)
		pass(t, b, a, start)
	}
	must.Need(t, a.state == Up && b.state == Up, "states %v and %v, want up", a.state, b.state)
	pass(t, a, b, start)
	pass(t, b, a, start)
	must.Need(t, a.polls == 0 && b.polls == 0, "a poll sequence did not end")
	return a, b
}

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
		must.True(t, m.state == c.want && m.diag == c.diag,
			"%v, received %v: %v, %v; want %v, %v", c.state, c.received, m.state, m.diag, c.want, c.diag)
	}
}

// A final bit that was not requested confirms nothing. The next change starts a poll sequence as usual.
func TestUnaskedFinal(t *testing.T) {
	m, _ := up(t)
	m.receive(Packet{State: Up, Final: true, Multiplier: 3, MyDiscriminator: 2, YourDiscriminator: 1}, start)
	m.configure(2*interval100, 3)
	p := m.packet(false)
	must.True(t, p.Poll && m.polls == 1, "poll %t, %d polls; want one", p.Poll, m.polls)
}

// A session that is administratively down answers no polls, and packets do not restart its detection time.
func TestAdminDownIsSilent(t *testing.T) {
	m, _ := up(t)
	m.end()
	heard := m.heard
	poll := Packet{State: Up, Poll: true, Multiplier: 3, MyDiscriminator: 2, YourDiscriminator: 1}
	must.True(t, !m.receive(poll, start.Add(time.Second)) && m.heard == heard && m.state == AdminDown,
		"state %v, heard %v, was %v", m.state, m.heard, heard)
}

// A packet proves that the path works in both directions only while both sides are up.
func TestBothUp(t *testing.T) {
	for _, c := range []struct {
		state, received State
		want            bool
	}{
		{Up, Up, true}, {Init, Up, true}, {Up, Init, false}, {Up, Down, false}, {Up, AdminDown, false},
		{Down, Init, false}, {Down, Up, false}, {Init, Init, false}, {AdminDown, Up, false},
	} {
		m := newMachine(1, interval100, 3)
		m.state = c.state
		m.receive(Packet{State: c.received, Multiplier: 3, MyDiscriminator: 2, YourDiscriminator: 1}, start)
		got := m.bothUp.Equal(start)
		must.True(t, got == c.want, "%v, received %v: %t, want %t", c.state, c.received, got, c.want)
	}
}

// A session that is not up sends at most one packet per second (section 6.8.3). Once up, it uses the intervals of both
// sides.
func TestIntervals(t *testing.T) {
	a, _ := machines()
	d := a.pause(0.999)
	must.True(t, d >= 990*time.Millisecond && d <= time.Second, "down: %v, want at most 1s", d)
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
	d = a.pause(0.999)
	must.True(t, d <= 90*time.Millisecond, "multiplier 1: %v, want at most 90ms (section 6.8.7)", d)
	b.configure(300*time.Millisecond, 3) // its next packet announces it
	pass(t, b, a, start)
	d = a.pause(1)
	must.True(t, d >= 270*time.Millisecond && d <= 300*time.Millisecond, "the neighbor receives every 300ms: %v", d)
	must.Row(t, "detection time", 900*time.Millisecond, a.detectionTime())
}

// Sections 6.8.3 and 6.8.12: a session's parameters change while it is up. A longer transmit or shorter receive
// interval takes effect once the neighbor has confirmed it, other changes immediately.
func TestConfigure(t *testing.T) {
	const interval50, interval300, interval500 = 50 * time.Millisecond, 300 * time.Millisecond, 500 * time.Millisecond
	a, b := up(t)
	is := func(what string, tx, detection time.Duration, polls int) {
		t.Helper()
		if a.txInterval() != tx || a.detectionTime() != detection || a.polls != polls || a.state != Up {
			t.Errorf("%s: sends every %v, detects in %v, %d polls, %v; want %v, %v, %d, up", what, a.txInterval(),
				a.detectionTime(), a.polls, a.state, tx, detection, polls)
		}
	}
	is("before", interval100, 3*interval100, 0)
	a.configure(interval100, 5)
	is("multiplier", interval100, 3*interval100, 0)
	pass(t, a, b, start)
	must.Row(t, "the neighbor detects in", 5*interval100, b.detectionTime())
	a.configure(interval300, 5)
	is("longer, not confirmed", interval100, 3*interval300, 1)
	p := a.packet(false)
	must.True(t, p.Poll && p.DesiredMinTx == interval300 && p.RequiredMinRx == interval300, "packet %+v", p)
	pass(t, a, b, start)
	is("longer, confirmed", interval300, 3*interval300, 0)
	must.Row(t, "the neighbor detects in", 5*interval300, b.detectionTime())
	b.configure(interval50, 3)
	pass(t, b, a, start)
	is("the neighbor sends faster", interval300, 3*interval300, 0)
	a.configure(interval100, 5)
	is("shorter, not confirmed", interval100, 3*interval300, 1)
	pass(t, a, b, start)
	is("shorter, confirmed", interval100, 3*interval100, 0)

	a.configure(interval500, 5)
	a.configure(interval300, 5)
	is("two changes", interval100, 3*interval500, 2)
	pass(t, a, b, start)
	is("two changes, the first confirmed", interval100, 3*interval500, 1)
	pass(t, a, b, start)
	is("two changes, confirmed", interval300, 3*interval300, 0)

	a.configure(interval100, 3)
	a.expire(start.Add(time.Minute))
	a.configure(interval50, 3)
	must.True(t, a.state == Down && a.txInterval() == slowInterval && !a.packet(false).Poll, "down: %+v", a)
	for range 3 {
		pass(t, b, a, start)
		pass(t, a, b, start)
	}
	is("up again", interval50, 3*interval50, 0)
}

// A session continues, with its discriminator, unless its address, source or device changes.
func TestSetKeepsSessions(t *testing.T) {
	m := must.Get(New(Options{}))(t)
	n := Neighbor{
		Addr: netip.MustParseAddr("192.0.2.1"), Multihop: true, MinTTL: 254, Interval: interval100, Multiplier: 3,
	}
	m.Set([]Neighbor{n})
	s := m.sessions[0]
	s.enter(Up, DiagNone)
	n.MinTTL, n.Interval, n.Multiplier = 250, 2*interval100, 5
	m.Set([]Neighbor{n})
	must.True(t, m.sessions[0] == s && s.Neighbor == n && s.state == Up && s.interval == n.Interval &&
		s.multiplier == 5, "%+v, %+v", s.Neighbor, s.machine)
	near := Neighbor{Addr: netip.MustParseAddr("127.0.0.1"), Interval: time.Second, Multiplier: 3}
	m.Set([]Neighbor{near})
	s, near.Source = m.sessions[0], near.Addr // the address that the kernel chose
	m.Set([]Neighbor{near})
	must.True(t, m.sessions[0] == s && s.Source == near.Source, "the session has ended for the source that it has")
	for _, change := range []func(*Neighbor){
		func(n *Neighbor) { n.Source = netip.MustParseAddr("192.0.2.2") },
		func(n *Neighbor) { n.Device = "eth0" },
		func(n *Neighbor) { n.Multihop = false },
	} {
		other := n
		change(&other)
		must.True(t, other.key() != n.key(), "%+v has the session of %+v", other, n)
	}
}

func TestDetection(t *testing.T) {
	a, b := up(t)
	must.Equal(t, 300*time.Millisecond, a.expires().Sub(start))
	a.expire(start.Add(299 * time.Millisecond))
	must.True(t, a.state == Up, "the session failed before its detection time")
	pass(t, b, a, start.Add(299*time.Millisecond))
	a.expire(start.Add(598 * time.Millisecond))
	must.True(t, a.state == Up, "a packet did not renew the session")
	a.expire(start.Add(599 * time.Millisecond))
	p := a.packet(false)
	must.True(t, a.state == Down && p.Diag == DiagTimeExpired && p.YourDiscriminator == 0,
		"after the detection time: %+v", p)
	must.True(t, a.expires().IsZero(), "a session that failed expires again")
	// The neighbor receives the packet, and both come up again.
	for range 3 {
		pass(t, a, b, start.Add(time.Second))
		pass(t, b, a, start.Add(time.Second))
	}
	must.True(t, a.state == Up && b.state == Up, "states %v and %v, want up again", a.state, b.state)
}

func TestPlannedEnd(t *testing.T) {
	a, b := up(t)
	a.end()
	p := a.packet(false)
	must.True(t, p.State == AdminDown && p.Diag == DiagAdminDown && !p.Poll, "packet %+v", p)
	pass(t, a, b, start)
	must.True(t, b.state == Down && b.diag == DiagNeighborDown && b.remoteDiag == DiagAdminDown,
		"the neighbor: %v, %v", b.state, b.diag)
	pass(t, b, a, start)
	must.True(t, a.state == AdminDown, "state %v after a packet, want admin-down", a.state)
}

// Section 6.8.7: on demand, a session sends no periodic packets, but polls and answers polls.
func TestDemandAndPoll(t *testing.T) {
	a, _ := up(t)
	demand := Packet{
		State: Up, Demand: true, Multiplier: 3, MyDiscriminator: 2, YourDiscriminator: 1, RequiredMinRx: interval100,
		DesiredMinTx: interval100,
	}
	a.receive(demand, start)
	must.True(t, !a.periodic(), "periodic packets are sent although the neighbor demands none")
	demand.Poll = true
	must.True(t, a.receive(demand, start), "a poll is not answered")
	p := a.packet(true)
	must.True(t, p.Final && !p.Poll, "answer %+v", p)
	demand.State = Down
	a.receive(demand, start)
	must.True(t, a.periodic(), "no packets although the session is down")
	demand.RequiredMinRx = 0
	a.receive(demand, start)
	must.True(t, !a.periodic(), "packets are sent to a neighbor that wants none")
}

// Whatever arrives, the session neither sends packets that its own parser rejects, nor comes up unless a neighbor sends
// its discriminator.
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
			must.True(t, before == Up || m.state != Up || p.YourDiscriminator > 0, "%+v brought the session up", p)
			d := m.pause(0.5)
			must.True(t, d >= 75*time.Millisecond, "packets are sent every %v", d)
			must.Get(Parse(m.packet(false).Append(nil)))(t)
		}
	})
}
