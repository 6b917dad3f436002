package bfd

import "time"

// slowInterval is the minimum transmit interval while a session is not up (RFC 5880, section 6.8.3).
const slowInterval = time.Second

// machine is the state machine of one session (RFC 5880, section 6.8). It uses neither clock nor sockets: the time is
// an argument, and the caller sends the result of packet.
type machine struct {
	interval   time.Duration // desired minimum transmit and required minimum receive interval when up
	multiplier uint8
	// Until the neighbor has confirmed a changed interval, packets are sent at the shortest, and expected at the
	// longest, interval since the last confirmed one (section 6.8.3).
	shortest, longest time.Duration

	state, remoteState State
	diag, remoteDiag   Diag
	local, remote      uint32 // discriminators; remote is 0 if unknown
	polls              int    // outstanding final bits; if any, packets have the poll bit
	remoteDemand       bool
	remoteMultiplier   uint8
	remoteMinTx        time.Duration
	remoteMinRx        time.Duration
	heard              time.Time // last valid packet; zero if none since the detection time expired
	bothUp             time.Time // last packet while both sides were up; zero if none
}

// newMachine returns a session that is down. local must be nonzero and unique.
func newMachine(local uint32, interval time.Duration, multiplier uint8) *machine {
	return &machine{
		interval: interval, multiplier: multiplier, shortest: interval, longest: interval,
		state: Down, remoteState: Down, local: local,
		remoteMinRx: time.Microsecond, // section 6.8.1
	}
}

// configure changes the parameters without ending the session. A changed multiplier needs no poll sequence (section
// 6.8.12). A change during a poll sequence needs another sequence, because the next final bit may confirm an earlier
// packet.
func (m *machine) configure(interval time.Duration, multiplier uint8) {
	m.multiplier = multiplier
	if interval == m.interval {
		return
	}
	m.interval = interval
	if m.state != Up { // the poll sequence starts when the session comes up
		m.confirmed()
		return
	}
	m.shortest, m.longest = min(m.shortest, interval), max(m.longest, interval)
	m.polls = min(m.polls+1, 2)
}

// confirmed makes the interval effective.
func (m *machine) confirmed() { m.shortest, m.longest = m.interval, m.interval }

// minTx returns the desired minimum transmit interval.
func (m *machine) minTx() time.Duration {
	if m.state != Up {
		return max(m.interval, slowInterval)
	}
	return m.interval
}

// receive applies a packet for this session (section 6.8.6) and reports whether to respond with the final bit.
func (m *machine) receive(p Packet, now time.Time) (answer bool) {
	m.remote, m.remoteState, m.remoteDiag = p.MyDiscriminator, p.State, p.Diag
	m.remoteDemand, m.remoteMultiplier = p.Demand, p.Multiplier
	m.remoteMinTx, m.remoteMinRx = p.DesiredMinTx, p.RequiredMinRx
	if p.Final && m.polls > 0 {
		if m.polls--; m.polls == 0 {
			m.confirmed()
		}
	}
	if m.state == AdminDown {
		return false
	}
	m.heard = now
	switch {
	case p.State == AdminDown:
		if m.state != Down {
			m.enter(Down, DiagNeighborDown)
		}
	case m.state == Down && p.State == Down:
		m.enter(Init, DiagNone)
	case m.state == Down && p.State == Init, m.state == Init && p.State >= Init:
		m.enter(Up, DiagNone)
	case m.state == Up && p.State == Down:
		m.enter(Down, DiagNeighborDown)
	}
	if m.state == Up && p.State == Up {
		m.bothUp = now
	}
	return p.Poll
}

// enter changes the state. When the session comes up, its intervals change, so a poll sequence starts (section 6.8.3).
func (m *machine) enter(s State, d Diag) {
	m.state, m.diag = s, d
	m.confirmed()
	m.polls = 0
	if s == Up {
		m.polls = 1
	}
}

// end makes the session administratively down.
func (m *machine) end() { m.enter(AdminDown, DiagAdminDown) }

// detectionTime returns how long the session survives without a packet (section 6.8.4), or 0 if none was received.
func (m *machine) detectionTime() time.Duration {
	return time.Duration(m.remoteMultiplier) * max(m.longest, m.remoteMinTx)
}

// expires returns when the session fails unless a packet arrives, or zero if it cannot fail.
func (m *machine) expires() time.Time {
	if m.heard.IsZero() {
		return time.Time{}
	}
	return m.heard.Add(m.detectionTime())
}

func (m *machine) expire(now time.Time) {
	at := m.expires()
	if at.IsZero() || now.Before(at) {
		return
	}
	m.heard, m.remote = time.Time{}, 0
	if m.state == Init || m.state == Up {
		m.enter(Down, DiagTimeExpired)
		m.remoteState = Down
	}
}

// periodic reports whether periodic packets are sent (section 6.8.7).
func (m *machine) periodic() bool {
	return m.remoteMinRx > 0 && (m.polls > 0 || !m.remoteDemand || m.state != Up || m.remoteState != Up)
}

// txInterval returns the maximum time between periodic packets.
func (m *machine) txInterval() time.Duration {
	own := m.minTx()
	if m.state == Up {
		own = m.shortest
	}
	return max(own, m.remoteMinRx)
}

// pause returns the time until the next periodic packet. random is in [0, 1): packets are sent up to 25 % early, and
// with a multiplier of 1 at least 10 % early (section 6.8.7).
func (m *machine) pause(random float64) time.Duration {
	least, span := 0.75, 0.25
	if m.multiplier == 1 {
		span = 0.15
	}
	return time.Duration(float64(m.txInterval()) * (least + span*random))
}

// packet returns the next packet to send. final says that it answers a poll.
func (m *machine) packet(final bool) Packet {
	return Packet{
		State: m.state, Diag: m.diag, Poll: m.polls > 0 && !final, Final: final, Multiplier: m.multiplier,
		MyDiscriminator: m.local, YourDiscriminator: m.remote, DesiredMinTx: m.minTx(), RequiredMinRx: m.interval,
	}
}
