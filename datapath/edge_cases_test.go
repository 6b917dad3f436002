package datapath

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// joined runs fragments and reassembles the output.
func (fx *fixture) joined(frames [][]byte) dptest.Packet {
	fx.t.Helper()
	var out [][]byte
	for i, f := range frames {
		r := fx.run(f)
		if r.did != "sent" {
			fx.t.Fatalf("fragment %d was %s: %s", i, r.did, r.reason)
		}
		out = append(out, r.frame)
	}
	p := must.Get(dptest.Join(out))(fx.t)
	return p
}

// All fragments of a datagram take the path of the first one, to the backend and back.
func TestFragmentsFollowTheFirst(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		dns(fx)
		big := udp(fx)
		big.DF, big.Payload = false, make([]byte, 60_000)
		for i := range big.Payload {
			big.Payload[i] = byte(i)
		}
		frames := big.Fragments(7, 1400)
		if r := fx.run(frames[1]); r.did != "dropped" || r.reason != "fragment_not_found" {
			t.Errorf("a later fragment before the first: %s: %s", r.did, r.reason)
		}
		out := fx.joined(frames)
		if err := sentOn(fx, big, out); err != nil {
			t.Error(err)
		}
		fx.last = out
		back := fx.reply(0)
		back.Payload = big.Payload
		if err := toClient(fx, back, fx.joined(back.Fragments(9, 1400))); err != nil {
			t.Error(err)
		}
		if r := fx.run(big.Fragments(8, 1400)[1]); r.reason != "fragment_not_found" {
			t.Errorf("a later fragment of another datagram: %s: %s", r.did, r.reason)
		}
	})
}

// The same for dsr, where the ports select the server.
func TestFragmentsByDSR(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		fx.serve(func(s *lb.Service) { s.Method, s.Ports[0].Protocol = lb.MethodDSR, lb.UDP }, "b1", "b2")
		big := udp(fx)
		big.DF, big.Payload = false, make([]byte, 5000)
		if err := untouched(fx, big, fx.joined(big.Fragments(uint32(big.ID), 1400))); err != nil {
			t.Error(err)
		}
	})
}

// A client that uses one source port towards two VIPs with the same server has two flows.
func TestTwoVIPsWithOneServer(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.SNATPorts = []PortRange{{61000, 61001}} }, func(t *testing.T, fx *fixture) {
		fx.service(lb.TCP, "b1")
		fx.serve(func(s *lb.Service) { s.Name, s.VIPs = "other", []netip.Addr{fx.addr("elsewhere")} }, "b1")
		type flow struct{ in, out dptest.Packet }
		var flows []flow
		for _, vip := range []string{"vip", "elsewhere"} {
			p := tcp(dptest.SYN)(fx)
			p.Dst = fx.at(vip, 80)
			flows = append(flows, flow{p, fx.run(p.Frame()).out})
		}
		if flows[0].out.Src == flows[1].out.Src {
			t.Fatalf("both flows come from %s", flows[0].out.Src)
		}
		for _, f := range flows {
			fx.last = f.out
			back := fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame()).out
			if back.Src != f.in.Dst || back.Dst != f.in.Src {
				t.Errorf("the answer to %s came from %s to %s", f.in.Dst, back.Src, back.Dst)
			}
		}
	})
}

// Source ports come from all addresses in the subnet of a backend.
func TestSeveralSourceAddresses(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, func(o *Options) { o.SNATPorts = []PortRange{{61000, 61000}} })
		second := netip.MustParsePrefix("192.0.2.2/24")
		if v6 {
			second = netip.MustParsePrefix("2001:db8::2/64")
		}
		must.Do(t, fx.host.AddAddress("eth0", second))
		fx.service(lb.TCP, "b1")
		from := map[netip.Addr]bool{}
		for i := range 2 {
			r := fx.run(fx.on(i, dptest.TCP, dptest.SYN).Frame())
			from[r.out.Src.Addr()] = true
			fx.last = r.out
			if back := fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame()).out; back.Dst != fx.on(i, 0, 0).Src {
				t.Errorf("the answer to flow %d went to %s", i, back.Dst)
			}
			fx.went(fx.on(i, dptest.TCP, dptest.ACK))
		}
		if !from[fx.addr("self")] || !from[second.Addr()] {
			t.Errorf("flows came from %v; want both of our addresses", from)
		}
		fx.wantReason("with both ports taken", fx.on(2, dptest.TCP, dptest.SYN), "snat_exhausted")
	})
}

// When all source ports are in use, a new flow evicts a half-open flow, and never an established one.
func TestHalfOpenFlowsAreEvicted(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) { o.SNATPorts = []PortRange{{61000, 61000}} }, func(t *testing.T, fx *fixture) {
		fx.service(lb.TCP, "b1")
		for i := range 3 {
			fx.went(fx.on(i, dptest.TCP, dptest.SYN))
		}
		fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame())
		fx.wantReason("an evicted flow", fx.on(0, dptest.TCP, dptest.ACK), "no_flow")
		fx.went(fx.on(2, dptest.TCP, dptest.ACK))
		fx.wantReason("beside an established flow", fx.on(3, dptest.TCP, dptest.SYN), "snat_exhausted")
		if err := fx.flows().want(1, 1); err != nil {
			t.Errorf("%v: those of the established flow", err)
		}
	})
}

// The backend with the fewest flows for its weight gets the next flow. The agent counts the same number of flows.
func TestLeastConnections(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		fx.serve(func(s *lb.Service) {
			s.Algorithm = lb.AlgorithmLeastConnections
			s.Ports[0].Backends[0].Weight = 2
		}, "b1", "b2")
		flows := map[netip.Addr][]int{}
		open := func(from, to int) {
			t.Helper()
			for i := from; i < to; i++ {
				addr := fx.went(fx.on(i, dptest.TCP, dptest.SYN))
				flows[addr] = append(flows[addr], i)
			}
		}
		open(0, 150)
		b1, b2 := fx.addr("b1"), fx.addr("b2")
		if n := len(flows[b1]); n < 90 || n > 110 {
			t.Errorf("the server with weight 2 of 3 has %d of 150 flows; want about 100", n)
		}
		for _, i := range flows[b2] {
			fx.went(fx.on(i, dptest.TCP, dptest.SYN))
			answer := fx.reply(dptest.SYN | dptest.ACK)
			fx.went(answer)
			p := fx.on(i, dptest.TCP, dptest.RST)
			p.Seq = answer.Ack
			fx.went(p)
		}
		was := len(flows[b2])
		open(200, 230)
		// A flow goes to the busy server when all eight slots that it looks at are of that: one in 26 does.
		if n := len(flows[b2]) - was; n < 20 {
			t.Errorf("the idle server got %d of 30 flows; want about 29", n)
		}
		before := fx.loads()
		fx.do(func() error { fx.d.flows.Collect(context.Background(), nil); return nil })
		if after := fx.loads(); before[b1] != after[b1] || before[b2] != after[b2] || int(after[b1]) != len(flows[b1]) {
			t.Errorf("flows were counted as %v, the walk found %v; want %d and %d",
				before, after, len(flows[b1]), len(flows[b2])-was)
		}
	})
}

func (fx *fixture) loads() map[netip.Addr]uint32 {
	loads := map[netip.Addr]uint32{}
	for at, b := range fx.d.services.Backends.ByAddr {
		var n uint32
		must.Do(fx.t, fx.d.objects.SyBackendLoad.Lookup(b.ID, &n))
		loads[at.Addr()] = n
	}
	return loads
}

// Weights are shares, with every algorithm; a server with weight 0 or one that drains gets no new flow.
func TestWeights(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		for _, a := range lb.Algorithms {
			for _, method := range []lb.Method{lb.MethodNAT, lb.MethodTunnel} {
				fx.reset()
				fx.serve(func(s *lb.Service) {
					s.Algorithm, s.Method, s.Encap = a, method, lb.EncapGUE
					b := s.Ports[0].Backends
					b[0].Weight, b[1].Weight, b[2].Weight, b[3].Drain = 1, 3, 0, true
				}, "b1", "b2", "client", "router")
				got := map[netip.Addr]int{}
				const n = 400
				for i := range n {
					p := fx.on(i, dptest.TCP, dptest.SYN)
					if a == lb.AlgorithmSourceHash { // other addresses, because it does not use the ports
						b := p.Src.Addr().As16()
						b[10], b[14], b[15] = b[10]|bpf.Truth(fx.v6), byte(i/250), byte(i%250) // none of this node
						p.Src = netip.AddrPortFrom(netip.AddrFrom16(b).Unmap(), 20000)
					}
					got[fx.went(p)]++
				}
				if b1 := got[fx.addr("b1")]; b1 < n/4*5/10 || b1 > n/4*15/10 || b1+got[fx.addr("b2")] != n {
					t.Errorf("%s by %s: %v; want a quarter of %d for the first and the rest for the second",
						a, method, got, n)
				}
			}
		}
	})
}

// A client keeps its server during the affinity timeout, while that server accepts new flows.
func TestAffinity(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		for _, method := range []lb.Method{lb.MethodNAT, lb.MethodTunnel} {
			fx.reset()
			with := func(backends ...string) {
				fx.serve(func(s *lb.Service) {
					s.Affinity, s.Algorithm, s.Method, s.Encap = time.Hour, lb.AlgorithmRandom, method, lb.EncapGUE
				}, backends...)
			}
			with("b1", "b2")
			first := fx.went(fx.on(0, dptest.TCP, dptest.SYN))
			for i := range 40 {
				if to := fx.went(fx.on(i, dptest.TCP, dptest.SYN)); to != first {
					t.Fatalf("%s: flow %d went to %s; want %s", method, i, to, first)
				}
			}
			left, removed := "b1", "b2"
			if first == fx.addr("b1") {
				left, removed = removed, left
			}
			with(left)
			if to := fx.went(fx.on(50, dptest.TCP, dptest.SYN)); to != fx.addr(left) {
				t.Errorf("%s: after %s was removed a flow went to %s", method, removed, to)
			}
			if method == lb.MethodNAT {
				continue
			}
			if to := fx.went(fx.on(0, dptest.TCP, dptest.ACK)); to != first {
				t.Errorf("%s: the old flow went to %s; want %s", method, to, first)
			}
		}
	})
}

// The rates of ICMP errors, and of resets for a fault of this node, are limited.
func TestAnswersAreLimited(t *testing.T) {
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		limitedTo(t, fx, Verdict{"refuse", "no_frontend"}, Verdict{"drop", "icmp_ratelimited"}, udp(fx).Frame())
		limitedTo(t, fx, Verdict{"reset", "no_route"}, Verdict{"drop", "no_route"}, tcp(dptest.SYN)(fx).Frame())
	})
}

func limitedTo(t *testing.T, fx *fixture, answer, drop Verdict, frame []byte) {
	t.Helper()
	fx.service(lb.TCP, "unrouted")
	before := fx.counts()
	start := time.Now()
	for range 4000 {
		if fx.hook == hookXDP {
			fx.runXDP(frame)
		} else {
			fx.runTC(frame)
		}
	}
	took := time.Since(start)
	after := fx.counts()
	answered := after[answer] - before[answer]
	limited := after[drop] - before[drop]
	if answered+limited != 4000 || answered == 0 || limited == 0 && took < 500*time.Millisecond {
		t.Errorf("of 4000 packets in %s, %d were answered (%s) and %d were not", took, answered, answer.Reason, limited)
	}
}

// sy_tc_out: health checks take the path of traffic, and a server behind a tunnel announces a segment size that fits.
func TestOut(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		fx := newFixture(t, hookTC, v6, acceptTunnels)
		checks := map[lb.Method]checkFunc{lb.MethodDSR: untouched, lb.MethodTunnel: tunnelled(dptest.UDP)}
		for method, check := range checks {
			var mark uint32
			fx.do(func() (err error) {
				mark, _, err = fx.d.ProbeWay(fx.addr("vip"), fx.addr("b2"), method, lb.EncapGUE)
				return err
			})
			probe := fx.fromClient(dptest.TCP, dptest.SYN)
			probe.Src = fx.at("self", 33333)
			did, out := fx.runOut(probe.Frame(), mark)
			p, err := dptest.Parse(out)
			if err != nil || did != "sent" {
				t.Fatalf("%s: %s, %v", method, did, err)
			}
			if err := check(fx, probe, p); err != nil {
				t.Errorf("%s: %v", method, err)
			}
		}
		synAck := dptest.Packet{Src: fx.at("loopback", 80), Dst: fx.at("client", 40000), Proto: dptest.TCP,
			Flags: dptest.SYN | dptest.ACK, MSS: 1460}
		if did, out := fx.runOut(synAck.Frame(), 0); did != "passed" || string(out) != string(synAck.Frame()) {
			t.Errorf("an answer outside tunnels was changed: %s", did)
		}
		fx.run(tunnelFrom("router")(fx).Frame())
		want := uint16(1500 - 32 - 20 - 20)
		if v6 {
			want = 1500 - 52 - 40 - 20
		}
		_, out := fx.runOut(synAck.Frame(), 0)
		if p, err := dptest.Parse(out); err != nil || p.MSS != want {
			t.Errorf("the server announces %d, %v; want %d", p.MSS, err, want)
		}
		synAck.MSS = 1000
		_, out = fx.runOut(synAck.Frame(), 0)
		if p, err := dptest.Parse(out); err != nil || p.MSS != 1000 {
			t.Errorf("the server announces %d, %v; want 1000, unchanged", p.MSS, err)
		}
	}
}

func (fx *fixture) runOut(frame []byte, mark uint32) (did string, out []byte) {
	fx.t.Helper()
	return fx.runProgram(fx.d.objects.SyTcOut, frame, fx.skb(mark), hookTC.verdicts())
}
