package datapath

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// sources sets these nodes as tunnel sources.
func (fx *fixture) sources(names ...string) error {
	var all []netip.Addr
	for _, name := range names {
		all = append(all, fx.addr(name))
	}
	return fx.d.SetTunnelSources(all)
}

// received runs a tunnel packet from another node.
func (fx *fixture) received(sender string, in dptest.Packet, private ...byte) result {
	fx.t.Helper()
	p := dptest.Packet{Src: fx.at(sender, 50000), Dst: fx.at("self", 6090), Proto: dptest.UDP,
		Payload: dptest.GUE(in, private...)}
	before := fx.counts()
	did, frame := fx.runTC(p.Frame())
	r := result{did: did, frame: frame}
	for v, n := range fx.counts() {
		if n > before[v] && v.Reason != "decapsulated" {
			r.reason = v.Reason
		}
	}
	if did != "dropped" {
		var err error
		r.out, err = dptest.Parse(frame)
		must.Need(fx.t, err == nil, "%s: %v", did, err)
	}
	return r
}

// Packets that other nodes send here are delivered or relayed.
func TestDecapsulatedPackets(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		fx := shared(t, hookTC, v6, func(o *Options) { o.Delivers = true })
		fx.do(func() error { return fx.sources("b2", "router", "self") })
		from := fx.received
		is := func(when string, r result, did, reason string) {
			t.Helper()
			must.True(t, r.did == did && r.reason == reason,
				"%s: %s: %s; want %s: %s", when, r.did, r.reason, did, reason)
			if did == "passed" && (r.out.Dst != fx.at("b1", 8080) || r.out.Src.Addr() != fx.addr("client")) {
				t.Errorf("%s: delivered as %+v", when, r.out)
			}
		}
		var ours []dptest.Packet
		fx.nodes(lb.TCP, "self", "b2")
		for i := range 100 {
			if p := fx.on(i, dptest.TCP, dptest.SYN); fx.run(p.Frame()).did == "passed" {
				ours = append(ours, p)
			}
		}
		fx.reset()
		n := -1
		on := func(proto, flags uint8) dptest.Packet { // a new flow whose slot belongs to this node
			n++
			p := ours[n]
			p.Proto, p.Flags = proto, flags
			if proto == dptest.UDP {
				p.Seq, p.Ack, p.Window = 0, 0, 0
			}
			return p
		}
		fx.nodes(lb.TCP, "self", "b2")
		is("an unknown source", from("client", on(dptest.TCP, dptest.SYN)), "dropped", "unknown_tunnel_source")
		is("a SYN", from("b2", on(dptest.TCP, dptest.SYN)), "passed", "forwarded")
		is("a relayed SYN", from("b2", on(dptest.TCP, dptest.SYN), fx.chained(true)...), "passed", "forwarded")
		is("an unknown flow", from("b2", on(dptest.TCP, dptest.ACK)), "sent", "no_flow")
		is("an unknown flow, relayed", from("b2", on(dptest.TCP, dptest.ACK), fx.chained(true)...), "sent", "no_flow")
		is("other private data", from("b2", on(dptest.TCP, dptest.ACK), 1, 2, 3, 4), "sent", "no_flow")
		in := on(dptest.TCP, dptest.ACK)
		is("the next node is no tunnel source", from("b2", in, fx.chained(false, "unrouted")...),
			"dropped", "unknown_tunnel_source")
		in = on(dptest.TCP, dptest.ACK)
		fx.sentTo("one more node", from("b2", in, fx.chained(false, "router")...), in, true, "router")
		fx.sentTo("two more nodes", from("b2", in, fx.chained(true, "router", "b2")...), in, true, "router", "b2")
		fx.sentTo("three more nodes", from("b2", in, fx.chained(true, "b2", "router", "b2")...), in, true,
			"b2", "router", "b2")

		in = on(dptest.TCP, dptest.SYN)
		in.Dst = fx.at("vip", 81)
		is("no frontend on this node yet", from("b2", in), "dropped", "no_frontend")
		in.Dst = fx.at("self", 22)
		is("a program of this node", from("b2", in), "dropped", "decap_not_local")

		in = icmp(8, 128)(fx) // another node probes this one
		r := from("b2", in)
		if err := echoReply(fx, in, r.out); err != nil || r.did != "sent" || r.reason != "echo_reply" {
			t.Errorf("an echo request: %s: %s, %v", r.did, r.reason, err)
		}

		fx.nodes(lb.TCP, "b2", "-self")
		in = on(dptest.TCP, dptest.SYN)
		fx.sentTo("a SYN without a list: the table of this node", from("router", in), in, true, "b2")
		is("a relayed SYN: dropped", from("router", in, fx.chained(true)...), "dropped", "no_local_backend")
		in.Flags = dptest.ACK
		fx.sentTo("the table of the sender may be older", from("router", in), in, true, "b2")

		fx.reset()
		fx.nodes(lb.UDP, "self", "-b2")
		in = on(dptest.UDP, 0)
		fx.sentTo("a datagram returns to the first node", from("router", in, fx.chained(false, "b2")...), in, true,
			"b2", "self")
		fx.sentTo("a relayed datagram does not return", from("router", in, fx.chained(true, "b2")...), in, true, "b2")
		is("a relayed datagram of an unknown flow", from("b2", in, fx.chained(true)...), "passed", "forwarded")
		is("a datagram of a known flow", from("router", in, fx.chained(false, "b2")...), "passed", "forwarded")
		fx.nodes(lb.UDP, "b2")
		is("no backend here", from("router", on(dptest.UDP, 0), fx.chained(true)...), "dropped", "no_local_backend")
	}
}

// After timeout_udp, previous nodes are not asked about new UDP flows. Live flows are still relayed to the node that
// has them, as long as that node has backends and knows the flows.
func TestDatagramsStopAskingEarlierNodes(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, func(o *Options) { o.Delivers = true })
		fx.do(func() error { return fx.sources("b2", "router") })
		fx.nodes(lb.UDP, "b2")
		fx.nodes(lb.UDP, "self", "-b2")
		here, there, left := fx.on(1, dptest.UDP, 0), fx.on(2, dptest.UDP, 0), fx.on(3, dptest.UDP, 0)
		relayed := func(when string) {
			t.Helper()
			fx.sentTo(when, fx.run(here.Frame()), here, true, "b2", "self")
			fx.sentTo(when+", from another node", fx.received("router", there), there, true, "b2", "self")
		}
		fx.received("router", there, fx.chained(false, "b2")...)
		fx.received("router", left, fx.chained(false, "b2")...)
		relayed("before timeout_udp")
		fx.d.services.Settle(0, 0)
		relayed("a live flow")
		relayed("a live flow again")
		opened := func(when string, r result) {
			t.Helper()
			must.True(t, r.did == "passed" && r.out.Dst == fx.at("b1", 8080),
				"%s: %s: %s: %+v", when, r.did, r.reason, r.out)
		}
		opened("a new flow", fx.run(fx.on(4, dptest.UDP, 0).Frame()))
		opened("a new flow, from another node", fx.received("router", fx.on(5, dptest.UDP, 0)))
		opened("the earlier node did not know it", fx.received("b2", here, fx.chained(true)...))
		opened("opened here", fx.run(here.Frame()))
		fx.sentTo("the other flow", fx.received("router", there), there, true, "b2", "self")

		fx.close()
		fx.open()
		fx.d.flows.Collect(t.Context(), nil)
		fx.sentTo("another agent", fx.received("router", there), there, true, "b2", "self")
		fx.nodes(lb.UDP, "self")
		fx.d.flows.Collect(t.Context(), nil)
		opened("its node has no backends", fx.received("router", left))
		must.Row(t, "relayed flows", 0, len(entries[bpf.FlowKey, bpf.Relay](t, fx.d.objects.SyRelays)))
	})
}

// A node without a serving endpoint may be down. Datagrams are no longer relayed through it, and datagrams of another
// node's flow still arrive there.
func TestDatagramsAvoidNodesThatMayBeDown(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.Delivers = true }, func(t *testing.T, fx *fixture) {
		fx.do(func() error { return fx.sources("b2", "router") })
		in := fx.on(1, dptest.UDP, 0)
		for _, left := range []string{"b2", "router"} {
			fx.reset()
			fx.nodes(lb.UDP, "b2")
			fx.nodes(lb.UDP, "router", "-b2")
			fx.nodes(lb.UDP, "self", "-router", "-b2")
			fx.sentTo("two nodes had the slot", fx.run(in.Frame()), in, true, "router", "b2", "self")
			fx.d.services.Settle(0, 0)
			fx.sentTo("settled", fx.run(in.Frame()), in, true, "router", "b2", "self")
			fx.nodes(lb.UDP, "self", "-"+left)
			fx.collect()
			fx.sentTo("one is left", fx.run(in.Frame()), in, true, left, "self")
			fx.nodes(lb.UDP, "self")
			fx.collect()
			fx.wantDid("none is left", in, "passed")
		}
	})
}

// by returns a SYN from one of a client's ports, with another client for each n.
func (fx *fixture) by(n int, port uint16) dptest.Packet {
	p := fx.on(int(port), dptest.TCP, dptest.SYN)
	b := p.Src.Addr().AsSlice()
	b[len(b)-1] = byte(100 + n)
	addr, _ := netip.AddrFromSlice(b)
	p.Src = netip.AddrPortFrom(addr, p.Src.Port())
	return p
}

// With affinity, all of a client's connections go to one node, which its address determines. A client with a backend of
// a previous node of its slot stays there as long as that node accepts new flows. For any other client, the previous
// node is asked once. Every node asks the slot's node first, because two nodes may know a client.
func TestAffinityThroughChangesOfNodes(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.Delivers = true }, func(t *testing.T, fx *fixture) {
		fx.do(func() error { return fx.sources("b2", "router") })
		nodes := func(names ...string) { fx.change(func(s *lb.Service) { s.Affinity = time.Hour }, names...) }
		opened := func(when string, r result) {
			t.Helper()
			must.True(t, r.did == "passed" && r.out.Dst == fx.at("b1", 8080),
				"%s: %s: %s: %+v", when, r.did, r.reason, r.out)
		}

		nodes("self", "b2")
		here, there := -1, -1
		for n := range 50 {
			first := fx.run(fx.by(n, 0).Frame()).did
			for port := range uint16(4) {
				did := fx.run(fx.by(n, port+1).Frame()).did
				must.Need(t, did == first, "client %d: a connection was %s, one before %s", n, did, first)
			}
			if first == "passed" {
				here = n
			} else {
				there = n
			}
		}
		must.Need(t, here >= 0 && there >= 0, "all clients have one node")

		fx.reset()
		nodes("self")
		opened("the only node", fx.run(fx.by(there, 0).Frame()))
		nodes("self", "b2")
		syn := fx.by(there, 1)
		fx.sentTo("a node joins", fx.run(syn.Frame()), syn, false, "b2", "self")
		opened("a node joins, sent by it", fx.received("b2", fx.by(there, 2), fx.chained(true, "b2")...))
		nodes("self", "b2", "31")
		opened("two nodes join, sent by one", fx.received("b2", fx.by(there, 3), fx.chained(true, "b2")...))

		fx.reset()
		nodes("b2")
		syn = fx.by(here, 0)
		fx.sentTo("the only node is another one", fx.run(syn.Frame()), syn, false, "b2")
		nodes("self", "b2")
		fx.sentTo("this node joins", fx.run(syn.Frame()), syn, true, "b2", "self")
		fx.sentTo("this node joins, sent by another", fx.received("router", syn), syn, true, "b2", "self")
		fx.sentTo("this node joins, sent with a list", fx.received("router", syn, fx.chained(false, "b2")...), syn,
			true, "b2", "self")
		fx.d.services.Settle(0, 0)
		fx.sentTo("later", fx.run(syn.Frame()), syn, true, "b2", "self")
		must.Row(t, "entries for connections", 0, len(entries[bpf.FlowKey, bpf.Relay](t, fx.d.objects.SyRelays)))
		opened("the earlier node does not know it", fx.received("b2", syn, fx.chained(true)...))
		opened("another connection", fx.run(fx.by(here, 1).Frame()))
		opened("another connection, sent by another node",
			fx.received("router", fx.by(here, 2), fx.chained(false, "b2")...))

		fx.reset()
		nodes("self", "b2")
		opened("before", fx.run(fx.by(here, 0).Frame()))
		nodes("b2", "-self")
		nodes("self", "b2")
		syn = fx.by(here, 1)
		fx.sentTo("this node is back: the client may be elsewhere", fx.run(syn.Frame()), syn, true, "b2", "self")

		fx.reset()
		nodes("b2")
		nodes("self", "-b2")
		opened("the earlier node accepts no new flows", fx.run(fx.by(here, 3).Frame()))
		fx.sentTo("as an earlier node, unknown", fx.received("b2", fx.by(there, 4), fx.chained(true, "b2")...),
			fx.by(there, 4), true, "b2")

		fx.reset()
		fx.change(func(s *lb.Service) { s.Affinity = 0 }, "self", "b2")
		nodes("self", "b2")
		for port := range uint16(20) { // slots by flow hash, whose nodes know no clients
			opened("affinity is switched on", fx.run(fx.by(here, port).Frame()))
			syn = fx.by(there, port)
			fx.sentTo("affinity is switched on", fx.run(syn.Frame()), syn, false, "b2")
		}
	})
}

// After a change of affinity, datagrams of unknown flows go to the nodes of two tables, but never twice to the same
// node, which would send them to itself.
func TestNodesAreListedOnce(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.Delivers = true }, func(t *testing.T, fx *fixture) {
		for _, affinity := range []time.Duration{0, time.Hour, 0} {
			fx.change(func(s *lb.Service) {
				s.Affinity = affinity
				s.Ports = lb.PortsOn(nil, lb.Port{Port: 80, Target: 80, Protocol: lb.UDP})
			}, "b2", "31", "32")
			several := 0
			for i := range 60 {
				got := must.Get(nodesOf(fx.run(fx.on(i, dptest.UDP, 0).Frame()).out))(t)
				if all := len(got.nodes); all > 1 {
					several++
					slices.SortFunc(got.nodes, netip.Addr.Compare)
					must.True(t, len(slices.Compact(got.nodes)) >= all,
						"affinity %s: flow %d: sent to %s", affinity, i, got)
				}
			}
			must.True(t, affinity == 0 || several > 0, "no flow has two nodes")
		}
	})
}

// relays returns the number of a port's entries in sy_relays, and its frontend's number in sy_relay_share.
func (fx *fixture) relays(port uint16) (entriesOf, share uint32) {
	fx.t.Helper()
	for k := range entries[bpf.FlowKey, bpf.Relay](fx.t, fx.d.objects.SyRelays) {
		if bpf.Swap(k.T.Dport) == port {
			entriesOf++
		}
	}
	id := fx.d.services.Frontends[lb.Frontend{VIP: fx.addr("vip"), Port: port, Protocol: lb.UDP}].ID
	must.Do(fx.t, fx.d.objects.SyRelayShare.Lookup(id, &share))
	return entriesOf, share
}

// on81 serves another UDP service, on port 81, with these nodes.
func (fx *fixture) on81(names ...string) {
	fx.t.Helper()
	fx.change(func(s *lb.Service) {
		s.Name, s.Ports[0].Protocol, s.Ports[0].Port.Port = "other", lb.UDP, 81
	}, names...)
}

// Datagrams from forged sources that a previous node of their slot never returns leave entries for other services'
// relayed flows, which stay with their node.
func TestAFloodOfRelayedDatagramsLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, func(o *Options) { o.Delivers = true })
	fx.do(func() error { return fx.sources("b2") })
	for _, nodes := range [][]string{{"b2"}, {"self", "-b2"}} {
		fx.nodes(lb.UDP, nodes...)
		fx.on81(nodes...)
	}
	invented := fx.invented(rand.New(rand.NewPCG(1, 3)), 72_000, dptest.UDP, 0)
	fx.runMany(invented)
	flooded, share := fx.relays(80)
	must.True(t, flooded == share && flooded <= fx.d.objects.SyRelays.MaxEntries()/2+1,
		"the flooded service has %d entries and a share of %d", flooded, share)
	live := fx.on(1, dptest.UDP, 0)
	live.Dst = fx.at("vip", 81)
	fx.sentTo("the slot has changed", fx.run(live.Frame()), live, true, "b2", "self")
	fx.d.services.Settle(0, 0)
	fx.sentTo("the slot has forgotten", fx.run(live.Frame()), live, true, "b2", "self")

	must.Do(t, fx.d.objects.SyRelayShare.Update(uint32(table.MaxFrontends), uint32(7), ebpf.UpdateExist))
	fx.collect()
	var all uint32
	err := fx.d.objects.SyRelayShare.Lookup(uint32(table.MaxFrontends), &all)
	must.True(t, err == nil && all == flooded+1, "after a walk: %d entries (%v); want %d", all, err, flooded+1)
}

// A datagram of a service that has used its share of flows comes back from the previous node and is dropped. It leaves
// no entry, so the service's flows on the previous node are still relayed.
func TestRefusedDatagramsLeaveNoRelays(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, func(o *Options) { o.Delivers, o.MaxFlows = true, 20 })
	fx.do(func() error { return fx.sources("b2") })
	fx.nodes(lb.UDP, "b2")
	fx.nodes(lb.UDP, "self", "-b2")
	live := fx.on(0, dptest.UDP, 0)
	fx.sentTo("a flow of the earlier node", fx.run(live.Frame()), live, true, "b2", "self")
	refused := 0
	for i := range 40 {
		in := fx.on(1+i, dptest.UDP, 0)
		fx.sentTo("a new flow", fx.run(in.Frame()), in, true, "b2", "self")
		if r := fx.received("b2", in, fx.chained(true)...); r.reason == "udp_share_full" {
			refused++
		}
	}
	n, share := fx.relays(80)
	must.True(t, refused >= 30 && n == 1 && share == 1,
		"%d were refused, %d are relayed, the share is %d; want 1", refused, n, share)
}
