package datapath

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/verify"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// byTunnel serves by GUE, one server after the other unless change says otherwise.
func (fx *fixture) byTunnel(change func(*lb.Service)) {
	fx.t.Helper()
	fx.serve(func(s *lb.Service) {
		s.Method, s.Encap, s.Algorithm, s.Ports[0].Target = lb.MethodTunnel, lb.EncapGUE, lb.AlgorithmRoundRobin, 80
		change(s)
	}, "b1", "b2")
}

// openTo opens flows by TCP and returns their servers.
func (fx *fixture) openTo(flows int) []netip.Addr {
	fx.t.Helper()
	servers := make([]netip.Addr, flows)
	for i := range servers {
		servers[i] = fx.went(fx.on(i, dptest.TCP, dptest.SYN))
		for range 2 {
			fx.went(fx.on(i, dptest.TCP, dptest.ACK))
		}
	}
	return servers
}

// Flows by direct return keep their server when what selects the servers of new flows changes.
func TestDirectReturnKeepsFlowsAcrossAlgorithms(t *testing.T) {
	t.Parallel()
	type selection struct {
		algorithm lb.Algorithm
		affinity  time.Duration
	}
	maglev := selection{algorithm: lb.AlgorithmMaglev}
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, nil)
		for _, x := range [][2]selection{
			{{algorithm: lb.AlgorithmSourceHash}, maglev},
			{maglev, {algorithm: lb.AlgorithmSourceHash}},
			{{lb.AlgorithmMaglev, time.Hour}, maglev},
			{{algorithm: lb.AlgorithmRoundRobin}, maglev},
			{maglev, {algorithm: lb.AlgorithmLeastConnections}},
		} {
			fx.reset()
			put := func(by selection) {
				fx.byTunnel(func(s *lb.Service) { s.Algorithm, s.Affinity = by.algorithm, by.affinity })
			}
			put(x[0])
			servers := fx.openTo(40)
			put(x[1])
			moved := 0
			for i, server := range servers {
				if fx.went(fx.on(i, dptest.TCP, dptest.ACK)) != server {
					moved++
				}
			}
			if moved > 0 {
				t.Errorf("%s: %v, then %v: %d of %d flows moved", h, x[0], x[1], moved, len(servers))
			}
		}
	}
}

// A connection that its client has half-closed keeps its server, and is not counted as one of its open flows.
func TestHalfClosedFlowsByDirectReturn(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		fx.byTunnel(func(*lb.Service) {})
		servers := fx.openTo(10)
		for _, flags := range []uint8{dptest.FIN | dptest.ACK, dptest.ACK} {
			idle := time.Minute
			if flags == dptest.ACK { // it shows that the server still sends
				idle = 3 * time.Minute
			}
			for i, server := range servers {
				p := fx.on(i, dptest.TCP, flags)
				p.Seq, p.Payload = 5, nil
				if flags == dptest.ACK {
					p.Seq++
				}
				if to := fx.went(p); to != server {
					t.Fatalf("flow %d, flags %#x: to %s; want %s", i, flags, to, server)
				}
			}
			fx.ageDSR(idle)
			fx.collect()
			if n := fx.d.flows.Counts().Closing; n != len(servers) {
				t.Errorf("%d closing flows; want %d", n, len(servers))
			}
			for id, n := range entries[uint32, uint32](t, fx.d.objects.SyBackendLoad) {
				if n > 0 {
					t.Errorf("backend %d has %d open flows", id, n)
				}
			}
		}
		fx.ageDSR(5 * time.Minute)
		fx.collect()
		if n := len(fx.dsrFlows()); n > 0 {
			t.Errorf("%d flows are left", n)
		}
	})
}

// The entry of a connection that its client has closed goes soon, so that such entries do not evict those of idle
// connections from the table. One whose server still sends stays.
func TestClosedFlowsByDirectReturnLeaveSoon(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, nil)
		fx.byTunnel(func(*lb.Service) {})
		send := func(flow int, flags uint8) string {
			p := fx.on(flow, dptest.TCP, flags)
			p.Payload = nil
			if flags == dptest.ACK {
				p.Seq++ // the number that follows the FIN
			}
			return fx.run(p.Frame()).reason
		}
		const closed, goesOn = 0, 1
		fx.openTo(2)
		for _, flow := range []int{closed, goesOn} {
			send(flow, dptest.FIN|dptest.ACK)
			send(flow, dptest.ACK)
		}
		fx.ageDSR(5 * time.Second)
		send(goesOn, dptest.ACK)
		fx.ageDSR(55 * time.Second)
		fx.collect()
		if n := len(fx.dsrFlows()); n != 2 {
			t.Errorf("%s: %d flows after 60 s; want 2", h, n)
		}
		fx.ageDSR(10 * time.Second)
		if reason := send(closed, dptest.ACK); reason != "no_flow" {
			t.Errorf("%s: a packet of the closed flow: %s", h, reason)
		}
		if reason := send(goesOn, dptest.ACK); reason != "forwarded" {
			t.Errorf("%s: a packet of the half-closed flow: %s", h, reason)
		}
		fx.collect()
		if n := len(fx.dsrFlows()); n != 1 {
			t.Errorf("%s: %d flows after 70 s; want 1", h, n)
		}
	}
}

// An ABORT of SCTP may be forged: any later packet of the client shows that the flow goes on.
func TestAForgedAbortKeepsFlowsByDirectReturn(t *testing.T) {
	t.Parallel()
	const initiate, data, abort = 1, 0, 6
	fx := shared(t, hookTC, false, nil)
	fx.byTunnel(func(s *lb.Service) { s.Ports[0].Protocol = lb.SCTP })
	send := func(flow int, kind uint8) netip.Addr {
		t.Helper()
		p := fx.on(flow, dptest.SCTP, 0)
		p.Type = kind
		return fx.went(p)
	}
	for i := range 10 {
		server := send(i, initiate)
		for _, kind := range []uint8{data, abort, data} {
			if to := send(i, kind); to != server {
				t.Fatalf("flow %d, chunk %d: to %s; want %s", i, kind, to, server)
			}
		}
		fx.ageDSR(time.Minute)
		if to := send(i, data); to != server {
			t.Errorf("flow %d after a minute: to %s; want %s", i, to, server)
		}
	}
}

// Packets of flows between nodes still get to the node of their flow when affinity selects the nodes of new flows, or
// does so no longer.
func TestSpreadKeepsFlowsAcrossAffinity(t *testing.T) {
	t.Parallel()
	const flows = 40
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, func(o *Options) { o.Delivers = true })
		for _, affinity := range [][2]time.Duration{{time.Hour, 0}, {0, time.Hour}} {
			fx.reset()
			with := func(a time.Duration) {
				fx.change(func(s *lb.Service) { s.Affinity = a }, "31", "32", "33")
			}
			with(affinity[0])
			var nodes [flows]netip.Addr
			for i := range nodes {
				nodes[i] = fx.went(fx.on(i, dptest.TCP, dptest.SYN))
			}
			with(affinity[1])
			for i, node := range nodes {
				asked, err := nodesOf(fx.run(fx.on(i, dptest.TCP, dptest.ACK).Frame()).out)
				if err != nil || !slices.Contains(asked.nodes, node) {
					t.Fatalf("%s, %v: flow %d of %s is sent to %s: %v", h, affinity, i, node, asked, err)
				}
			}
		}
	}
}

// Made packets have random source ports: forged packets that open the flows of all ports are many.
func TestMadePacketsHaveRandomPorts(t *testing.T) {
	ports := map[uint16]bool{}
	for range 100 {
		ports[verify.AnyPort()] = true
	}
	if len(ports) < 90 {
		t.Errorf("made packets have one of %d ports", len(ports))
	}
}

// A flow by direct return counts for its server until it ends; where the server follows from the hash, once the client
// continues.
func TestDirectReturnFlowsAreCounted(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookXDP, false, nil)
	for algorithm, first := range map[lb.Algorithm]uint32{lb.AlgorithmMaglev: 0, lb.AlgorithmLeastConnections: 1} {
		fx.reset()
		fx.serve(func(s *lb.Service) { s.Method, s.Algorithm = lb.MethodDSR, algorithm }, "b1", "b2")
		const flows = 10
		for _, step := range []struct {
			flags           uint8
			each, continued uint32
		}{{dptest.SYN, first, 0}, {dptest.ACK, 1, 1}, {dptest.RST, 0, 1}} {
			for i := range flows {
				fx.went(fx.on(i, dptest.TCP, step.flags))
			}
			if n := fx.loads()[fx.addr("b1")] + fx.loads()[fx.addr("b2")]; n != flows*step.each {
				t.Errorf("%s: after packets with flags %d, the servers have %d flows", algorithm, step.flags, n)
			}
			continued := uint64(0)
			for _, b := range must.Get(fx.d.Stats())(t).Backends {
				continued += b.Continued
			}
			if want := flows * uint64(step.continued); continued != want {
				t.Errorf("%s: after packets with flags %d, %d clients continued; want %d", algorithm, step.flags,
					continued, want)
			}
		}
	}
}
