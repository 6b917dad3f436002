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

// byTunnel adds a service with GUE that uses the servers in turn unless change says otherwise.
func (fx *fixture) byTunnel(change func(*lb.Service)) {
	fx.t.Helper()
	fx.serve(func(s *lb.Service) {
		s.Method, s.Encap, s.Algorithm, s.Ports[0].Target = lb.MethodTunnel, lb.EncapGUE, lb.AlgorithmRoundRobin, 80
		change(s)
	}, "b1", "b2")
}

// openTo opens TCP flows and returns their servers.
func (fx *fixture) openTo(flows int) []netip.Addr {
	fx.t.Helper()
	servers := make([]netip.Addr, flows)
	for i := range servers {
		for _, flags := range []uint8{dptest.SYN, dptest.ACK, dptest.ACK} {
			servers[i] = fx.quick(fx.on(i, dptest.TCP, flags))
		}
	}
	return servers
}

// DSR flows keep their server when the selection for new flows changes.
func TestDirectReturnKeepsFlowsAcrossAlgorithms(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, nil)
		for _, x := range []struct {
			first, then lb.Algorithm
			affinity    time.Duration // of the service at first
		}{
			{lb.AlgorithmSourceHash, lb.AlgorithmMaglev, 0}, {lb.AlgorithmMaglev, lb.AlgorithmSourceHash, 0},
			{lb.AlgorithmMaglev, lb.AlgorithmMaglev, time.Hour}, {lb.AlgorithmRoundRobin, lb.AlgorithmMaglev, 0},
			{lb.AlgorithmMaglev, lb.AlgorithmLeastConnections, 0},
		} {
			fx.reset()
			fx.byTunnel(func(s *lb.Service) { s.Algorithm, s.Affinity = x.first, x.affinity })
			servers := fx.openTo(40)
			fx.byTunnel(func(s *lb.Service) { s.Algorithm = x.then })
			moved := 0
			for i, server := range servers {
				if fx.quick(fx.on(i, dptest.TCP, dptest.ACK)) != server {
					moved++
				}
			}
			must.True(t, moved == 0, "%s: %+v: %d of %d flows moved", h, x, moved, len(servers))
		}
	}
}

// A connection that its client has half-closed keeps its server, and is not counted as an open flow of the server.
func TestHalfClosedFlowsByDirectReturn(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		fx.byTunnel(func(*lb.Service) {})
		servers := fx.openTo(10)
		for _, flags := range []uint8{dptest.FIN | dptest.ACK, dptest.ACK} {
			idle := time.Minute
			if flags == dptest.ACK { // a packet that shows that the server still sends
				idle = 3 * time.Minute
			}
			for i, server := range servers {
				p := fx.on(i, dptest.TCP, flags)
				p.Seq, p.Payload = 5, nil
				if flags == dptest.ACK {
					p.Seq++
				}
				to := fx.went(p)
				must.Need(t, to == server, "flow %d, flags %#x: to %s; want %s", i, flags, to, server)
			}
			fx.ageDSR(idle)
			fx.collect()
			must.Row(t, "closing flows", len(servers), fx.d.flows.Counts().Closing)
			for id, n := range entries[uint32, uint32](t, fx.d.objects.SyBackendLoad) {
				must.True(t, n == 0, "backend %d has %d open flows", id, n)
			}
		}
		fx.ageDSR(5 * time.Minute)
		fx.collect()
		must.Row(t, "flows that are left", 0, len(fx.dsrFlows()))
	})
}

// The entry of a connection that its client has closed is removed soon, so that such entries do not evict the entries
// of idle connections. If the server still sends, the entry stays.
func TestClosedFlowsByDirectReturnLeaveSoon(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, nil)
		fx.byTunnel(func(*lb.Service) {})
		send := func(flow int, flags uint8) string {
			p := fx.on(flow, dptest.TCP, flags)
			p.Payload = nil
			if flags == dptest.ACK {
				p.Seq++ // the number after the FIN
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
		must.Row(t, h+": flows after 60 s", 2, len(fx.dsrFlows()))
		fx.ageDSR(10 * time.Second)
		must.Row(t, h+": a packet of the closed flow", "no_flow", send(closed, dptest.ACK))
		must.Row(t, h+": a packet of the half-closed flow", "forwarded", send(goesOn, dptest.ACK))
		fx.collect()
		must.Row(t, h+": flows after 70 s", 1, len(fx.dsrFlows()))
	}
}

// An SCTP ABORT may be forged. Any later packet from the client shows that the flow continues.
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
			to := send(i, kind)
			must.Need(t, to == server, "flow %d, chunk %d: to %s; want %s", i, kind, to, server)
		}
		fx.ageDSR(time.Minute)
		must.Row(t, "the server after a minute", server, send(i, data))
	}
}

// Packets of flows between nodes still reach their flow's node when affinity begins or stops selecting the nodes of new
// flows.
func TestSpreadKeepsFlowsAcrossAffinity(t *testing.T) {
	t.Parallel()
	const flows = 40
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, func(o *Options) { o.Delivers = true })
		for _, affinity := range [][2]time.Duration{{time.Hour, 0}, {0, time.Hour}} {
			fx.reset()
			with := func(a time.Duration) { fx.change(func(s *lb.Service) { s.Affinity = a }, "31", "32", "33") }
			with(affinity[0])
			var nodes [flows]netip.Addr
			for i := range nodes {
				nodes[i] = fx.went(fx.on(i, dptest.TCP, dptest.SYN))
			}
			with(affinity[1])
			for i, node := range nodes {
				asked, err := nodesOf(fx.run(fx.on(i, dptest.TCP, dptest.ACK).Frame()).out)
				must.Need(t, err == nil && slices.Contains(asked.nodes, node),
					"%s, %v: flow %d of %s is sent to %s: %v", h, affinity, i, node, asked, err)
			}
		}
	}
}

// Synthetic packets have random source ports, so an attacker needs many forged packets to open the flows of all ports.
func TestMadePacketsHaveRandomPorts(t *testing.T) {
	ports := map[uint16]bool{}
	for range 100 {
		ports[verify.AnyPort()] = true
	}
	must.True(t, len(ports) >= 90, "synthetic packets have one of %d ports", len(ports))
}

// A DSR flow counts for its server until it ends. If the hash determines the server, it counts from when the client
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
			n := fx.loads()[fx.addr("b1")] + fx.loads()[fx.addr("b2")]
			must.True(t, n == flows*step.each,
				"%s: after packets with flags %d, the servers have %d flows", algorithm, step.flags, n)
			continued := uint64(0)
			for _, b := range must.Get(fx.d.Stats())(t).Backends {
				continued += b.Continued
			}
			must.True(t, continued == flows*uint64(step.continued),
				"%s: after packets with flags %d, %d clients continued", algorithm, step.flags, continued)
		}
	}
}

// deliver serves VIP:80 with port 8080 of b1, which runs on this node. change may modify the service.
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
	must.Need(fx.t, did == "passed" && err == nil, "the packet was %s: %v", did, err)
	return out
}

// A local backend receives packets from the client's address, and the client receives packets from the VIP.
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
				must.Need(t, r.did == "passed" && r.reason == "forwarded",
					"%s, packet %d: %s: %s", proto, i, r.did, r.reason)
				want := in
				want.Dst, want.TTL = fx.at("b1", 8080), 65
				must.Do(t, onlyHops(want, r.out))
				answer := back(dptest.ACK)
				if i == 0 {
					answer = back(dptest.SYN | dptest.ACK)
				}
				want = answer
				want.Src, want.TTL = fx.at("vip", 80), 65
				must.Do(t, onlyHops(want, fx.out(answer)))
			}
			must.Do(t, fx.confirmed().want(1, 1))
		}
		other := dptest.Packet{Src: fx.at("b1", 8080), Dst: fx.at("client", 41000), Proto: dptest.TCP}
		out := fx.out(other)
		must.True(t, out.Src == other.Src && out.Dst == other.Dst, "an unrelated packet was sent as %+v", out)
	})
}

// If a client uses one port towards two VIPs with the same local server, the server receives two distinct flows, and
// each reply is translated to its VIP.
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
			must.Need(t, r.did == "passed" && r.out.Src.Addr() == p.Src.Addr() && !seen[r.out.Src],
				"%s: %s: %s, from %s", vip, r.did, r.reason, r.out.Src)
			seen[r.out.Src] = true
			answer := fx.out(dptest.Packet{Src: r.out.Dst, Dst: r.out.Src, Proto: dptest.TCP,
				Flags: dptest.SYN | dptest.ACK})
			must.True(t, answer.Src == p.Dst && answer.Dst == p.Src,
				"%s: the answer left from %s to %s", vip, answer.Src, answer.Dst)
		}
	})
}
