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
		must.Need(fx.t, r.did == "sent", "fragment %d was %s: %s", i, r.did, r.reason)
		out = append(out, r.frame)
	}
	return must.Get(dptest.Join(out))(fx.t)
}

// All fragments of a datagram take the first one's path, to the backend and back.
func TestFragmentsFollowTheFirst(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		dns(fx)
		big := udp(fx)
		big.DF, big.Payload = false, payload(60_000)
		frames := big.Fragments(7, 1400)
		r := fx.run(frames[1])
		must.Row(t, "a later fragment before the first", "dropped: fragment_not_found", r.did+": "+r.reason)
		out := fx.joined(frames)
		must.Do(t, sentOn(fx, big, out))
		fx.last = out
		back := fx.reply(0)
		back.Payload = big.Payload
		must.Do(t, toClient(fx, back, fx.joined(back.Fragments(9, 1400))))
		r = fx.run(big.Fragments(8, 1400)[1])
		must.Row(t, "a later fragment of another datagram", "fragment_not_found", r.reason)
	})
}

// The same with dsr, where the ports select the server.
func TestFragmentsByDSR(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		fx.serve(func(s *lb.Service) { s.Method, s.Ports[0].Protocol = lb.MethodDSR, lb.UDP }, "b1", "b2")
		big := udp(fx)
		big.DF, big.Payload = false, make([]byte, 5000)
		must.Do(t, untouched(fx, big, fx.joined(big.Fragments(uint32(big.ID), 1400))))
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
		must.Need(t, flows[0].out.Src != flows[1].out.Src, "both flows come from %s", flows[0].out.Src)
		for _, f := range flows {
			fx.last = f.out
			back := fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame()).out
			must.True(t, back.Src == f.in.Dst && back.Dst == f.in.Src,
				"the answer to %s came from %s to %s", f.in.Dst, back.Src, back.Dst)
		}
	})
}

// Source ports are used on all of our addresses in a backend's subnet.
func TestSeveralSourceAddresses(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, onePort)
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
			back := fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame()).out
			must.Row(t, "the answer went to", fx.on(i, 0, 0).Src, back.Dst)
			fx.went(fx.on(i, dptest.TCP, dptest.ACK))
		}
		must.Row(t, "sources", map[netip.Addr]bool{fx.addr("self"): true, second.Addr(): true}, from)
		fx.wantReason("with both ports taken", fx.on(2, dptest.TCP, dptest.SYN), "snat_exhausted")
	})
}

// When all source ports are in use, a new flow evicts a half-open flow, but never an established one.
func TestHalfOpenFlowsAreEvicted(t *testing.T) {
	t.Parallel()
	eachOf(t, onePort, func(t *testing.T, fx *fixture) {
		fx.service(lb.TCP, "b1")
		for i := range 3 {
			fx.went(fx.on(i, dptest.TCP, dptest.SYN))
		}
		fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame())
		fx.wantReason("an evicted flow", fx.on(0, dptest.TCP, dptest.ACK), "no_flow")
		fx.went(fx.on(2, dptest.TCP, dptest.ACK))
		fx.wantReason("beside an established flow", fx.on(3, dptest.TCP, dptest.SYN), "snat_exhausted")
		must.Do(t, fx.flows().want(1, 1)) // the established flow
	})
}

// The backend with the fewest flows for its weight receives the next flow. The agent counts the same number of flows.
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
		n := len(flows[b1])
		must.True(t, n >= 90 && n <= 110, "the server with weight 2 of 3 has %d of 150 flows; want about 100", n)
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
		// A flow goes to the busy server if all eight slots that are compared belong to it, which happens once in 26
		// flows.
		n = len(flows[b2]) - was
		must.True(t, n >= 20, "the idle server got %d of 30 flows; want about 29", n)
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

// With every algorithm, weights are shares. A server that drains or has weight 0 receives no new flow.
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
					if a == lb.AlgorithmSourceHash { // vary the address, because this algorithm ignores ports
						b := p.Src.Addr().As16()
						b[10], b[14], b[15] = b[10]|bpf.Truth(fx.v6), byte(i/250), byte(i%250) // not this node's
						p.Src = netip.AddrPortFrom(netip.AddrFrom16(b).Unmap(), 20000)
					}
					got[fx.quick(p)]++
				}
				b1 := got[fx.addr("b1")]
				must.True(t, b1 >= n/4*5/10 && b1 <= n/4*15/10 && b1+got[fx.addr("b2")] == n,
					"%s by %s: %v; want a quarter of %d for the first and the rest for the second", a, method, got, n)
			}
		}
	})
}

// A client keeps its server during the affinity timeout, as long as that server accepts new flows.
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
				must.Row(t, method, first, fx.quick(fx.on(i, dptest.TCP, dptest.SYN)))
			}
			left := "b1"
			if first == fx.addr("b1") {
				left = "b2"
			}
			with(left)
			must.Row(t, method+": a flow went to", fx.addr(left), fx.went(fx.on(50, dptest.TCP, dptest.SYN)))
			if method != lb.MethodNAT {
				must.Row(t, method+": the old flow", first, fx.went(fx.on(0, dptest.TCP, dptest.ACK)))
			}
		}
	})
}

// ICMP errors, and resets for a fault of this node, are rate-limited.
func TestAnswersAreLimited(t *testing.T) {
	unrouted := func(fx *fixture) { fx.service(lb.TCP, "unrouted") }
	for _, tt := range []struct {
		state        func(*fixture)
		in           func(*fixture) dptest.Packet
		answer, drop Verdict
	}{
		{unrouted, udp, Verdict{"refuse", "no_frontend"}, Verdict{"drop", "icmp_ratelimited"}},
		{unrouted, tcp(dptest.SYN), Verdict{"reset", "no_route"}, Verdict{"drop", "no_route"}},
		{func(fx *fixture) { fx.service(lb.TCP, "b1"); connect(fx) }, tcp(dptest.SYN),
			Verdict{"reset", "snat_exhausted"}, Verdict{"drop", "snat_exhausted"}},
	} {
		eachOf(t, onePort, func(t *testing.T, fx *fixture) {
			tt.state(fx)
			p := tt.in(fx)
			p.Src = fx.at("client", 40001)
			before, start := fx.counts(), time.Now()
			for range 4000 {
				fx.first(p.Frame())
			}
			took, after := time.Since(start), fx.counts()
			answered, limited := after[tt.answer]-before[tt.answer], after[tt.drop]-before[tt.drop]
			must.True(t, answered+limited == 4000 && answered > 0 && (limited > 0 || took >= 500*time.Millisecond),
				"of 4000 packets in %s, %d were answered (%s) and %d were not",
				took, answered, tt.answer.Reason, limited)
		})
	}
}

// sy_tc_out: health checks take the path of traffic, and a server behind a tunnel announces an MSS that fits.
func TestOut(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		fx := newFixture(t, hookTC, v6, acceptTunnels)
		for method, check := range map[lb.Method]checkFunc{
			lb.MethodDSR: untouched, lb.MethodTunnel: tunnelled(dptest.UDP),
		} {
			mark := fx.probeMark("b2", method)
			probe := fx.fromClient(dptest.TCP, dptest.SYN)
			probe.Src = fx.at("self", 33333)
			did, out := fx.runOut(probe.Frame(), mark)
			p, err := dptest.Parse(out)
			must.Need(t, err == nil && did == "sent", "%s: %s, %v", method, did, err)
			must.Do(t, check(fx, probe, p))
		}
		synAck := dptest.Packet{Src: fx.at("loopback", 80), Dst: fx.at("client", 40000), Proto: dptest.TCP,
			Flags: dptest.SYN | dptest.ACK, MSS: 1460}
		did, out := fx.runOut(synAck.Frame(), 0)
		must.True(t, did == "passed" && string(out) == string(synAck.Frame()), "outside tunnels: changed, %s", did)
		fx.run(tunnelFrom("router")(fx).Frame())
		want := uint16(1500 - 32 - 20 - 20)
		if v6 {
			want = 1500 - 52 - 40 - 20
		}
		must.Row(t, "announced for 1460", want, fx.out(synAck).MSS)
		synAck.MSS = 1000
		must.Row(t, "announced for 1000", 1000, fx.out(synAck).MSS)
	}
}

// probeMark returns the mark of a server's health checks.
func (fx *fixture) probeMark(server string, method lb.Method) (mark uint32) {
	fx.t.Helper()
	fx.do(func() (err error) {
		mark, _, err = fx.d.ProbeWay(fx.addr("vip"), fx.addr(server), method, lb.EncapGUE)
		return err
	})
	return mark
}

func (fx *fixture) runOut(frame []byte, mark uint32) (did string, out []byte) {
	fx.t.Helper()
	return fx.runProgram(fx.active().Out, frame, fx.skb(mark), hookTC.verdicts())
}
