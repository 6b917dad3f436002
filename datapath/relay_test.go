package datapath

import (
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// received runs a tunnel packet of another node.
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
		if r.out, err = dptest.Parse(frame); err != nil {
			fx.t.Fatalf("%s: %v", did, err)
		}
	}
	return r
}

// Packets that other nodes send here are delivered or relayed.
func TestDecapsulatedPackets(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		fx := shared(t, hookTC, v6, func(o *Options) { o.Delivers = true })
		fx.do(func() error {
			return fx.d.SetTunnelSources([]netip.Addr{fx.addr("b2"), fx.addr("router"), fx.addr("self")})
		})
		from := fx.received
		is := func(when string, r result, did, reason string) {
			t.Helper()
			if r.did != did || r.reason != reason {
				t.Errorf("%s: %s: %s; want %s: %s", when, r.did, r.reason, did, reason)
			}
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
		on := func(proto, flags uint8) dptest.Packet { // a new flow, in a slot of this node
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

// After timeout_udp, datagrams of new flows ask no earlier node. Live flows are still relayed to the node that has
// them, as long as it has backends, until it does not know them any longer.
func TestDatagramsStopAskingEarlierNodes(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, func(o *Options) { o.Delivers = true })
		fx.do(func() error { return fx.d.SetTunnelSources([]netip.Addr{fx.addr("b2"), fx.addr("router")}) })
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
			if r.did != "passed" || r.out.Dst != fx.at("b1", 8080) {
				t.Errorf("%s: %s: %s: %+v", when, r.did, r.reason, r.out)
			}
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
		if n := len(entries[bpf.FlowKey, bpf.Relay](t, fx.d.objects.SyRelays)); n != 0 {
			t.Errorf("%d flows are relayed", n)
		}
	})
}

// A node that has no endpoint that serves may be down: datagrams are no longer relayed by way of it, and those that
// belong to a flow of another node still get there.
func TestDatagramsAvoidNodesThatMayBeDown(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.Delivers = true }, func(t *testing.T, fx *fixture) {
		fx.do(func() error { return fx.d.SetTunnelSources([]netip.Addr{fx.addr("b2"), fx.addr("router")}) })
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
			if r := fx.run(in.Frame()); r.did != "passed" {
				t.Errorf("none is left: %s: %s", r.did, r.reason)
			}
		}
	})
}
