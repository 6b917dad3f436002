package datapath

import (
	"net"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
)

// nextHop returns the destination MAC address that a packet is sent with.
func (fx *fixture) nextHop(p dptest.Packet) string {
	fx.t.Helper()
	r := fx.run(p.Frame())
	must.Need(fx.t, r.did == "sent" && r.reason == "forwarded", "%s: %s", r.did, r.reason)
	return net.HardwareAddr(r.frame[:6]).String()
}

// neighbour sets a neighbour's MAC address.
func (fx *fixture) neighbour(addr netip.Addr, mac ...byte) {
	fx.t.Helper()
	fx.do(func() error {
		return netlink.NeighSet(&netlink.Neigh{LinkIndex: int(fx.nic), State: netlink.NUD_PERMANENT,
			IP: addr.AsSlice(), HardwareAddr: mac})
	})
}

// A route with several next hops spreads the flows, and all packets of a flow take the same next hop (D15).
func TestRouteWithSeveralNextHops(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		fx.tunnelTo(lb.TCP, nil, 77)
		must.Do(t, fx.host.Sysctl(map[string]string{
			"net.ipv4.fib_multipath_hash_policy": "1", "net.ipv6.fib_multipath_hash_policy": "1"}))
		to := netip.MustParseAddr("192.0.2.77")
		gateways := []netip.Addr{netip.MustParseAddr("192.0.2.201"), netip.MustParseAddr("192.0.2.202")}
		if v6 {
			to = netip.MustParseAddr("2001:db8::77")
			gateways = []netip.Addr{netip.MustParseAddr("2001:db8::201"), netip.MustParseAddr("2001:db8::202")}
		}
		route := &netlink.Route{Dst: &net.IPNet{IP: to.AsSlice(), Mask: net.CIDRMask(to.BitLen(), to.BitLen())}}
		for i, gw := range gateways {
			fx.neighbour(gw, 2, 0, 0, 0, 1, byte(i))
			route.MultiPath = append(route.MultiPath, &netlink.NexthopInfo{LinkIndex: int(fx.nic), Gw: gw.AsSlice()})
		}
		fx.do(func() error { return netlink.RouteAdd(route) })
		count, first := map[string]int{}, map[int]string{}
		for round := range 3 {
			for i := range 200 {
				mac := fx.nextHop(fx.on(i, dptest.TCP, dptest.ACK))
				if first[i] == "" {
					first[i] = mac
				}
				must.Need(t, mac == first[i], "flow %d took %s and takes %s", i, first[i], mac)
				count[mac]++
			}
			if round == 1 { // the first lookups are no longer cached
				time.Sleep(300 * time.Millisecond)
			}
		}
		for mac, n := range count {
			must.True(t, n >= 100 && len(count) == 2, "%s got %d of 600 packets; want about half: %v", mac, n, count)
		}
	})
}

// A neighbour whose MAC address changes receives its packets at the new one.
func TestNeighbourChanges(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		fx.tunnelTo(lb.TCP, nil, 21)
		p := fx.on(1, dptest.TCP, dptest.ACK)
		before := fx.nextHop(p)
		fx.neighbour(fx.addr("b1"), 2, 0, 0, 0, 7, 7)
		labtest.Until(t, "the new address is used", func() error {
			return wrong(fx.nextHop(p) == before, "still sent to %s", before)
		})
	})
}

// behind returns a client and a server on two links of a balancer, which is the gateway for both. The server answers
// HTTP at 10.0.0.2.
func behind(t *testing.T) (client, balancer, server *lab.Host) {
	t.Helper()
	l := labtest.New(t)
	client, balancer, server = labtest.Host(t, l, "client"), labtest.Host(t, l, "lb"), labtest.Host(t, l, "server")
	prefix := func(s ...string) (out []netip.Prefix) {
		for _, x := range s {
			out = append(out, netip.MustParsePrefix(x))
		}
		return out
	}
	for _, x := range []struct{ a, b lab.End }{
		{lab.End{Host: client, Name: "eth0", Addresses: prefix("192.0.2.2/24", "2001:db8:1::2/64")},
			lab.End{Host: balancer, Name: "out", Addresses: prefix("192.0.2.1/24", "2001:db8:1::1/64")}},
		{lab.End{Host: server, Name: "eth0", Addresses: prefix("10.0.0.2/24", "2001:db8:2::2/64")},
			lab.End{Host: balancer, Name: "in", Addresses: prefix("10.0.0.1/24", "2001:db8:2::1/64")}},
	} {
		must.Do(t, l.Link(x.a, x.b, lab.LinkOptions{SoftwareChecksums: true}))
	}
	for h, gateways := range map[*lab.Host][]string{
		client: {"192.0.2.1", "2001:db8:1::1"}, server: {"10.0.0.1", "2001:db8:2::1"},
	} {
		for i, to := range []netip.Prefix{lab.Default, lab.Default6} {
			must.Do(t, h.AddRoute(to, netip.MustParseAddr(gateways[i])))
		}
	}
	must.Get(traffic.ServeHTTP(server, "server", netip.MustParseAddrPort("10.0.0.2:80")))(t)
	return client, balancer, server
}

// serveBehind opens the datapath on the balancer with the service 203.0.113.10:80, and calls f.
func serveBehind(t *testing.T, balancer *lab.Host, mode Mode, change func(*lb.Service), f func()) {
	t.Helper()
	o := testOptions()
	o.Interfaces, o.Mode = []string{"out", "in"}, mode
	must.Do(t, balancer.Do(func() error {
		d, err := Open(o)
		if err != nil {
			return err
		}
		defer d.Close()
		backends := []lb.Backend{{Addr: netip.MustParseAddr("10.0.0.2"), Weight: 1}}
		s := &lb.Service{Name: "web", VIPs: []netip.Addr{netip.MustParseAddr("203.0.113.10")},
			Ports:     lb.PortsOn(backends, lb.Port{Port: 80, Target: 80, Protocol: lb.TCP}),
			Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Check: lb.CheckSpec{Type: lb.CheckNone}}
		change(s)
		for f, err := range d.Apply(t.Context(), lb.Delta{Put: lb.Build(s, nil, lb.Drains{}).Frontends}) {
			t.Errorf("%s: %v", f, err)
		}
		f()
		return nil
	}))
	must.Do(t, balancer.Do(func() error { return Cleanup(o.PinPath, o.StateDir, quiet) }))
}

// The balancer forwards to the servers behind it and does not route for its clients. Packets to other addresses than
// VIPs take the same path as before the datapath was opened (D6). A router stays a router.
func TestBalancerIsNoRouter(t *testing.T) {
	t.Parallel()
	client, balancer, _ := behind(t)
	// Whether the client gets an answer from the server, with each family, and from the balancer itself.
	reached := func() (got [3]bool) {
		for i, to := range []string{"10.0.0.2", "2001:db8:2::2", "192.0.2.1"} {
			got[i] = traffic.From(client).Ping(t.Context(), netip.MustParseAddr(to)) == nil
		}
		return got
	}
	for _, router := range []bool{false, true} {
		on := strconv.Itoa(int(bpf.Truth(router)))
		forwarding := map[string]string{"net.ipv4.ip_forward": on, "net.ipv6.conf.all.forwarding": on}
		must.Do(t, balancer.Sysctl(forwarding))
		before := [3]bool{router, router, true}
		must.Equal(t, before, reached())
		for _, mode := range []Mode{ModeTC, ModeXDP} {
			serveBehind(t, balancer, mode, func(*lb.Service) {}, func() {
				must.Row(t, mode, before, reached())
				must.Get(traffic.From(client).Get(t.Context(), "http://203.0.113.10/"))(t)
			})
			must.Row(t, mode+", after the cleanup", before, reached())
		}
	}
}

// With KeepSource, a client's connections work through the balancer, and the server sees the client's address.
func TestKeepSourceOfConnections(t *testing.T) {
	t.Parallel()
	client, balancer, _ := behind(t)
	for _, mode := range []Mode{ModeTC, ModeXDP} {
		for _, keep := range []bool{true, false} {
			serveBehind(t, balancer, mode, func(s *lb.Service) { s.KeepSource = keep }, func() {
				for range 20 {
					a := must.Get(traffic.From(client).Get(t.Context(), "http://203.0.113.10/?size=100000"))(t)
					saw := a.Client.Addr() == netip.MustParseAddr("192.0.2.2")
					must.Need(t, saw == keep, "%s, keep source %t: the server sees %s", mode, keep, a.Client)
				}
			})
		}
	}
}

// With KeepSource, a server receives the client's address and port. Its replies to the client come from the VIP. The
// server's packets to others are left alone.
func TestKeepSource(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		for _, proto := range []uint8{dptest.TCP, dptest.UDP} {
			fx := shared(t, h, v6, nil)
			fx.serve(func(s *lb.Service) { s.Ports[0].Protocol, s.KeepSource = lb.Protocol(proto), true }, "b1")
			for step, flags := range []uint8{dptest.SYN, dptest.SYN | dptest.ACK, dptest.ACK, dptest.ACK} {
				in := fx.fromClient(proto, flags)
				src, dst := in.Src, fx.at("b1", 8080)
				if step%2 == 1 {
					in = dptest.Packet{Src: dst, Dst: in.Src, Proto: proto, Flags: flags, Seq: 5000, Ack: 1001}
					src, dst = fx.at("vip", 80), in.Dst
				}
				r := fx.run(in.Frame())
				must.Need(t, r.did == "sent" && r.reason == "forwarded" && r.out.Src == src && r.out.Dst == dst,
					"%d, step %d: %s, %s, from %s to %s; want %s to %s",
					proto, step, r.did, r.reason, r.out.Src, r.out.Dst, src, dst)
			}
			other := dptest.Packet{Src: fx.at("b1", 8080), Dst: fx.at("client", 50000), Proto: proto, Flags: dptest.ACK}
			fx.wantReason("another packet of the server", other, "not_ours")
		}
	})
}

// A client that uses one port towards two VIPs with one server gets another port for the second flow.
func TestKeepSourceOfTwoFlows(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookXDP, false, nil)
	keep := func(port uint16) func(*lb.Service) {
		return func(s *lb.Service) {
			s.Name = map[uint16]string{80: "a", 81: "b"}[port]
			s.Ports[0].Port.Port, s.KeepSource = port, true
		}
	}
	fx.serve(keep(80), "b1")
	fx.serve(keep(81), "b1")
	first, second := fx.fromClient(dptest.TCP, dptest.SYN), fx.fromClient(dptest.TCP, dptest.SYN)
	second.Dst = fx.at("vip", 81)
	a, b := fx.run(first.Frame()).out, fx.run(second.Frame()).out
	must.True(t, a.Src == first.Src && b.Src.Addr() == first.Src.Addr() && b.Src.Port() != a.Src.Port(),
		"the server receives the flows from %s and %s", a.Src, b.Src)
}
