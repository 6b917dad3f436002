package datapath

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// model predicts, in Go, what happens to a packet. It is written from the documentation, not from the C code. It knows
// which table a flow is in, what confirms and ends the flow, and how each packet is translated.
type model struct {
	fx       *fixture
	services []*lb.FrontendPlan
	half     map[way]*entry // half-open flows by the tuple of the server's packets
	clients  map[way]*entry // all other flows by the tuples of both sides
	servers  map[way]*entry
}

// way is the tuple of the packets in one direction.
type way struct {
	src, dst netip.AddrPort
	proto    uint8
}

func (x way) back() way { return way{x.dst, x.src, x.proto} }

// entry is one side of a NAT flow.
type entry struct {
	to              way // tuple after translation
	end, ack        uint32
	state           bpf.FlowState
	reset, answered bool
	// again: the server of a half-open flow has answered several times; last is the number of its last answer.
	again bool
	last  uint32
	// unknown: the server's next packet will determine its numbers.
	unknown   bool
	fin       bpf.Fin
	clientEnd uint32 // half-open: number after the SYN
}

// prediction is the expected result of a packet.
type prediction struct {
	did, reason string
	check       func(in, out dptest.Packet) error
}

func drop(reason string) prediction { return prediction{did: "dropped", reason: reason} }

var notOurs = prediction{did: "passed", reason: "not_ours"}

// leftAlone is the prediction for frames to another MAC address, which no program counts.
var leftAlone = prediction{did: "passed", reason: "left alone"}

// halfOpen returns the half-open flow of a client's packet. An ended one may exist as well, with another source port.
func (m *model) halfOpen(x way) (found *entry) {
	for _, e := range m.half {
		if e.to == x.back() && (found == nil || found.state == bpf.FlowClosed) {
			found = e
		}
	}
	return found
}

// segment is the part of a packet that matters to flows.
type segment struct {
	way
	syn, ack, fin, rst bool
	seq, number        uint32 // number is what the packet acknowledges (TCP), or its tag (SCTP)
	payload            uint32
	stream             bool
}

func segmentOf(p dptest.Packet) segment {
	s := segment{way: way{p.Src, p.Dst, p.Proto}, seq: p.Seq, number: p.Ack, stream: p.Proto != dptest.UDP}
	switch p.Proto {
	case dptest.TCP:
		s.payload = uint32(len(p.Payload))
		s.syn, s.ack = p.Flags&dptest.SYN != 0, p.Flags&dptest.ACK != 0
		s.fin, s.rst = p.Flags&dptest.FIN != 0, p.Flags&dptest.RST != 0
	case dptest.SCTP: // chunk types of RFC 9260, 3.2
		s.syn, s.rst = p.Type == 1 || p.Type == 2, p.Type == 6 || p.Type == 14
		s.fin = p.Type == 7 || p.Type == 8
		s.ack = p.Type != 1 && p.Type != 9 && !s.rst
	}
	return s
}

// last returns the sequence number after the last byte.
func (s segment) last() uint32 {
	if s.proto != dptest.TCP {
		return 0
	}
	if s.fin {
		return s.seq + s.payload + 1
	}
	return s.seq + s.payload
}

func (s segment) opens() bool { return !s.stream || s.syn && !s.ack && !s.rst }

// predict drops packets that nobody may send before they open a flow or are answered.
func (m *model) predict(p dptest.Packet) prediction {
	src := p.Src.Addr()
	switch {
	case p.To != nil:
		return leftAlone
	case !src.IsGlobalUnicast() && p.Dst.Addr() == m.fx.addr("vip"):
		return drop("malformed")
	case !src.IsGlobalUnicast():
		return notOurs
	}
	pr := m.service(p)
	local := src == m.fx.addr("vip") || src == m.fx.addr("self")
	if local && (pr.did == "sent" || pr.reason == "ttl_expired") {
		return drop("source_is_local")
	}
	if len(p.Tags) > 0 && (pr.did == "sent" || pr.reason == "ttl_expired") {
		return drop("vlan_tagged") // the kernel would have moved one tag out of the frame
	}
	return pr
}

func (m *model) service(p dptest.Packet) prediction {
	fx := m.fx
	toVIP := p.Dst.Addr() == fx.addr("vip")
	s := segmentOf(p)
	ports := p.Proto == dptest.TCP || p.Proto == dptest.UDP || p.Proto == dptest.SCTP
	if p.Fragment || !ports {
		switch {
		case !toVIP:
			return notOurs
		case p.Fragment:
			return drop("fragment_not_found")
		case p.Proto == dptest.ICMP && p.Type == 8 || p.Proto == dptest.ICMPv6 && p.Type == 128:
			return prediction{"sent", "echo_reply", func(in, out dptest.Packet) error { return echoReply(fx, in, out) }}
		}
		return drop("unsupported_protocol")
	}
	if p.Dst.Port() >= 61000 {
		if e := m.servers[s.way]; e != nil {
			return m.replied(p, s, e)
		}
		if e := m.half[s.way]; e != nil {
			return m.repliedHalfOpen(p, s, e)
		}
	}
	if !toVIP {
		return notOurs
	}
	i := slices.IndexFunc(m.services, func(f *lb.FrontendPlan) bool {
		return uint8(f.Protocol) == p.Proto && p.Dst.Port() >= f.Port && p.Dst.Port() <= max(f.Port, f.Last)
	})
	if i < 0 {
		return m.refused(s, "no_frontend")
	}
	f := m.services[i]
	if f.Method != lb.MethodNAT {
		return m.dsr(p, f)
	}
	if e := m.clients[s.way]; e != nil && !(e.state == bpf.FlowClosed && s.isAfter(e)) {
		return m.known(p, s, e)
	}
	if e := m.halfOpen(s.way); e != nil && e.state != bpf.FlowClosed {
		return m.knownHalfOpen(p, s, e)
	}
	switch {
	case !s.opens():
		return m.refused(s, "no_flow")
	case len(f.Allow) > 0:
		return drop("not_allowed")
	case len(f.Targets) == 0:
		return m.refused(s, "no_backend")
	}
	return m.opened(p, s, f)
}

func (m *model) refused(s segment, reason string) prediction {
	check := func(in, out dptest.Packet) error { return unreachable(m.fx, in, out) }
	switch {
	case s.stream && s.rst:
		return drop(reason)
	case s.proto == dptest.TCP:
		check = func(in, out dptest.Packet) error { return aReset(m.fx, in, out) }
	}
	return prediction{"sent", reason, check}
}

// became predicts that a packet is sent with other addresses and one hop less. It calls then to update the model.
func became(p dptest.Packet, to func(out dptest.Packet) (way, error), then func()) prediction {
	if p.TTL == 1 {
		return drop("ttl_expired")
	}
	return prediction{"sent", "forwarded", func(in, out dptest.Packet) error {
		want, err := to(out)
		if err != nil {
			return err
		}
		in.Src, in.Dst = want.src, want.dst
		if err := onlyHops(in, out); err != nil {
			return err
		}
		then()
		return nil
	}}
}

func onlyHops(in, out dptest.Packet) error {
	if in.TTL == 0 {
		in.TTL = 64
	}
	in.TTL--
	if in.Src.Addr().Is6() {
		in.DF = false
	}
	in.Payload, out.Payload = append([]byte{}, in.Payload...), append([]byte{}, out.Payload...)
	return wrong(fmt.Sprintf("%+v", in) != fmt.Sprintf("%+v", out), "became\n%+v; want\n%+v", out, in)
}

// dsr: while the servers do not change, the table alone selects the server.
func (m *model) dsr(p dptest.Packet, f *lb.FrontendPlan) prediction {
	if p.TTL == 1 {
		return drop("ttl_expired")
	}
	return prediction{"sent", "forwarded", func(in, out dptest.Packet) error {
		if f.Method == lb.MethodDSR {
			return onlyHops(in, out)
		}
		if want := m.server(way{p.Src, p.Dst, p.Proto}, f).Addr(); out.Dst.Addr() != want || out.Inner == nil {
			return fmt.Errorf("went to %s; want %s", out.Dst, want)
		}
		return onlyHops(in, *out.Inner)
	}}
}

// server returns the target that a frontend's table selects for a new flow, by the NH hash of its key, as the programs
// do.
func (m *model) server(x way, f *lb.FrontendPlan) netip.AddrPort {
	k := bpf.HashKeys(m.fx.o.HashSeed)
	word := func(a netip.Addr, i int) uint32 {
		b := a.As16()
		return binary.LittleEndian.Uint32(b[4*i:])
	}
	pair := func(a, b uint32, i int) uint64 { return uint64(a+k[i]) * uint64(b+k[i+1]) }
	src, dst := x.src.Addr(), x.dst.Addr()
	ports := uint32(bpf.Swap(x.src.Port()))<<16 | uint32(bpf.Swap(x.dst.Port()))
	h := pair(ports, uint32(x.proto), 4)
	if src.Is4() {
		h += pair(word(src, 3), 0, 0) + pair(word(dst, 3), 0, 6)
	} else {
		h += pair(word(src, 3), word(src, 0), 0) + pair(word(src, 1), word(src, 2), 2)
		h += pair(word(dst, 3), word(dst, 0), 6) + pair(word(dst, 1), word(dst, 2), 8)
	}
	h = (h ^ h>>32) * 0x9e3779b97f4a7c15 >> 32
	table := f.Table()
	return f.Targets[table[h*uint64(len(table))>>32]].Addr
}
