package datapath

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// nodes serves VIP:80 with pods on these nodes. "self" is this node with pod b1; the other nodes' pods are "far". A
// node whose name begins with "-" receives no new flows.
func (fx *fixture) nodes(proto lb.Protocol, names ...string) {
	fx.t.Helper()
	fx.spread(proto, false, names...)
}

// spread is nodes for a Service whose packets routers may send to any node (AnyNode).
func (fx *fixture) spread(proto lb.Protocol, anyNode bool, names ...string) {
	fx.t.Helper()
	fx.spreadAllowed(proto, anyNode, nil, names...)
}

var bothFamilies = []lb.Family{lb.IPv4, lb.IPv6}

// spreadAllowed is spread with the sources that may open flows.
func (fx *fixture) spreadAllowed(proto lb.Protocol, anyNode bool, allow []netip.Prefix, names ...string) {
	fx.t.Helper()
	fx.change(func(s *lb.Service) {
		s.Ports[0].Protocol = proto
		s.NodeForwarding.AnyNode, s.Allow = anyNode, allow
		if anyNode {
			s.Ports[0].DropWhenEmpty = bothFamilies
		}
	}, names...)
}

// change is nodes for a TCP service as modified by change.
func (fx *fixture) change(change func(*lb.Service), names ...string) {
	fx.t.Helper()
	s := &lb.Service{
		Name: "web", VIPs: []netip.Addr{fx.addr("vip")},
		Ports:     lb.PortsOn(nil, lb.Port{Port: 80, Target: 80, Protocol: lb.TCP}),
		Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Check: lb.CheckSpec{Type: lb.CheckNone},
		NodeForwarding: lb.NodeForwarding{Enabled: true},
	}
	change(s)
	port := &s.Ports[0]
	for _, name := range names {
		name, leaving := strings.CutPrefix(name, "-")
		b := lb.Backend{Addr: fx.addr("far"), Port: 8080, Weight: 1}
		if name == "self" {
			b.Addr, b.Local = fx.addr("b1"), true
		}
		if b.Node = fx.addr("self"); name != "self" {
			b.Node = fx.nodeAddr(name)
		}
		port.Nodes = append(port.Nodes, lb.Node{Addr: b.Node, Local: b.Local})
		if !leaving {
			port.Backends = append(port.Backends, b)
		}
	}
	fx.apply(lb.Delta{Put: lb.Build(s, nil, lb.Drains{}).Frontends})
}

// nodeAddr returns a node's address. The name is a host of the fixture, or a number N for 192.0.2.N or 2001:db8::N.
func (fx *fixture) nodeAddr(name string) netip.Addr {
	if _, ok := v4[name]; ok {
		return fx.addr(name)
	}
	if fx.v6 {
		return netip.MustParseAddr("2001:db8::" + name)
	}
	return netip.MustParseAddr("192.0.2." + name)
}

// flowOf returns the first packet of a flow that is delivered here or sent to another node. It leaves no entries.
func (fx *fixture) flowOf(here bool) dptest.Packet {
	fx.t.Helper()
	for i := range 100 {
		p := fx.on(i, dptest.TCP, dptest.SYN)
		if r := fx.run(p.Frame()); (r.did == "passed") == here {
			return p
		}
	}
	fx.t.Fatalf("no flow of 100 is delivered here: %t", here)
	return dptest.Packet{}
}

// nodeList is the list of nodes that a packet is sent to in turn.
type nodeList struct {
	passed bool
	nodes  []netip.Addr
}

func (a nodeList) String() string { return fmt.Sprintf("%v, relayed: %t", a.nodes, a.passed) }

func nodesOf(out dptest.Packet) (a nodeList, err error) {
	a.nodes = []netip.Addr{out.Dst.Addr()}
	size := len(out.Dst.Addr().AsSlice())
	if n := len(out.Private); n < privateHead || out.Private[0] != 0x5d || out.Private[1] > 3 {
		return a, fmt.Errorf("malformed head of the private data %x", out.Private)
	} else if alone := out.Private[1] == 0; alone != (n == privateHead) || !alone && n != privateHead+3*size {
		return a, fmt.Errorf("private data of unexpected length %d: %x", n, out.Private)
	}
	for i := range int(out.Private[1]) {
		next, _ := netip.AddrFromSlice(out.Private[privateHead+i*size:][:size])
		a.nodes = append(a.nodes, next)
	}
	a.passed = out.Private[2] == 1
	return a, nil
}

// privateHead is the size of the private data before the list: a magic byte, the length of the list, whether a node has
// relayed the packet, padding, and the token (bpf/encap.h).
const privateHead = 4 + 8

// chained returns GUE private data with these nodes.
func (fx *fixture) chained(passed bool, next ...string) []byte {
	size := len(fx.addr("self").AsSlice())
	b := make([]byte, privateHead, privateHead+3*size)
	b[0], b[1], b[2] = 0x5d, byte(len(next)), bpf.Truth(passed)
	for _, name := range next {
		b = append(b, fx.nodeAddr(name).AsSlice()...)
	}
	if len(next) == 0 {
		return b
	}
	return b[:cap(b)]
}

// sentTo checks which nodes a packet is sent to.
func (fx *fixture) sentTo(when string, r result, in dptest.Packet, passed bool, nodes ...string) {
	fx.t.Helper()
	want := nodeList{passed: passed}
	for _, name := range nodes {
		want.nodes = append(want.nodes, fx.nodeAddr(name))
	}
	if r.did != "sent" || r.reason != "forwarded" || r.out.Inner == nil {
		fx.t.Errorf("%s: %s: %s: %+v", when, r.did, r.reason, r.out)
		return
	}
	got, err := nodesOf(r.out)
	must.True(fx.t, err == nil && got.passed == want.passed && slices.Equal(got.nodes, want.nodes),
		"%s: sent to %s (%v); want %s", when, got, err, want)
	must.True(fx.t, r.out.Src.Addr() == fx.addr("self"), "%s: the outer source is %s", when, r.out.Src)
	if err := onlyHops(in, *r.out.Inner); err != nil {
		fx.t.Errorf("%s: %v", when, err)
	}
}

// A node delivers flows whose slot has its own id. It sends other packets unchanged to the node in their slot, and
// stores no entries for them. Flows survive each change of the table, because packets are passed to the previous nodes
// of their slot.
func TestSpread(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, func(o *Options) { o.Delivers = true })
		fx.nodes(lb.TCP, "self", "b2")
		local, remote := fx.flowOf(true), fx.flowOf(false)
		fx.reset()
		fx.nodes(lb.TCP, "self", "b2")
		r := fx.run(local.Frame())
		must.True(t, r.did == "passed" && r.out.Dst == fx.at("b1", 8080) && r.out.Src == local.Src,
			"a flow of this node: %s: %s: %+v", r.did, r.reason, r.out)
		fx.sentTo("a SYN of another node's", fx.run(remote.Frame()), remote, false, "b2")
		fx.out(dptest.Packet{Src: fx.at("b1", 8080), Dst: local.Src, Proto: dptest.TCP,
			Flags: dptest.SYN | dptest.ACK, Seq: 5000})
		local.Flags, remote.Flags = dptest.ACK, dptest.ACK
		syn := remote
		syn.Flags = dptest.SYN
		delivered := func(when string) {
			t.Helper()
			r := fx.run(local.Frame())
			must.True(t, r.did == "passed" && r.out.Dst == fx.at("b1", 8080), "%s: %s: %s", when, r.did, r.reason)
		}
		delivered("confirmed")
		fx.sentTo("nothing changed", fx.run(remote.Frame()), remote, false, "b2")

		fx.nodes(lb.TCP, "b2", "-self")
		delivered("no longer a target")
		fx.nodes(lb.TCP, "self", "-b2")
		delivered("the only target")
		fx.sentTo("its node accepts no new flows", fx.run(remote.Frame()), remote, true, "b2")
		fx.wantDid("a SYN, the only target", fx.on(200, dptest.TCP, dptest.SYN), "passed")
		fx.nodes(lb.TCP, "router", "-self", "-b2")
		delivered("others are the target")
		fx.sentTo("two nodes had its slot", fx.run(remote.Frame()), remote, false, "router", "b2")
		fx.sentTo("a SYN, two nodes had its slot", fx.run(syn.Frame()), syn, false, "router")
		fx.nodes(lb.TCP, "-router", "-self", "-b2")
		delivered("no targets")
		fx.sentTo("no targets", fx.run(remote.Frame()), remote, false, "router", "b2")
		fx.wantReason("a SYN, no targets", syn, "no_backend")
		fx.close()
		fx.open()
		fx.nodes(lb.TCP, "b2", "router", "self")
		delivered("another agent")
		got, _ := nodesOf(fx.run(remote.Frame()).out)
		must.True(t, slices.Contains(got.nodes, fx.addr("b2")), "another agent: sent to %s", got)
		fx.nodes(lb.TCP, "self")
		fx.wantReason("its node has no pods", remote, "no_flow")
		must.Row(t, "entries of flows that other nodes deliver", 0, len(fx.dsrFlows()))
	})
}

// A client reuses the port of a closed connection on this node after the slot has moved to another node. This node has
// not looked up the SYN, so packets with the new connection's numbers must not go to the closed one's server.
func TestSpreadUsesPortsAgain(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.Delivers = true }, func(t *testing.T, fx *fixture) {
		fx.nodes(lb.TCP, "self", "b2")
		p := fx.flowOf(true)
		fx.reset()
		fx.nodes(lb.TCP, "self", "b2")
		send := func(flags uint8, seq, ack uint32) result {
			p.Flags, p.Seq, p.Ack, p.Payload = flags, seq, ack, nil
			return fx.run(p.Frame())
		}
		answer := func(flags uint8, seq, ack uint32) {
			from := fx.at("b1", 8080)
			fx.out(dptest.Packet{Src: from, Dst: p.Src, Proto: dptest.TCP, Flags: flags, Seq: seq, Ack: ack})
		}
		send(dptest.SYN, 1000, 0)
		answer(dptest.SYN|dptest.ACK, 5000, 1001)
		send(dptest.ACK, 1001, 5001)
		answer(dptest.FIN|dptest.ACK, 5001, 1001)
		send(dptest.FIN|dptest.ACK, 1001, 5002)

		fx.nodes(lb.TCP, "b2", "-self")
		here := func(when string, r result) {
			t.Helper()
			must.True(t, r.did == "passed" && r.out.Dst == fx.at("b1", 8080),
				"%s: %s: %s: %+v", when, r.did, r.reason, r.out)
		}
		here("the last packet, again", send(dptest.FIN|dptest.ACK, 1001, 5002))
		here("a RST, for data of the server that came late", send(dptest.RST, 1002, 0))
		fx.sentTo("a SYN", send(dptest.SYN, 90_000, 0), p, false, "b2")
		fx.sentTo("its ACK", send(dptest.ACK, 90_001, 700_000), p, false, "b2")
		fx.sentTo("its FIN", send(dptest.FIN|dptest.ACK, 90_001, 700_000), p, false, "b2")
	})
}

// Nothing marks the first datagram of a flow. So the slot's previous nodes are asked first, and then the current one
// opens the flow.
func TestSpreadDatagrams(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.Delivers = true }, func(t *testing.T, fx *fixture) {
		in := fx.fromClient(dptest.UDP, 0)
		fx.nodes(lb.UDP, "b2")
		fx.sentTo("one node", fx.run(in.Frame()), in, false, "b2")
		fx.nodes(lb.UDP, "self", "-b2")
		fx.sentTo("this node is the target", fx.run(in.Frame()), in, true, "b2", "self")
		fx.nodes(lb.UDP, "router", "-b2")
		fx.sentTo("another node is the target", fx.run(in.Frame()), in, false, "router", "b2")
		fx.nodes(lb.UDP, "self")
		fx.wantDid("this node is the only one", in, "passed")
		must.Do(t, fx.flows().want(1, 1))
	})
}

// With AnyNode, a packet of an unknown flow is passed to all other nodes.
func TestSpreadAnyNode(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.Delivers = true }, func(t *testing.T, fx *fixture) {
		syn, ack := fx.on(1, dptest.TCP, dptest.SYN), fx.on(2, dptest.TCP, dptest.ACK)
		datagram := fx.on(3, dptest.UDP, 0)
		fx.spread(lb.TCP, true, "-router", "self", "-b2")
		fx.wantDid("a SYN", syn, "passed")
		fx.sentTo("an unknown flow", fx.run(ack.Frame()), ack, true, "router", "b2")
		fx.spread(lb.TCP, true, "-self", "-router", "-b2")
		fx.wantReason("a SYN, none here", fx.on(4, dptest.TCP, dptest.SYN), "no_local_backend")
		fx.sentTo("an unknown flow, none here", fx.run(ack.Frame()), ack, false, "router", "b2")
		syn.Flags = dptest.SYN
		fx.wantReason("a SYN again, none here", syn, "no_local_backend")
		fx.reset()
		fx.spread(lb.TCP, true, "b2", "-self", "-router") // hints
		fx.wantDid("a flow of another slot", fx.on(5, dptest.TCP, dptest.ACK), "sent")
		fx.sentTo("another node may have selected another one", fx.run(ack.Frame()), ack, false, "b2", "router")
		fx.spread(lb.TCP, true, "router", "-self", "-b2", "-31")
		fx.sentTo("the node that had the slot is first", fx.run(ack.Frame()), ack, false, "router", "b2", "31")
		fx.reset()
		fx.spread(lb.UDP, true, "self", "-b2")
		fx.wantDid("a datagram", datagram, "passed")
	})
}

// A table of another size maps all flows to other slots, so the previous table is kept.
func TestSpreadOverTablesOfOtherSizes(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.Delivers = true }, func(t *testing.T, fx *fixture) {
		var all []string
		for i := range 30 {
			all = append(all, fmt.Sprint(31+i))
		}
		for _, sizes := range [][]int{{8, 30, 28, 29}, {30, 9, 8, 7}} {
			fx.reset()
			fx.nodes(lb.TCP, all[:sizes[0]]...)
			has := map[int]netip.Addr{}
			for i := range 100 {
				has[i] = fx.went(fx.on(i, dptest.TCP, dptest.SYN))
			}
			for _, n := range sizes[1:] {
				fx.nodes(lb.TCP, all[:n]...)
				listed := 0
				for i := range 100 {
					got, err := nodesOf(fx.run(fx.on(i, dptest.TCP, dptest.ACK).Frame()).out)
					is := func(name string) bool { return fx.nodeAddr(name) == has[i] }
					there := slices.ContainsFunc(all[:n], is)
					must.True(t, err == nil && (!there || slices.Contains(got.nodes, has[i])),
						"%d, then %d nodes: flow %d: sent to %s (%v), not to %s", sizes[0], n, i, got, err, has[i])
					listed += len(got.nodes)
				}
				must.True(t, listed <= 300, "%d, then %d nodes: 100 flows list %d nodes", sizes[0], n, listed)
			}
		}
	})
}

// Packets to a port of a range reach the same port of the range of pods, on this node and on others.
func TestRangesAreForwarded(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, func(o *Options) { o.Delivers = true })
		fx.do(func() error { return fx.sources("b2") })
		asRange := func(s *lb.Service) { s.Ports[0].Last = 99 }
		delivered := func(when string, r result) {
			t.Helper()
			must.True(t, r.did == "passed" && r.out.Dst == fx.at("b1", 8085), "%s: %s: %+v", when, r.did, r.out)
		}
		p := fx.on(1, dptest.TCP, dptest.SYN)
		p.Dst = fx.at("vip", 85)
		fx.change(asRange, "self")
		delivered("to this node", fx.run(p.Frame()))
		q := fx.on(2, dptest.TCP, dptest.SYN)
		q.Dst = fx.at("vip", 85)
		delivered("from another node", fx.received("b2", q))
		fx.change(asRange, "b2")
		q = fx.on(3, dptest.TCP, dptest.SYN)
		q.Dst = fx.at("vip", 85)
		fx.sentTo("to another node", fx.run(q.Frame()), q, false, "b2")
		for _, last := range []uint16{1999, 89, 1999} { // an engine puts the new frontend first
			old := must.Get(fx.d.Held())(t)
			fx.change(func(s *lb.Service) { s.Ports[0].Last = last }, "b2")
			fx.apply(lb.Delta{Delete: old})
			for _, port := range []uint16{80, 85, last} {
				q.Dst = fx.at("vip", port)
				fx.sentTo(fmt.Sprintf("port %d of 80-%d", port, last), fx.run(q.Frame()), q, false, "b2")
			}
		}
		q.Dst = fx.at("vip", 2000)
		must.Row(t, "after the range", "no_frontend", fx.run(q.Frame()).reason)
	})
}
