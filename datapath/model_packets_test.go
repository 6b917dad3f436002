package datapath

import (
	"flag"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// newModel creates a fixture with services of every kind, and its model.
func newModel(t *testing.T, h hookName, v6 bool) *model {
	fx := shared(t, h, v6, func(o *Options) {
		acceptTunnels(o)
		o.Timeouts = Timeouts{
			HalfOpen: time.Hour, Established: time.Hour, Closing: time.Hour, Closed: time.Hour, UDP: time.Hour,
		}
	})
	m := &model{fx: fx, half: map[way]*entry{}, clients: map[way]*entry{}, servers: map[way]*entry{}}
	put := func(name string, port lb.Port, change func(*lb.Service), backends ...string) {
		m.services = append(m.services, fx.serve(func(s *lb.Service) {
			s.Name, s.Ports[0].Port = name, port
			change(s)
		}, backends...))
	}
	as := func(method lb.Method) func(*lb.Service) {
		return func(s *lb.Service) { s.Method, s.Encap = method, lb.EncapGUE }
	}
	put("web", lb.Port{Port: 80, Target: 8080, Protocol: lb.TCP}, as(lb.MethodNAT), "b1", "b2")
	put("dns", lb.Port{Port: 53, Target: 5353, Protocol: lb.UDP}, as(lb.MethodNAT), "b1", "b2")
	put("sctp", lb.Port{Port: 36412, Target: 36412, Protocol: lb.SCTP}, as(lb.MethodNAT), "b1", "b2")
	put("range", lb.Port{Port: 8000, Last: 8009, Target: 9000, Protocol: lb.TCP}, as(lb.MethodNAT), "b1")
	put("direct", lb.Port{Port: 90, Target: 90, Protocol: lb.TCP}, as(lb.MethodDSR), "b1", "b2")
	put("tunnel", lb.Port{Port: 91, Target: 91, Protocol: lb.UDP}, as(lb.MethodTunnel), "b1", "b2")
	put("ipip", lb.Port{Port: 94, Target: 94, Protocol: lb.UDP}, tunnel(lb.EncapIPIP), "b1", "b2")
	put("restricted", lb.Port{Port: 92, Target: 92, Protocol: lb.TCP}, func(s *lb.Service) {
		s.Allow = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	}, "b1")
	put("empty", lb.Port{Port: 93, Target: 93, Protocol: lb.TCP}, as(lb.MethodNAT))
	return m
}

// packet returns a random packet that is likely to match the datapath's state.
func (m *model) packet(rnd *rand.Rand) dptest.Packet {
	fx := m.fx
	one := func(ports ...uint16) uint16 { return ports[rnd.IntN(len(ports))] }
	from := fx.at([]string{"client", "router"}[rnd.IntN(2)], uint16(20000+rnd.IntN(6)))
	port := one(80, 80, 80, 53, 53, 36412, 36412, 8000, 8009, 8010, 90, 91, 92, 93, 94, 7)
	p := dptest.Packet{Src: from, Dst: fx.at("vip", port), TTL: 64, DF: true,
		Payload: make([]byte, rnd.IntN(3)*rnd.IntN(100))}
	for i := range p.Payload {
		p.Payload[i] = byte(rnd.Uint32())
	}
	switch p.Dst.Port() {
	case 53, 91, 94:
		p.Proto = dptest.UDP
	case 36412:
		p.Proto = dptest.SCTP
	default:
		p.Proto = dptest.TCP
	}
	if rnd.IntN(3) == 0 { // an answer
		if keys := m.replies(); len(keys) > 0 {
			x := keys[rnd.IntN(len(keys))]
			p.Src, p.Dst, p.Proto = x.src, x.dst, x.proto
		}
	}
	p.Seq, p.Ack = rnd.Uint32(), rnd.Uint32()
	p.Flags = []uint8{dptest.SYN, dptest.SYN, dptest.ACK, dptest.ACK, dptest.ACK | dptest.PSH,
		dptest.SYN | dptest.ACK, dptest.FIN | dptest.ACK, dptest.RST, dptest.RST | dptest.ACK, 0}[rnd.IntN(10)]
	p.Type = []uint8{1, 1, 2, 2, 10, 11, 0, 3, 7, 8, 6, 14, 9}[rnd.IntN(13)]
	if rnd.IntN(4) > 0 {
		m.number(rnd, &p)
	}
	if p.Proto != dptest.SCTP {
		p.Type = 0
	}
	if p.Proto != dptest.TCP {
		p.Flags = 0
	}
	if p.Proto == dptest.UDP {
		p.Seq, p.Ack, p.NoSum = 0, 0, !fx.v6 && rnd.IntN(4) == 0
	}
	if p.Proto == dptest.TCP {
		p.Window = uint16(rnd.Uint32())
	}
	if p.TOS = uint8(rnd.Uint32()); fx.v6 {
		p.Label = rnd.Uint32() & 0xfffff
	} else {
		p.ID = uint16(rnd.Uint32())
	}
	m.vary(rnd, &p)
	return p
}

// number gives a packet sequence numbers that fit its flow, or nearly.
func (m *model) number(rnd *rand.Rand, p *dptest.Packet) {
	x := way{p.Src, p.Dst, p.Proto}
	near := func(n uint32) uint32 {
		return n + []uint32{0, 0, 0, 1, uint32(rnd.IntN(100)), 1 << 23, 1<<23 + 1, 1 << 30}[rnd.IntN(8)]
	}
	one := func(tables ...map[way]*entry) *entry {
		for _, t := range tables {
			if e := t[x]; e != nil {
				return e
			}
		}
		return nil
	}
	e := one(m.clients, m.servers)
	half := m.halfOpen(x)
	switch {
	case e != nil:
		p.Seq, p.Ack = near(e.end), near(e.ack)
	case half != nil:
		p.Seq, p.Ack = half.clientEnd, half.end
		if p.Proto == dptest.TCP {
			p.Ack += 1 + uint32(rnd.IntN(100))
		}
	}
}

// vary makes some packets unusual.
func (m *model) vary(rnd *rand.Rand, p *dptest.Packet) {
	fx := m.fx
	switch rnd.IntN(20) {
	case 0:
		p.TTL = 1
	case 1:
		p.TTL = 2
	case 2:
		p.Tags = []uint16{7}
	case 3:
		p.Tags = []uint16{7, 8}
	case 4:
		p.Fragment = true
	case 5:
		p.Dst = netip.AddrPortFrom(fx.addr("elsewhere"), p.Dst.Port())
	case 6:
		p.Dst = fx.at("self", uint16(61000+rnd.IntN(4000)))
	case 7:
		p.Options = p.Proto == dptest.TCP
	case 8:
		*p = dptest.Packet{Src: p.Src, Dst: p.Dst, TTL: 64, Proto: 47, Payload: p.Payload}
	case 9:
		*p = icmp(8, 128)(fx)
	case 10:
		*p = icmp(13, 127)(fx)
	case 11:
		if p.Dst.Port() != 90 || segmentOf(*p).opens() { // only a sample of others is checked
			p.Src = fx.at([]string{"vip", "self"}[rnd.IntN(2)], p.Src.Port())
		}
	case 12:
		loopback := netip.IPv6Loopback()
		if !fx.v6 {
			loopback = netip.MustParseAddr("127.0.0.1")
		}
		p.Src = netip.AddrPortFrom(loopback, p.Src.Port())
	case 13:
		p.To = net.HardwareAddr{2, 0, 0, 0, 0, 7}
	}
}

func (m *model) replies() (keys []way) {
	for _, table := range []map[way]*entry{m.half, m.servers} {
		for x := range table {
			keys = append(keys, x)
		}
	}
	slices.SortFunc(keys, func(a, b way) int { return a.dst.Compare(b.dst)*2 + a.src.Compare(b.src) })
	return keys
}

var seed = flag.Uint64("seed", 0, "makes a random test the same as one that printed it; 0: any")

// seeded returns a random number generator. A failed test prints how to repeat its numbers.
func seeded(t *testing.T) *rand.Rand {
	used := *seed
	if used == 0 {
		used = rand.Uint64()
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("again: -run '^%s$' -seed %d", t.Name(), used)
		}
	})
	return rand.New(rand.NewPCG(used, 0))
}

var modelPackets = flag.Int("packets", 6000, "how many packets the model predicts, for each hook and family")

// The model and the programs agree on every packet: on the action, the reason, and every field of the output.
func TestModel(t *testing.T) {
	t.Parallel()
	packets := *modelPackets
	each(t, func(t *testing.T, h hookName, v6 bool) {
		t.Parallel()
		m := newModel(t, h, v6)
		rnd := seeded(t)
		seen, others := map[string]int{}, 0
		for i := range packets {
			p := m.packet(rnd)
			want := m.predict(p)
			got := m.fx.run(p.Frame())
			if want.reason == leftAlone.reason {
				want.reason = got.reason // explain's reason, because it ignores MAC addresses
				others++
			}
			if got.did != want.did || got.reason != want.reason {
				x := way{p.Src, p.Dst, p.Proto}
				t.Fatalf("packet %d: %s: %s; want %s: %s\n%+v\nof the flow %+v, %+v, half-open %+v",
					i, got.did, got.reason, want.did, want.reason, p, m.clients[x], m.servers[x], m.halfOpen(x))
			}
			if want.check != nil {
				err := want.check(p, got.out)
				must.Need(t, err == nil, "packet %d (%s): %v\n%+v", i, want.reason, err, p)
			}
			seen[got.reason]++
		}
		t.Log(seen, others)
		must.True(t, others >= 10, "only %d frames were for another MAC address", others)
		for _, reason := range []string{"forwarded", "not_ours", "no_flow", "bad_ack", "no_frontend", "not_allowed",
			"no_backend", "fragment_not_found", "unsupported_protocol", "echo_reply", "ttl_expired",
			"source_is_local", "malformed"} {
			must.True(t, seen[reason] >= 10,
				"only %d packets were %s: the generator covers too little", seen[reason], reason)
		}
	})
}
