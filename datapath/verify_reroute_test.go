package datapath

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/verify"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// If the path to the servers is lost, the default route still leads somewhere. This is a fault within a second unless
// the servers answer over it.
func TestWayToServersIsLost(t *testing.T) {
	t.Parallel()
	eth1 := func(f func(netlink.Link) error) func(*fixture) error {
		return func(*fixture) error {
			nic, err := netlink.LinkByName("eth1")
			if err != nil {
				return err
			}
			return f(nic)
		}
	}
	ours, _ := netlink.ParseAddr("10.1.0.1/24")
	toServers := prefix("10.1.0.0/24")
	toPeer := &netlink.Route{Dst: prefix("0.0.0.0/0"), Gw: net.ParseIP(v4["peer"])}
	for _, tt := range []struct {
		name       string
		break_, it func(*fixture) error // it undoes break_
	}{
		{"address removed", eth1(func(nic netlink.Link) error { return netlink.AddrDel(nic, ours) }),
			eth1(func(nic netlink.Link) error { return netlink.AddrAdd(nic, ours) })},
		{"link set down", eth1(netlink.LinkSetDown), eth1(netlink.LinkSetUp)},
		{"route deleted", func(*fixture) error {
			return netlink.RouteDel(&netlink.Route{Dst: toServers, Scope: netlink.SCOPE_LINK})
		}, eth1(func(nic netlink.Link) error {
			return netlink.RouteAdd(
				&netlink.Route{Dst: toServers, LinkIndex: nic.Attrs().Index, Scope: netlink.SCOPE_LINK})
		})},
	} {
		for _, proto := range []lb.Protocol{lb.TCP, lb.UDP} {
			t.Run(tt.name+"/"+proto.String(), func(t *testing.T) {
				fx, x := verified(t, ModeTC, false, nil, func(fx *fixture) {
					fx.secondNIC()
					must.Do(t, fx.peer.AddAddress("eth0", netip.MustParsePrefix("192.0.2.200/24")))
					toRouter(fx)
				})
				fx.service(proto, "inside")
				fx.watch()
				x.becomes("", 3*time.Second)
				start := time.Now()
				fx.do(func() error { return tt.break_(fx) })
				const want = "10.1.0.2 has not answered since its route changed from eth1 to 192.0.2.254 on eth0"
				x.becomes(want, 3*time.Second)
				t.Logf("noticed after %s", time.Since(start).Round(time.Millisecond))
				e := fx.explainClient()
				must.True(t, proto != lb.TCP || strings.Contains(e.Fault, want), "explain: fault %q", e.Fault)
				fx.do(func() error { return tt.it(fx) })
				x.becomes("", 3*time.Second)
				// If they answer through another router, the change is not a fault.
				fx.do(func() error { return netlink.RouteReplace(toPeer) })
				fx.do(func() error { return tt.break_(fx) })
				x.staysAway(2 * time.Second)
			})
		}
	}
}

// A router's report that the servers are unreachable is not an answer from them, however often the probe is checked.
func TestUnreachableIsNoAnswer(t *testing.T) {
	t.Parallel()
	l := labtest.New(t)
	node, router := labtest.Host(t, l, "node"), labtest.Host(t, l, "router")
	end := func(h *lab.Host, address string) lab.End {
		return lab.End{Host: h, Name: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix(address)}}
	}
	must.Do(t, errors.Join(l.Link(end(node, "192.0.2.1/24"), end(router, "192.0.2.2/24"), lab.LinkOptions{}),
		node.AddRoute(lab.Default, netip.MustParseAddr("192.0.2.2")), router.Forward()))
	for route, want := range map[string]bool{"unreachable 10.1.0.0/16": false, "local 10.2.0.1/32 dev lo": true} {
		out, err := router.Run(t.Context(), "ip", append([]string{"route", "add"}, strings.Fields(route)...)...)
		must.Need(t, err == nil, "%v\n%s", err, out)
		to := netip.AddrPortFrom(netip.MustParsePrefix(strings.Fields(route)[1]).Addr(), 80)
		if !want {
			to = netip.AddrPortFrom(to.Addr().Next(), 80)
		}
		must.Do(t, node.Do(func() error {
			fd, err := verify.Dial(to)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			_, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 5000)
			for i := range 2 {
				got := verify.HasResponded(fd)
				must.True(t, got == want || i > 0 && want, "%s: responded %t, look %d; want %t", route, got, i, want)
			}
			return err
		}))
	}
}

// If an interface towards clients was set down, or does not ask for MAC addresses, the fault names it. If it is down,
// the status and explain say so.
func TestInterfaceThatLeadsToClientsIsNamed(t *testing.T) {
	t.Parallel()
	router := &netlink.Neigh{
		IP: net.ParseIP(v4["router"]), State: netlink.NUD_PERMANENT, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9},
	}
	route := func(*fixture) error { return netlink.RouteReplace(&netlink.Route{Gw: net.ParseIP(v4["router"])}) }
	for _, tt := range []struct {
		name       string
		break_, it func(*fixture) error // it undoes break_
		want       string
		down       bool
	}{
		{"set down", ip(netlink.LinkSetDown), steps(ip(netlink.LinkSetUp), route),
			"eth0, which leads to clients, is down", true},
		{"ARP off", ip(netlink.LinkSetARPOff), ip(netlink.LinkSetARPOn),
			"eth0, which leads to clients, sends no ARP", false},
		{"MAC address of the router configured", ip(netlink.LinkSetARPOff), ip(func(nic netlink.Link) error {
			router.LinkIndex = nic.Attrs().Index
			return netlink.NeighSet(router)
		}), "eth0, which leads to clients, sends no ARP", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			fx, x := verified(t, ModeTC, false, nil, func(fx *fixture) { fx.secondNIC(); toRouter(fx) })
			fx.service(lb.TCP, "inside")
			fx.watch()
			x.becomes("", noticed)
			fx.do(func() error { return tt.break_(fx) })
			x.becomes(tt.want, 2*noticed)
			e := fx.explainClient()
			must.True(t, strings.Contains(strings.Join(e.Steps, "\n"), "eth0 is down") == tt.down,
				"explain:\n%s", strings.Join(e.Steps, "\n"))
			for _, s := range fx.d.Interfaces() {
				must.True(t, s.Down == (tt.down && s.Name == "eth0"), "%+v", s)
			}
			fx.do(func() error { return tt.it(fx) })
			x.becomes("", 5*time.Second)
		})
	}
}

// If an interface towards the servers was set down, the fault names it, whether or not another route still leads
// somewhere.
func TestInterfaceThatLeadsToServersIsNamed(t *testing.T) {
	t.Parallel()
	for want, dst := range map[string]string{
		"eth1, which leads to 10.1.0.2, is down": "11.0.0.0/8", // no default route
		"; eth1 is down":                         "0.0.0.0/0",
	} {
		t.Run(dst, func(t *testing.T) {
			fx, x := verified(t, ModeTC, false, nil, func(fx *fixture) {
				fx.secondNIC()
				fx.do(func() error {
					return netlink.RouteAdd(&netlink.Route{Dst: prefix(dst), Gw: net.ParseIP(v4["router"])})
				})
			})
			fx.service(lb.TCP, "inside")
			fx.watch()
			fx.onNIC("eth1", netlink.LinkSetDown)
			x.becomes(want, 3*time.Second)
		})
	}
}

// While no frontend has backends, another program that drops packets is not examined. It is examined when a frontend
// gets a backend.
func TestFaultOfTheNodeIsReportedWithTheFirstBackend(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.do(func() error { return dptest.AttachXDP("eth0", dptest.XDPDrop) })
	fx.service(lb.TCP, "b1")
	x.is("does not pass packets on")
}

// problems waits until these are the only findings.
func (fx *fixture) problems(want ...string) {
	fx.t.Helper()
	labtest.Until(fx.t, "the problems are reported", func() error {
		got := lbtest.Texts(fx.d.Findings())
		return wrong(!slices.Equal(got, want), "%q; want %q", got, want)
	})
}

// One unreachable backend of several does not withdraw an address, and is a finding of this node.
func TestOneUnreachedBackend(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.service(lb.TCP, "b1", "unknown")
	fx.watch()
	const no = "packets are not forwarded: no_route: "
	text := v4["unknown"] + ":8080 of " + v4["vip"] + ":80/tcp: " + no + meaning("no_route")
	fx.problems("client packets do not reach a server: " + text)
	x.is("")
	way := &netlink.Route{Dst: prefix(v4["unknown"] + "/32"), Gw: prefix(v4["router"] + "/32").IP}
	fx.do(func() error { return netlink.RouteAdd(way) })
	fx.problems()
	fx.do(func() error { return netlink.RouteDel(way) })
	fx.problems("client packets do not reach a server: " + text)
	fx.service(lb.TCP, "b1")
	fx.problems()
	fx.service(lb.TCP, "unknown")
	x.becomes(no+meaning("no_route"), 10*time.Second)
	fx.problems()
}

// A frontend that has backends again is verified before Apply returns. Otherwise its VIP could be announced with a
// fault that was forgotten while it had none.
func TestFaultsOfAFrontendWithBackendsAgainAreReportedAtOnce(t *testing.T) {
	t.Parallel()
	route := &netlink.Route{Gw: net.ParseIP(v4["router"])}
	fx, x := verified(t, ModeTC, false, nil, toRouter)
	fx.service(lb.TCP, "b1")
	fx.watch()
	fx.do(func() error { return netlink.RouteDel(route) })
	x.becomes("no route to clients", noticed)
	fx.service(lb.TCP)
	x.becomes("", 5*time.Second)
	fx.service(lb.TCP, "b1")
	x.is("no route to clients")
	fx.do(func() error { return netlink.RouteAdd(route) })
	x.becomes("", 5*time.Second)
}
