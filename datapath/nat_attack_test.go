package datapath

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// runMany runs frames without explain and without reading the counters, and counts what was done with them.
func (fx *fixture) runMany(frames [][]byte) (did map[string]int) {
	fx.t.Helper()
	did = map[string]int{}
	fx.do(func() error {
		for _, f := range frames {
			did[fx.runRaw(f)]++
		}
		return nil
	})
	return did
}

// invented returns packets to VIP:80 from random addresses and ports.
func (fx *fixture) invented(rnd *rand.Rand, n int, proto, flags uint8) (frames [][]byte) {
	for range n {
		p := fx.fromClient(proto, flags)
		a := p.Src.Addr().AsSlice()
		a[len(a)-2], a[len(a)-1] = byte(1+rnd.IntN(250)), byte(rnd.Uint32())
		a[1] ^= 1 // in another network
		addr, _ := netip.AddrFromSlice(a)
		p.Src = netip.AddrPortFrom(addr, uint16(rnd.Uint32()))
		p.Seq = rnd.Uint32()
		frames = append(frames, p.Frame())
	}
	return frames
}

// defaultPorts is the default of snat_ports.
func defaultPorts(o *Options) { o.SNATPorts = []PortRange{{1024, 32767}, {61000, 65535}} }

// With 200,000 forged SYNs per second and a round-trip time of 50 ms, 10,000 of them arrive between two packets of a
// handshake. All handshakes with one backend succeed, even when all source ports are in use.
func TestHandshakesDuringASYNFlood(t *testing.T) {
	t.Parallel()
	const between, clients = 10_000, 12
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, defaultPorts)
		fx.service(lb.TCP, "b1")
		rnd := rand.New(rand.NewPCG(1, 1))
		flood := func() { fx.runMany(fx.invented(rnd, between, dptest.TCP, dptest.SYN)) }
		for range 4 {
			flood() // use up all ports
		}
		var sent [clients]dptest.Packet
		for step, flags := range []uint8{dptest.SYN, dptest.SYN | dptest.ACK, dptest.ACK} {
			for i := range clients {
				in := fx.on(i, dptest.TCP, flags)
				if step == 1 {
					fx.last = sent[i]
					in = fx.reply(flags)
				}
				r := fx.run(in.Frame())
				must.Need(t, r.did == "sent" && r.reason == "forwarded",
					"%s: step %d of handshake %d: %s: %s", h, step, i, r.did, r.reason)
				switch step {
				case 0:
					sent[i] = r.out
				case 1:
					want := fx.on(i, dptest.TCP, 0).Src
					must.Need(t, r.out.Dst == want, "%s: the answer to %s went to %s", h, want, r.out.Dst)
				case 2:
					must.Need(t, r.out.Src == sent[i].Src,
						"%s: handshake %d continued from %s, after %s", h, i, r.out.Src, sent[i].Src)
				}
				if step < 2 && i%4 == 3 {
					fx.runMany(fx.invented(rnd, between/3, dptest.TCP, dptest.SYN))
				}
			}
		}
		must.Do(t, fx.confirmed().want(clients, clients))
	}
}

// While an answer may come, a UDP source port belongs to the client that asked.
func TestUDPSourcePortsAreNotTakenOver(t *testing.T) {
	t.Parallel()
	eachOf(t, func(o *Options) {
		o.SNATPorts, o.MaxFlows = []PortRange{{61000, 61099}}, 100_000
	}, func(t *testing.T, fx *fixture) {
		fx.service(lb.UDP, "b1")
		victim := fx.run(udp(fx).Frame())
		did := fx.runMany(fx.invented(rand.New(rand.NewPCG(1, 2)), 3000, dptest.UDP, 0))
		must.True(t, did["dropped"] > 0, "the source ports are not used up: the test covers nothing")
		fx.last = victim.out
		must.Row(t, "the answer went to", udp(fx).Src, fx.run(fx.reply(0).Frame()).out.Dst)
	})
}

// Datagrams from forged sources, with answers and further datagrams, leave entries for TCP and for other UDP services.
func TestUDPFloodLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookXDP, false, func(o *Options) { defaultPorts(o); o.MaxFlows = 400 })
	fx.service(lb.UDP, "b1")
	fx.serve(func(s *lb.Service) {
		s.Name = "other"
		s.Ports = lb.PortsOn(s.Ports[0].Backends, lb.Port{Port: 81, Target: 8080, Protocol: lb.UDP})
	}, "b1")
	fx.serve(func(s *lb.Service) { s.Name = "web" }, "b1")
	for i := range 500 {
		fx.runMany([][]byte{fx.on(1000+i, dptest.UDP, 0).Frame()})
	}
	for k, f := range fx.flows().servers { // all are answered and send again
		from := netip.AddrPortFrom(bpf.FromAddr(f.Client.Client), bpf.Swap(f.Client.Sport))
		answer := dptest.Packet{Src: fx.at("b1", 8080), Dst: netip.AddrPortFrom(bpf.FromAddr(k.To), bpf.Swap(k.Dport)),
			Proto: dptest.UDP, Payload: []byte("answer")}
		again := udp(fx)
		again.Src = from
		fx.runMany([][]byte{answer.Frame(), again.Frame()})
	}
	must.Row(t, "flows of the flooded service", 100, len(fx.confirmed().servers)) // the service's share
	other := udp(fx)
	other.Dst = fx.at("vip", 81)
	fx.wantReason("another UDP service", other, forwarded)
	must.Row(t, "a connection by TCP", "", fx.openFlow(lb.TCP, 0))
}

// age backdates the last packet of each side of all flows.
func (fx *fixture) age(clients, servers time.Duration) {
	fx.t.Helper()
	fx.clear("sy_snat_used") // programs rely on hints for a second
	for _, table := range fx.d.objects.FlowTables() {
		all := fx.flowsIn(table)
		for k, f := range all.clients {
			f.F.Seen -= bpf.FlowClock(clients)
			must.Do(fx.t, table.Clients.Update(&k, &f, ebpf.UpdateExist))
		}
		for k, f := range all.servers {
			f.F.Seen -= bpf.FlowClock(servers)
			must.Do(fx.t, table.Servers.Update(&k, &f, ebpf.UpdateExist))
		}
	}
}

// A handshake completes with its SYN's server even if the table, or its size, changes in between.
func TestHandshakeAcrossAChange(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		for _, before := range [][]string{{"b1"}, {"b2"}, {"b1", "b2"}} {
			for _, after := range [][]string{{"b1"}, {"b2"}, {"b1", "b2", "router"}} {
				fx.reset()
				fx.service(lb.TCP, before...)
				server := fx.went(tcp(dptest.SYN)(fx))
				fx.service(lb.TCP, after...)
				fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame())
				to := fx.went(tcp(dptest.ACK)(fx))
				must.True(t, to == server, "%v, then %v: the SYN went to %s, the ACK to %s", before, after, server, to)
			}
		}
	})
}

// UDP floods of several services leave entries for one that is not flooded.
func TestUDPFloodsOfSeveralServicesLeaveOthersAlone(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookXDP, false, func(o *Options) { defaultPorts(o); o.MaxFlows = 400 })
	for _, port := range []uint16{80, 81, 82, 83} {
		fx.serve(func(s *lb.Service) {
			s.Name = "port" + string(rune(port))
			s.Ports = lb.PortsOn(s.Ports[0].Backends, lb.Port{Port: port, Target: 8000 + port, Protocol: lb.UDP})
		}, "b1")
	}
	for _, port := range []uint16{80, 81, 82} {
		for i := range 300 {
			p := fx.on(i, dptest.UDP, 0)
			p.Dst = fx.at("vip", port)
			fx.runMany([][]byte{p.Frame()})
		}
	}
	for i := range 5 {
		p := fx.on(i, dptest.UDP, 0)
		p.Dst = fx.at("vip", 83)
		fx.wantReason(fmt.Sprintf("the client %d of a service that is not flooded", i), p, forwarded)
	}
}

// Two blind packets with a client's address, before or after the server has answered, end no handshake.
func TestForgedSYNAndRSTOfAClient(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookTC, hookXDP} {
		for _, answered := range []bool{false, true} {
			fx := shared(t, h, false, nil)
			with(web, tcp(dptest.SYN))(fx)
			answer := fx.reply(dptest.SYN | dptest.ACK)
			if answered {
				fx.run(answer.Frame())
			}
			fx.runMany([][]byte{bare(fx.fromClient(dptest.TCP, dptest.SYN), 1<<30, 5001).Frame(),
				bare(fx.fromClient(dptest.TCP, dptest.RST), 1<<30+1, 5001).Frame()})
			if !answered {
				fx.run(answer.Frame())
			}
			fx.wantReason(fmt.Sprintf("%s, answered %t: the ACK", h, answered), tcp(dptest.ACK)(fx), forwarded)
		}
	}
}

// Another CPU may write an entry after this one has read the clock.
func TestNewerEntriesAreNotExpired(t *testing.T) {
	t.Parallel()
	eachOf(t, onePort, func(t *testing.T, fx *fixture) {
		fx.service(lb.TCP, "b1")
		must.Equal(t, "", fx.openFlow(lb.TCP, 0))
		fx.goesOn(lb.TCP, 0)
		fx.age(-time.Second, -time.Second)
		fx.wantReason("a SYN of another client", fx.on(1, dptest.TCP, dptest.SYN), "snat_exhausted")
		fx.wantReason("a packet of the flow", fx.on(0, dptest.TCP, dptest.ACK), forwarded)
	})
}
