package datapath

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/verify"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
)

// If a next hop does not answer ARP, replies are lost although there is a route. If there is another next hop that
// answers, this is not a fault.
func TestDeadRouter(t *testing.T) {
	t.Parallel()
	via := func(names ...string) *netlink.Route {
		r := &netlink.Route{Dst: prefix("0.0.0.0/0")}
		for _, name := range names {
			r.MultiPath = append(r.MultiPath, &netlink.NexthopInfo{Gw: net.ParseIP(v4[name])})
		}
		return r
	}
	fx, x := verified(t, ModeTC, false, nil, toRouter)
	fx.service(lb.TCP, "b1")
	fx.watch()
	vip := fx.addr("vip")
	const want = "192.0.2.99, the next hop of replies, does not answer"
	fx.do(func() error { return netlink.RouteReplace(via("down")) })
	labtest.Until(t, "it is reported, while packets are sent", func() error {
		fx.send("11.1.1.1:9")
		return wrong(x.of(vip) != want, "fault %q", x.of(vip))
	})
	must.Row(t, "the fault of explain", "", fx.explainClient().Fault) // this client is on the link
	time.Sleep(4 * time.Second)                                       // until the kernel asks it again
	must.Row(t, "then the fault is", want, x.of(vip))
	fx.do(func() error { return netlink.RouteReplace(via("down", "router")) })
	x.becomes("", 3*time.Second)
}

// The same holds for the next hop towards the servers while health checks are sent to it.
func TestDeadRouterOfServers(t *testing.T) {
	t.Parallel()
	way := func(to string) func() error {
		return func() error {
			return netlink.RouteReplace(&netlink.Route{Dst: prefix(v4["far"] + "/32"), Gw: net.ParseIP(v4[to])})
		}
	}
	fx, x := verified(t, ModeTC, false, nil, func(fx *fixture) { fx.do(way("down")) })
	fx.service(lb.TCP, "far")
	fx.watch()
	want := "192.0.2.99, the next hop towards " + v4["far"] + ", does not answer"
	labtest.Until(t, "it is reported, while packets are sent", func() error {
		fx.send(v4["far"] + ":9")
		f := x.of(fx.addr("vip"))
		return wrong(f != want, "fault %q", f)
	})
}

// send sends a datagram from the node.
func (fx *fixture) send(to string) {
	fx.t.Helper()
	fx.do(func() error {
		c, err := net.Dial("udp", to)
		if err != nil {
			return err
		}
		_, _ = c.Write([]byte("packet")) // the router may not answer
		return c.Close()
	})
}

// The loss of the default route is a fault, even if a client could have an address in the servers' network, on the link
// or behind a router.
func TestDefaultRouteIsLost(t *testing.T) {
	t.Parallel()
	for name, network := range map[string]string{
		"no other route": "", "a private network behind a router": "10.0.0.0/8",
		"a public network behind a router": "11.0.0.0/8",
	} {
		t.Run(name, func(t *testing.T) {
			fx, x := verified(t, ModeTC, false, nil, func(fx *fixture) {
				must.Do(t, fx.host.AddAddress("eth0", netip.MustParsePrefix("172.16.0.2/24")))
				if network != "" {
					way := &netlink.Route{Dst: prefix(network), Gw: net.ParseIP(v4["b1"])}
					fx.do(func() error { return netlink.RouteAdd(way) })
				}
				toRouter(fx)
			})
			fx.service(lb.TCP, "b1")
			fx.watch()
			x.is("")
			fx.do(func() error { return netlink.RouteDel(&netlink.Route{Gw: net.ParseIP(v4["router"])}) })
			x.appears()
		})
	}
}

// No default route is needed with a full Internet table, or if clients are only in private networks.
func TestNoDefaultRouteIsNeeded(t *testing.T) {
	t.Parallel()
	routes := func(names ...string) func(*fixture) {
		return func(fx *fixture) {
			for _, n := range names {
				fx.do(func() error {
					return netlink.RouteReplace(&netlink.Route{Dst: prefix(n), Gw: net.ParseIP(v4["router"])})
				})
			}
		}
	}
	internet := routes("11.0.0.0/8", "52.0.0.0/8", "91.0.0.0/8", "185.0.0.0/8")
	for name, r := range map[string]struct {
		before, after func(*fixture)
		lost          string
	}{
		"Internet": {routes("0.0.0.0/0"), internet, "91.0.0.0/8 52.0.0.0/8"},
		"private":  {routes("10.0.0.0/8"), routes(), "10.0.0.0/8"},
	} {
		t.Run(name, func(t *testing.T) {
			fx, x := verified(t, ModeTC, false, nil, r.before)
			fx.service(lb.TCP, "b1")
			fx.watch()
			r.after(fx)
			if name == "Internet" {
				fx.do(func() error { return netlink.RouteDel(&netlink.Route{Dst: prefix("0.0.0.0/0")}) })
			}
			x.staysAway(2 * time.Second)
			for _, n := range strings.Fields(r.lost) {
				fx.do(func() error { return netlink.RouteDel(&netlink.Route{Dst: prefix(n)}) })
			}
			x.appears()
		})
	}
}

// behindRouter returns a node that serves b1 and whose default route leads to a router that answers, at the other end
// of eth0.
func behindRouter(t *testing.T, isV6 bool) (fx *fixture, x *faults, router netip.Prefix) {
	t.Helper()
	router, all := netip.MustParsePrefix("192.0.2.253/24"), "0.0.0.0/0"
	if isV6 {
		router, all = netip.MustParsePrefix("2001:db8::253/64"), "::/0"
	}
	fx, x = verified(t, ModeTC, isV6, nil, func(fx *fixture) {
		must.Do(t, fx.peer.AddAddress("eth0", router))
		fx.do(func() error { return netlink.RouteAdd(&netlink.Route{Dst: prefix(all), Gw: router.Addr().AsSlice()}) })
	})
	fx.service(lb.TCP, "b1")
	fx.watch()
	labtest.Until(t, "the router answers", func() error {
		n := fx.neighbourEntry(router.Addr())
		return wrong(n.State != netlink.NUD_REACHABLE, "state %#x", n.State)
	})
	return fx, x, router
}

// neighbourEntry returns a kernel neighbour entry, or zero if there is none.
func (fx *fixture) neighbourEntry(of netip.Addr) (n netlink.Neigh) {
	fx.t.Helper()
	fx.do(func() error {
		list, err := netlink.NeighList(int(fx.nic), netlink.FAMILY_ALL)
		for _, other := range list {
			if other.IP.Equal(of.AsSlice()) {
				n = other
			}
		}
		return err
	})
	return n
}

// A router that has just answered is asked again after a second. The kernel would ask it only after up to a minute.
func TestRouterBecomesSilent(t *testing.T) {
	t.Parallel()
	for name, isV6 := range map[string]bool{"IPv4": false, "IPv6": true} {
		t.Run(name, func(t *testing.T) {
			fx, x, router := behindRouter(t, isV6)
			must.Do(t, fx.peer.DeleteAddress("eth0", router))
			want, start := router.Addr().String()+", the next hop of replies, does not answer", time.Now()
			x.becomes(want, 10*time.Second)
			t.Logf("reported after %s", time.Since(start).Round(time.Millisecond))
			must.Do(t, fx.peer.AddAddress("eth0", router))
			x.becomes("", 10*time.Second)
		})
	}
}

// A program that drops packets also drops routers' answers. The fault names the program.
func TestDroppedAnswersHaveAReason(t *testing.T) {
	t.Parallel()
	fx, x, router := behindRouter(t, false)
	fx.do(func() error { return dptest.AttachXDP("eth0", dptest.XDPDrop) })
	v := fx.d.verifier
	labtest.Until(t, "the router does not answer", func() error {
		v.Mu.Lock()
		defer v.Mu.Unlock()
		for at, a := range v.Routers.Known {
			if at.Addr == router.Addr() && a.Failed {
				return nil
			}
		}
		return errors.New("no failed router is known")
	})
	x.is("does not pass packets on")
	must.Row(t, "explain", x.of(fx.addr("vip")), fx.answer(fx.at("unknown", 40000), fx.at("vip", 80), lb.TCP).Fault)
}

// If the MAC address of a server on the link changes, the new one is found, although the kernel sends the server
// nothing.
func TestServerGetsAnotherMAC(t *testing.T) {
	t.Parallel()
	for _, server := range []string{"192.0.2.253/24", "2001:db8::253/64"} {
		at := netip.MustParsePrefix(server)
		fx, _ := verified(t, ModeTC, at.Addr().Is6(), nil, func(*fixture) {})
		must.Do(t, fx.peer.AddAddress("eth0", at))
		fx.serve(func(s *lb.Service) {
			s.Method, s.Ports[0].Backends = lb.MethodDSR, []lb.Backend{{Addr: at.Addr(), Weight: 1}}
		})
		fx.watch()
		for _, mac := range []net.HardwareAddr{{2, 0, 0, 0, 0, 0x55}, {2, 0, 0, 0, 0, 0x56}} {
			must.Do(t, fx.peer.Do(func() error {
				nic, err := netlink.LinkByName("eth0")
				return errors.Join(err, netlink.LinkSetHardwareAddr(nic, mac))
			}))
			start := time.Now()
			labtest.Until(t, "its address is known", func() error {
				n := fx.neighbourEntry(at.Addr())
				return wrong(n.HardwareAddr.String() != mac.String(), "%s", n.HardwareAddr)
			})
			t.Logf("%s: known after %s", at, time.Since(start).Round(time.Millisecond))
		}
	}
}

// A router that answers requests to all hosts, but not to its own MAC address, never becomes unknown.
func TestRouterIgnoresUnicastRequests(t *testing.T) {
	t.Parallel()
	fx, x, router := behindRouter(t, false)
	rules := "add table arp t; add chain arp t c { type filter hook input priority 0; }; " +
		"add rule arp t c meta pkttype host arp operation request drop"
	out, err := fx.peer.Run(t.Context(), "nft", rules)
	must.Need(t, err == nil, "%v\n%s", err, out)
	for end := time.Now().Add(6 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		n := fx.neighbourEntry(router.Addr())
		f := x.of(fx.addr("vip"))
		must.Need(t, f == "" && n.State&route.Valid != 0, "state %#x, fault %q", n.State, f)
	}
	n := fx.neighbourEntry(router.Addr())
	must.True(t, n.Confirmed <= 300, "confirmed %d ms ago", 10*n.Confirmed)
}

// watchedRoutes returns a verified service of b1 with a default route, whose cached routes do not expire.
func watchedRoutes(t *testing.T, to string) *fixture {
	t.Helper()
	fx, _ := verified(t, ModeTC, false, func(o *Options) { o.FollowRoutes = true }, func(fx *fixture) {
		fx.do(func() error { return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(to)}) })
	})
	fx.service(lb.TCP, "b1")
	fx.do(func() error { fx.d.verifier.Changed(route.Changes{Routes: true}); return nil })
	fx.d.verifier.Routes.Until = time.Now().Add(time.Hour)
	return fx
}

// ticks runs n verifications, each of which checks the routers as well.
func (fx *fixture) ticks(n int) {
	fx.t.Helper()
	fx.do(func() error {
		for range n {
			fx.d.verifier.Routers.At = time.Time{}
			fx.d.verifier.Verify()
		}
		return nil
	})
}

// While a router does not answer, routes are looked up again, because the kernel may use another router without a
// report.
func TestRoutesAreAskedForAgainWhileARouterIsSilent(t *testing.T) {
	t.Parallel()
	fx := watchedRoutes(t, "192.0.2.99")
	since := fx.d.verifier.Routes.Since
	fx.ticks(4)
	must.True(t, fx.d.verifier.Routes.Since.After(since), "the answers are kept")
}

// While nothing changes, the kernel is not asked again. A change that is not reported is found when the cache expires.
func TestRoutesExpire(t *testing.T) {
	t.Parallel()
	fx := watchedRoutes(t, v4["router"])
	v := fx.d.verifier
	fx.ticks(1)
	had := v.Clients.Had4
	fx.do(func() error { return netlink.RouteDel(&netlink.Route{Gw: net.ParseIP(v4["router"])}) })
	fx.ticks(2)
	must.True(t, v.Clients.Had4 == had && had == verify.ReachPublic,
		"clients %d, then %d; want %d", had, v.Clients.Had4, verify.ReachPublic)
	routed := func() (ok bool) {
		fx.do(func() error { ok = v.Routes.Routed(route.Far4.Public[0]); return nil })
		return ok
	}
	must.True(t, routed(), "the kernel was asked again")
	v.Routes.Until = time.Now()
	fx.ticks(2)
	must.True(t, !routed() && v.Clients.Chosen == v.Routes.Since, "the kernel was not asked again")
}

// Many backends may be behind one router. While it answers, the kernel is not asked for the route to each backend.
func TestRoutesToBackendsAreNotAskedFor(t *testing.T) {
	t.Parallel()
	fx := watchedRoutes(t, v4["router"])
	fx.service(lb.TCP, "far")
	fx.ticks(4)
	_, asked := fx.d.verifier.Routes.Routes[route.Question{To: fx.addr("far"), Entry: true}]
	must.True(t, !asked, "the kernel was asked")
}
