package datapath

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
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

// DSR flows keep their server when the selection for new flows changes.
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

// An SCTP ABORT may be forged: any later packet of the client shows that the flow continues.
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

// Synthetic packets have random source ports: forged packets that open the flows of all ports are many.
func TestMadePacketsHaveRandomPorts(t *testing.T) {
	ports := map[uint16]bool{}
	for range 100 {
		ports[verify.AnyPort()] = true
	}
	if len(ports) < 90 {
		t.Errorf("synthetic packets have one of %d ports", len(ports))
	}
}

// A DSR flow counts for its server until it ends; if the server follows from the hash, from when the client continues.
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

// deliver puts VIP:80 to port 8080 of b1, which runs on this node; change may modify the service.
func (fx *fixture) deliver(change func(*lb.Service)) {
	fx.t.Helper()
	fx.serve(func(s *lb.Service) {
		s.Ports[0].Backends[0].Local = true
		change(s)
	}, "b1")
}

// out runs a packet of a local backend through sy_tc_out.
func (fx *fixture) out(p dptest.Packet) dptest.Packet {
	fx.t.Helper()
	did, frame := fx.runOut(p.Frame(), 0)
	out, err := dptest.Parse(frame)
	if did != "passed" || err != nil {
		fx.t.Fatalf("the packet was %s: %v", did, err)
	}
	return out
}

// A local backend receives packets from the client's address, and the client from the VIP.
func TestDeliversToLocalBackends(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.Delivers = true }, func(t *testing.T, fx *fixture) {
		for _, proto := range []lb.Protocol{lb.TCP, lb.UDP} {
			fx.reset()
			fx.deliver(func(s *lb.Service) { s.Ports[0].Protocol = proto })
			there := func(flags uint8) dptest.Packet {
				return fx.fromClient(uint8(proto), flags&(255*uint8(bpf.Truth(proto == lb.TCP))))
			}
			back := func(flags uint8) dptest.Packet {
				p := there(flags)
				p.Src, p.Dst, p.Seq, p.Ack = fx.at("b1", 8080), p.Src, 5*p.Seq, 0
				return p
			}
			for i, flags := range []uint8{dptest.SYN, dptest.ACK, dptest.ACK} {
				in := there(flags)
				r := fx.run(in.Frame())
				if r.did != "passed" || r.reason != "forwarded" {
					t.Fatalf("%s, packet %d: %s: %s", proto, i, r.did, r.reason)
				}
				want := in
				want.Dst, want.TTL = fx.at("b1", 8080), 65
				if err := onlyHops(want, r.out); err != nil {
					t.Errorf("%s, packet %d: %v", proto, i, err)
				}
				answer := back(dptest.ACK)
				if i == 0 {
					answer = back(dptest.SYN | dptest.ACK)
				}
				want = answer
				want.Src, want.TTL = fx.at("vip", 80), 65
				if err := onlyHops(want, fx.out(answer)); err != nil {
					t.Errorf("%s, answer %d: %v", proto, i, err)
				}
			}
			if err := fx.confirmed().want(1, 1); err != nil {
				t.Errorf("%s: %v", proto, err)
			}
		}
		other := dptest.Packet{Src: fx.at("b1", 8080), Dst: fx.at("client", 41000), Proto: dptest.TCP,
			Flags: dptest.ACK}
		if out := fx.out(other); out.Src != other.Src || out.Dst != other.Dst {
			t.Errorf("an unrelated packet was sent as %+v", out)
		}
	})
}

// A client uses one port towards two VIPs with the same local server: the server receives two distinct flows, and each
// reply is translated to its VIP.
func TestTwoVIPsWithOneLocalServer(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.Delivers = true }, func(t *testing.T, fx *fixture) {
		fx.deliver(func(*lb.Service) {})
		fx.deliver(func(s *lb.Service) { s.Name, s.VIPs = "other", []netip.Addr{fx.addr("elsewhere")} })
		seen := map[netip.AddrPort]bool{}
		for _, vip := range []string{"vip", "elsewhere"} {
			p := fx.fromClient(dptest.TCP, dptest.SYN)
			p.Dst = fx.at(vip, 80)
			r := fx.run(p.Frame())
			if r.did != "passed" || r.out.Src.Addr() != p.Src.Addr() || seen[r.out.Src] {
				t.Fatalf("%s: %s: %s, from %s", vip, r.did, r.reason, r.out.Src)
			}
			seen[r.out.Src] = true
			answer := fx.out(dptest.Packet{Src: r.out.Dst, Dst: r.out.Src, Proto: dptest.TCP,
				Flags: dptest.SYN | dptest.ACK})
			if answer.Src != p.Dst || answer.Dst != p.Src {
				t.Errorf("%s: the answer left from %s to %s", vip, answer.Src, answer.Dst)
			}
		}
	})
}
