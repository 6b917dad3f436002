package datapath

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// on is a packet of the client's n-th flow.
func (fx *fixture) on(flow int, proto, flags uint8) dptest.Packet {
	p := fx.fromClient(proto, flags)
	p.Src = fx.at("client", uint16(20000+flow))
	return p
}

// went runs a packet and returns the server that it is sent to.
func (fx *fixture) went(p dptest.Packet) netip.Addr {
	fx.t.Helper()
	r := fx.run(p.Frame())
	must.Need(fx.t, r.did == "sent" && r.reason == "forwarded", "%s: %s", r.did, r.reason)
	return r.out.Dst.Addr()
}

// quick is went for many packets. It skips explain, the counters, and the fixture's last packet.
func (fx *fixture) quick(p dptest.Packet) netip.Addr {
	fx.t.Helper()
	did, frame := fx.through(p.Frame())
	out, err := dptest.Parse(frame)
	must.Need(fx.t, did == "sent" && err == nil, "%s: %v", did, err)
	return out.Dst.Addr()
}

// tunnelTo serves with GUE and servers whose addresses end in these numbers.
func (fx *fixture) tunnelTo(proto lb.Protocol, down func(netip.Addr) bool, hosts ...int) {
	fx.t.Helper()
	s := &lb.Service{
		Name: "web", VIPs: []netip.Addr{fx.addr("vip")},
		Ports:     lb.PortsOn(nil, lb.Port{Port: 80, Target: 80, Protocol: proto}),
		Algorithm: lb.AlgorithmMaglev, Method: lb.MethodTunnel, Encap: lb.EncapGUE,
		Check: lb.CheckSpec{Type: lb.CheckTCP},
	}
	states := map[lb.CheckKey]lb.Health{}
	for _, h := range hosts {
		b := lb.Backend{Addr: netip.MustParseAddr(fmt.Sprintf("192.0.2.%d", h)), Weight: 1}
		if fx.v6 {
			b.Addr = netip.MustParseAddr(fmt.Sprintf("2001:db8::%d", h))
		}
		s.Ports[0].Backends = append(s.Ports[0].Backends, b)
	}
	for _, c := range lb.Checks(s) {
		state := lb.StateHealthy
		if down != nil && down(c.Target.Addr()) {
			state = lb.StateUnhealthy
		}
		states[c.Key] = lb.Health{State: state}
	}
	fx.apply(lb.Delta{Put: lb.Build(s, states, lb.Drains{}).Frontends})
	fx.end()
}

// DSR flows keep their server when servers are added or removed, when the size of the table changes, and when the agent
// restarts. They lose it when it is down.
func TestDirectReturnFlowsKeepTheirServer(t *testing.T) {
	t.Parallel()
	const flows = 60
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		for _, proto := range []lb.Protocol{lb.TCP, lb.UDP} {
			fx.reset()
			all := []int{21, 22, 23, 24, 25, 26, 27, 28, 29, 30}
			fx.tunnelTo(proto, nil, all...)
			server := map[int]netip.Addr{}
			next := uint8(dptest.SYN)
			// Until each UDP flow was in the sample, which is empty while the table is new.
			for start := time.Now(); len(fx.dsrFlows()) < flows && time.Since(start) < time.Minute; {
				for i := range flows {
					to := fx.quick(fx.on(i, uint8(proto), next))
					was, ok := server[i]
					must.Need(t, !ok || was == to, "%s: flow %d went to %s; was %s", proto, i, to, was)
					server[i] = to
				}
				next = dptest.ACK
			}
			stays := func(step string, except func(netip.Addr) bool) {
				t.Helper()
				moved := 0
				for i := range flows {
					if to := fx.quick(fx.on(i, uint8(proto), dptest.ACK)); to != server[i] && !except(server[i]) {
						moved++
					}
				}
				must.True(t, moved == 0, "%s: %s: %d of %d flows moved", proto, step, moved, flows)
			}
			none := func(netip.Addr) bool { return false }
			fx.tunnelTo(proto, nil, all[2:]...)
			stays("two servers less", none)
			fx.close()
			fx.open()
			stays("another agent", none)
			fx.tunnelTo(proto, nil, all[2:]...)
			stays("its first plan", none)
			fx.tunnelTo(proto, nil, all...)
			stays("two servers more", none)
			fx.tunnelTo(proto, nil, append(all, 31, 32)...)
			stays("a larger table", none)
			must.Row(t, "entries of DSR flows", flows, len(fx.dsrFlows()))
			down := func(a netip.Addr) bool { return a == server[0] }
			fx.tunnelTo(proto, down, append(all, 31, 32)...)
			stays("a server that is down", down)
			to := fx.went(fx.on(0, uint8(proto), dptest.ACK))
			must.True(t, to != server[0], "%s: a flow is still sent to %s, which is down", proto, to)
		}
	})
}

// A connection whose slot gets another server between its SYN and its first ACK stays with the SYN's server. A
// connection that this balancer has not seen goes to the slot's server. So does one that waits for more than a second.
func TestHandshakesByDirectReturnKeepTheirServer(t *testing.T) {
	t.Parallel()
	const flows = 200
	all := []int{21, 22, 23, 24, 25, 26, 27, 28, 29, 30}
	for name, hosts := range map[string][]int{
		"servers removed": all[2:], "server added": append(slices.Clone(all), 31),
		"larger table": append(slices.Clone(all), 31, 32, 33),
	} {
		t.Run(name, func(t *testing.T) {
			fx := shared(t, hookXDP, false, nil)
			fx.tunnelTo(lb.TCP, nil, all...)
			server, late := make([]netip.Addr, flows), make([]netip.Addr, flows)
			for i := range flows {
				server[i] = fx.quick(fx.on(i, dptest.TCP, dptest.SYN))
				late[i] = fx.quick(fx.on(2000+i, dptest.TCP, dptest.SYN))
			}
			fx.tunnelTo(lb.TCP, nil, hosts...)
			for range 2 {
				for i := range flows {
					fx.slotsChanged(0)
					must.Row(t, "the server after its SYN", server[i], fx.quick(fx.on(i, dptest.TCP, dptest.ACK)))
				}
			}
			for i := range flows {
				slot := fx.quick(fx.on(1000+i, dptest.TCP, dptest.SYN))
				must.Row(t, "an unknown flow", slot, fx.quick(fx.on(1000+i, dptest.TCP, dptest.ACK)))
			}
			fx.slotsChanged(2 * time.Second)
			moved := 0
			for i := range flows {
				if fx.quick(fx.on(2000+i, dptest.TCP, dptest.ACK)) != late[i] {
					moved++
				}
			}
			must.True(t, moved > 0,
				"each flow that waited for more than a second went to the earlier server of its slot")
		})
	}
}

// slotsChanged backdates the last change of all frontends' slots.
func (fx *fixture) slotsChanged(ago time.Duration) {
	fx.t.Helper()
	for k, fe := range entries[bpf.FrontendKey, bpf.Frontend](fx.t, fx.d.objects.SyFrontends) {
		fe.Changed = table.TableClock(bpf.Uptime() - ago)
		must.Do(fx.t, fx.d.objects.SyFrontends.Put(k, fe))
	}
}

func (fx *fixture) dsrFlows() map[bpf.FlowKey]bpf.DSRFlow {
	return entries[bpf.FlowKey, bpf.DSRFlow](fx.t, fx.d.objects.SyDsrFlows)
}

// If the hash determines a SYN's server, the SYN writes no entry, so forged sources cannot evict anything.
func TestOpeningByHashWritesNoEntry(t *testing.T) {
	t.Parallel()
	for _, algorithm := range []lb.Algorithm{lb.AlgorithmMaglev, lb.AlgorithmSourceHash, lb.AlgorithmRandom} {
		t.Run(string(algorithm), func(t *testing.T) {
			fx := shared(t, hookXDP, false, nil)
			fx.serve(func(s *lb.Service) {
				s.Method, s.Encap, s.Algorithm = lb.MethodTunnel, lb.EncapIPIP, algorithm
			}, "b1", "b2")
			for i := range 100 {
				fx.went(fx.on(i, dptest.TCP, dptest.SYN))
			}
			n := len(fx.dsrFlows()) + len(entries[bpf.FlowKey, bpf.DSRFlow](t, fx.d.objects.SyDsrHalfopen))
			must.True(t, n == 0, "%d entries; want none", n)
			to := fx.went(fx.on(7, dptest.TCP, dptest.ACK))
			must.Row(t, "the SYN again", to, fx.went(fx.on(7, dptest.TCP, dptest.SYN)))
		})
	}
}

// If the hash does not determine the server, SYNs from forged sources evict no connection, not even an idle one.
// Sources that send a second packet evict no connection that has packets (D13).
func TestFloodDoesNotTouchFlowsWithoutAHash(t *testing.T) {
	t.Parallel()
	const live = 20
	for name, change := range map[string]func(*lb.Service){
		"round-robin":       func(s *lb.Service) { s.Algorithm = lb.AlgorithmRoundRobin },
		"least-connections": func(s *lb.Service) { s.Algorithm = lb.AlgorithmLeastConnections },
		"affinity":          func(s *lb.Service) { s.Affinity = time.Hour },
	} {
		t.Run(name, func(t *testing.T) {
			fx := shared(t, hookXDP, false, nil)
			fx.serve(func(s *lb.Service) {
				s.Method, s.Encap = lb.MethodTunnel, lb.EncapGUE
				change(s)
			}, "b1", "b2")
			var server [live]netip.Addr
			for i := range server {
				fx.went(fx.on(i, dptest.TCP, dptest.SYN))
				server[i] = fx.went(fx.on(i, dptest.TCP, dptest.ACK))
			}
			stay := func(when string) {
				t.Helper()
				for i, was := range server {
					to := fx.quick(fx.on(i, dptest.TCP, dptest.ACK))
					must.Need(t, to == was, "%s: flow %d: to %s; it was at %s", when, i, to, was)
				}
			}
			rnd := rand.New(rand.NewPCG(1, 13))
			sources := int(max(fx.d.objects.SyDsrHalfopen.MaxEntries(), fx.d.objects.SyDsrFlows.MaxEntries())) * 5 / 4
			fx.runMany(fx.invented(rnd, sources, dptest.TCP, dptest.SYN))
			stay("after SYNs")
			must.Row(t, "flows of which the client went on", live, len(fx.dsrFlows()))
			for range sources / 1000 {
				var frames [][]byte
				for _, syn := range fx.invented(rnd, 1000, dptest.TCP, dptest.SYN) {
					ack := slices.Clone(syn)
					ack[14+20+13] = dptest.ACK
					frames = append(frames, syn, ack)
				}
				fx.runMany(frames)
				stay("between SYNs and ACKs")
			}
			n := len(fx.dsrFlows())
			must.True(t, n >= 10*live, "%d flows: the flood proves nothing", n)
		})
	}
}

// While all slots have their first backend, only a sample of a flow's packets writes an entry.
func TestDirectReturnFlowsAreSampled(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookXDP, false, nil)
	fx.tunnelTo(lb.TCP, nil, 21, 22)
	for i := range 640 {
		fx.went(fx.on(i, dptest.TCP, dptest.ACK))
	}
	n := len(fx.dsrFlows())
	must.True(t, n <= 80, "%d of 640 packets left an entry; want about one in %d", n, 32)
}

func TestAnotherMethodEndsFlows(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, nil)
	established(fx)
	dsr(fx)
	fx.end()
	must.Do(t, fx.flows().want(0, 0)) // NAT flows
	must.Row(t, "a new flow went to", fx.at("vip", 80), fx.run(tcp(dptest.SYN)(fx).Frame()).out.Dst)
	web(fx)
	fx.end()
	fx.wantReason("a flow by dsr continues by nat", tcp(dptest.ACK)(fx), "no_flow")
}

// Forged packets with the addresses of a DSR flow, whose slot has another server now, end the flow only if nothing else
// arrives for some seconds. A client that reuses its port after that gets a new flow.
func TestForgedPacketsKeepDirectReturnFlows(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		send := func(flow int, flags uint8, seq uint32) netip.Addr {
			t.Helper()
			p := fx.on(flow, dptest.TCP, flags)
			p.Seq, p.Payload = seq, nil
			return fx.went(p)
		}
		open := func(flow int) netip.Addr {
			send(flow, dptest.SYN, 0)
			return send(flow, dptest.ACK, 1)
		}
		fx.tunnelTo(lb.TCP, nil, 21, 22)
		server := open(0)
		other := 1
		for open(other) != server {
			other++
		}
		left := 21
		if server == fx.addr("b1") {
			left = 22
		}
		fx.tunnelTo(lb.TCP, nil, left)
		stays := func(flow int, flags uint8, seq uint32) {
			t.Helper()
			to := send(flow, flags, seq)
			must.True(t, to == server, "flags %#x: to %s; want %s", flags, to, server)
		}
		moves := func(flow int, flags uint8, seq uint32) {
			t.Helper()
			to := send(flow, flags, seq)
			must.True(t, to != server, "flags %#x: to %s, which was removed", flags, to)
		}
		for i := range 50 {
			for _, flags := range []uint8{dptest.SYN, dptest.RST, dptest.SYN, dptest.FIN | dptest.ACK, dptest.SYN} {
				stays(0, flags, uint32(0xbad00+i%128+2))
			}
			stays(0, dptest.ACK, 1)
			fx.ageDSR(2 * time.Second)
		}
		fx.ageDSR(3 * time.Second)
		stays(0, dptest.SYN, 7) // may be forged
		fx.ageDSR(3 * time.Second)
		moves(0, dptest.SYN, 7)
		moves(0, dptest.ACK, 8)

		stays(other, dptest.FIN|dptest.ACK, 1)
		stays(other, dptest.ACK, 2)
		fx.ageDSR(3 * time.Second)
		moves(other, dptest.SYN, 900)
		moves(other, dptest.ACK, 901)
	})
}

// ageDSR makes the entries of all DSR flows older.
func (fx *fixture) ageDSR(by time.Duration) {
	fx.t.Helper()
	for k, f := range fx.dsrFlows() {
		f.Seen -= uint64(by)
		must.Do(fx.t, fx.d.objects.SyDsrFlows.Put(&k, &f))
	}
}
