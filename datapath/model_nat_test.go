package datapath

import (
	"fmt"
	"net/netip"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// This file contains the model of NAT flows.

// opened predicts that a packet opens a flow. The table selects the flow's server, and no other flow to that server has
// its source port. The source is one of snatTries that the hash determines, and each of them may be resting after a
// previous flow of the client.
func (m *model) opened(p dptest.Packet, s segment, f *lb.FrontendPlan) prediction {
	const snatTries = 6
	server := m.server(s.way, f)
	port := server.Port() + p.Dst.Port() - f.Port
	server = netip.AddrPortFrom(server.Addr(), port)
	rest := 0
	for x, e := range m.servers {
		if x.src == server && e.to == s.way.back() && !m.gives(e, s) {
			rest++
		}
	}
	var ours netip.AddrPort
	return became(p, func(out dptest.Packet) (way, error) {
		ours = out.Src
		to := way{ours, server, s.proto}
		half := m.half[to.back()]
		rests := m.servers[to.back()]
		used := rests != nil && !m.gives(rests, s) || half != nil && half.state != bpf.FlowClosed && rest < snatTries-2
		if ours.Addr() != m.fx.addr("self") || ours.Port() < 61000 || used {
			return to, fmt.Errorf("opened from %s; want a free port of this node from 61000", ours)
		}
		return to, nil
	}, func() {
		to := way{ours, server, s.proto}
		delete(m.clients, s.way)
		if old := m.servers[to.back()]; old != nil {
			if c := m.clients[old.to.back()]; c != nil && c.to == to {
				delete(m.clients, old.to.back())
			}
			delete(m.servers, to.back())
		}
		e := &entry{to: s.way.back(), state: bpf.FlowHalfOpen, clientEnd: s.seq + s.payload + 1}
		if s.stream {
			m.half[to.back()] = e
			return
		}
		m.servers[to.back()] = e
		m.clients[s.way] = &entry{to: to, state: bpf.FlowHalfOpen}
	})
}

// gives reports whether the server of an ended flow has forgotten the flow, or has it in TIME_WAIT and accepts a SYN
// from its source port (RFC 1122, 4.2.2.13; there are no timestamps here). Another client gets the port only if the
// server has nothing to resend.
func (m *model) gives(e *entry, s segment) bool {
	rests := e.fin == bpf.FinAcknowledged || e.fin == bpf.FinFirst && e.to.back() == s.way
	return s.proto == dptest.TCP && e.state == bpf.FlowClosed &&
		(e.fin == bpf.FinOver || int32(s.seq-e.ack) > 0 && rests)
}

// knownHalfOpen is for the client's packets of a half-open flow.
func (m *model) knownHalfOpen(p dptest.Packet, s segment, e *entry) prediction {
	var key way
	for x, other := range m.half {
		if other == e {
			key = x
		}
	}
	to := func(dptest.Packet) (way, error) { return key.back(), nil }
	switch {
	case s.rst:
		return became(p, to, func() {
			if e.endedBy(s) {
				e.state = bpf.FlowClosed
			}
		})
	case !s.ack:
		return became(p, to, func() {
			if s.opens() {
				e.clientEnd = s.seq + s.payload + 1
			}
		})
	case !e.answered || !m.confirms(s, e):
		return drop("bad_ack")
	}
	return became(p, to, func() {
		state, clientTag, fin := bpf.FlowEstablished, s.seq, bpf.Fin(0)
		if s.fin {
			state, fin = bpf.FlowClosing, bpf.FinFirst
		}
		if s.proto == dptest.SCTP {
			clientTag = e.ack
		}
		delete(m.half, key)
		m.clients[s.way] = &entry{to: key.back(), end: s.last(), ack: s.number, state: state, fin: fin}
		m.servers[key] = &entry{to: s.way.back(), end: s.number, ack: clientTag, state: state,
			unknown: s.proto == dptest.SCTP && s.number != e.end}
	})
}

func (m *model) confirms(s segment, e *entry) bool {
	if s.proto == dptest.SCTP {
		return s.number == e.end || e.again && s.number == e.last
	}
	return s.number-e.end >= 1 && s.number-e.end <= 0x10000 || e.again && s.number == e.last+1
}

// known is for the client's packets of any other flow.
func (m *model) known(p dptest.Packet, s segment, e *entry) prediction {
	return became(p, func(dptest.Packet) (way, error) { return e.to, nil }, func() {
		other := m.servers[e.to.back()]
		switch {
		case !s.stream:
			if e.answered && e.state == bpf.FlowHalfOpen {
				e.state, other.state = bpf.FlowEstablished, bpf.FlowEstablished
			}
		case !s.syn:
			m.follows(s, e, other)
			acknowledge(other, e)
		}
	})
}

// acknowledge records that the client of an ended flow has everything that its server sent.
func acknowledge(server, client *entry) {
	if server == nil || client == nil || server.state != bpf.FlowClosed || client.ack != server.end {
		return
	}
	switch {
	case server.fin == bpf.FinFirst:
		server.fin = bpf.FinAcknowledged
	case server.fin == bpf.FinSecond && server.to.proto == dptest.TCP:
		server.fin = bpf.FinOver
	}
}

func (m *model) replied(p dptest.Packet, s segment, e *entry) prediction {
	return became(p, func(dptest.Packet) (way, error) { return e.to, nil }, func() {
		other := m.clients[e.to.back()]
		if other != nil && other.to != s.way.back() {
			other = nil // the client has a newer flow
		}
		if s.stream {
			m.follows(s, e, other)
			acknowledge(e, other)
			return
		}
		e.answered = true
		if other != nil {
			other.answered = true
		}
	})
}

func (m *model) repliedHalfOpen(p dptest.Packet, s segment, e *entry) prediction {
	return became(p, func(dptest.Packet) (way, error) { return e.to, nil }, func() {
		switch {
		case s.rst:
			if e.refusedBy(s) {
				e.state = bpf.FlowClosed
			}
		case !s.syn || !s.ack || s.fin || e.state != bpf.FlowHalfOpen:
		case !e.answered:
			e.answered, e.end, e.ack = true, s.seq, s.number
		case e.end != s.seq:
			e.again, e.last = true, s.seq
		}
	})
}

// inWindow reports whether a sequence number is within 8 MiB of another.
func inWindow(seq, of uint32) bool { return seq-of+1<<23 <= 1<<24 }

// near reports whether a TCP segment's numbers are close to the last ones of its side.
func (s segment) near(e *entry) bool {
	return s.proto == dptest.TCP && s.ack && inWindow(s.last(), e.end) && inWindow(s.number, e.ack)
}

// isAfter reports whether a packet belongs not to a closed flow but to the next one.
func (s segment) isAfter(e *entry) bool {
	beyond := int32(s.last()-e.end) > 0
	return s.opens() || s.proto == dptest.TCP && s.ack && (beyond || !s.near(e))
}

// endedBy reports whether the server of a half-open flow must accept a RST or ABORT from the client.
func (e *entry) endedBy(s segment) bool {
	switch {
	case !e.answered:
		return false
	case s.proto == dptest.SCTP:
		return s.number == e.end
	default:
		return s.seq == e.ack
	}
}

// refusedBy reports whether the client of a half-open flow must accept a RST or ABORT from the server.
func (e *entry) refusedBy(s segment) bool {
	switch {
	case s.proto == dptest.SCTP && e.answered:
		return s.number == e.ack
	case s.proto == dptest.SCTP:
		return s.number == e.clientEnd-1
	case e.answered:
		return s.seq == e.end+1 || e.again && s.seq == e.last+1
	default:
		return s.ack && s.number == e.clientEnd
	}
}

// resets returns whether a RST ends a flow, or may be challenged.
func (e *entry) resets(s segment, other *entry) (ends, doubted bool) {
	if s.proto == dptest.SCTP {
		return s.number == e.ack, false
	}
	expected := e.end
	if other != nil {
		expected = other.ack
	}
	ahead, last := s.seq-expected, s.seq == e.end
	return ahead == 0 || last && ahead <= 1<<20, last || ahead <= 0xffff
}

// follows updates one side of an established TCP or SCTP flow with its packet.
func (m *model) follows(s segment, e, other *entry) {
	sctp := s.proto == dptest.SCTP
	both := func(set func(*entry)) {
		set(e)
		if other != nil {
			set(other)
		}
	}
	if e.unknown && s.rst {
		return
	}
	if e.unknown && s.ack {
		e.ack, e.unknown = s.number, false
	}
	if s.rst {
		switch ends, doubted := e.resets(s, other); {
		case ends:
			both(func(e *entry) { e.state = bpf.FlowClosed })
		case doubted:
			both(func(e *entry) { e.reset = true })
		}
		return
	}
	near := s.near(e)
	if s.fin && (sctp && s.number == e.ack || near) {
		if e.fin == 0 {
			e.fin = bpf.FinFirst
			if other != nil && other.fin != 0 {
				e.fin = bpf.FinSecond
			}
		}
		if e.state != bpf.FlowClosed {
			state := bpf.FlowClosed
			if other != nil && other.fin == 0 {
				state = bpf.FlowClosing
			}
			both(func(e *entry) { e.state = state })
		}
	}
	if !near {
		return
	}
	if int32(s.last()-e.end) > 0 {
		e.end = s.last()
	}
	if int32(s.number-e.ack) > 0 {
		e.ack = s.number
	}
	e.reset = false
}
