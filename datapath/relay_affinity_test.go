package datapath

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// by is a SYN of another client for each n, from one of its ports.
func (fx *fixture) by(n int, port uint16) dptest.Packet {
	p := fx.on(int(port), dptest.TCP, dptest.SYN)
	b := p.Src.Addr().AsSlice()
	b[len(b)-1] = byte(100 + n)
	addr, _ := netip.AddrFromSlice(b)
	p.Src = netip.AddrPortFrom(addr, p.Src.Port())
	return p
}

// With affinity all connections of a client go to one node, which follows from its address. A client that has a backend
// of an earlier node of its slot stays there for as long as that node accepts new flows; any other is asked for once.
// Every node asks that of the slot first: two may have a client.
func TestAffinityThroughChangesOfNodes(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.Delivers = true }, func(t *testing.T, fx *fixture) {
		fx.do(func() error { return fx.d.SetTunnelSources([]netip.Addr{fx.addr("b2"), fx.addr("router")}) })
		nodes := func(names ...string) {
			fx.change(func(s *lb.Service) { s.Affinity = time.Hour }, names...)
		}
		opened := func(when string, r result) {
			t.Helper()
			if r.did != "passed" || r.out.Dst != fx.at("b1", 8080) {
				t.Errorf("%s: %s: %s: %+v", when, r.did, r.reason, r.out)
			}
		}

		nodes("self", "b2")
		here, there := -1, -1
		for n := range 50 {
			first := fx.run(fx.by(n, 0).Frame()).did
			for port := range uint16(4) {
				if did := fx.run(fx.by(n, port+1).Frame()).did; did != first {
					t.Fatalf("client %d: a connection was %s, one before %s", n, did, first)
				}
			}
			if first == "passed" {
				here = n
			} else {
				there = n
			}
		}
		if here < 0 || there < 0 {
			t.Fatal("all clients have one node")
		}

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
		if n := len(entries[bpf.FlowKey, bpf.Relay](t, fx.d.objects.SyRelays)); n != 0 {
			t.Errorf("%d entries for connections", n)
		}
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
		for port := range uint16(20) { // as many slots of the table by flows, which has no clients
			opened("affinity is switched on", fx.run(fx.by(here, port).Frame()))
			syn = fx.by(there, port)
			fx.sentTo("affinity is switched on", fx.run(syn.Frame()), syn, false, "b2")
		}
	})
}

// After a change of affinity, datagrams of unknown flows go to the nodes of two tables, and to none of them twice:
// it would send them to itself.
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
				got, err := nodesOf(fx.run(fx.on(i, dptest.UDP, 0).Frame()).out)
				if err != nil {
					t.Fatal(err)
				}
				if all := len(got.nodes); all > 1 {
					several++
					slices.SortFunc(got.nodes, netip.Addr.Compare)
					if len(slices.Compact(got.nodes)) < all {
						t.Errorf("affinity %s: flow %d: sent to %s", affinity, i, got)
					}
				}
			}
			if affinity != 0 && several == 0 {
				t.Error("no flow has two nodes")
			}
		}
	})
}
