package datapath

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/verify"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// When the way to the servers is lost, the default route leads on: that is a fault within a second, unless the servers
// answer by it.
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
	toRouter := &netlink.Route{Dst: prefix("0.0.0.0/0"), Gw: net.ParseIP(v4["router"])}
	toPeer := &netlink.Route{Dst: prefix("0.0.0.0/0"), Gw: net.ParseIP(v4["peer"])}
	for _, tt := range []struct {
		name       string
		break_, it func(*fixture) error // it ends the state
	}{
		{"address removed", eth1(func(nic netlink.Link) error { return netlink.AddrDel(nic, ours) }),
			eth1(func(nic netlink.Link) error { return netlink.AddrAdd(nic, ours) })},
		{"link set down", eth1(netlink.LinkSetDown), eth1(netlink.LinkSetUp)},
		{"route deleted", func(*fixture) error {
			return netlink.RouteDel(&netlink.Route{Dst: toServers, Scope: netlink.SCOPE_LINK})
		},
			eth1(func(nic netlink.Link) error {
				return netlink.RouteAdd(
					&netlink.Route{Dst: toServers, LinkIndex: nic.Attrs().Index, Scope: netlink.SCOPE_LINK})
			})},
	} {
		for _, proto := range []lb.Protocol{lb.TCP, lb.UDP} {
			t.Run(tt.name+"/"+proto.String(), func(t *testing.T) {
				fx, x := verified(t, ModeTC, false, nil, func(fx *fixture) {
					fx.secondNIC()
					if err := fx.peer.AddAddress("eth0", netip.MustParsePrefix("192.0.2.200/24")); err != nil {
						t.Fatal(err)
					}
					fx.do(func() error { return netlink.RouteAdd(toRouter) })
				})
				fx.service(proto, "inside")
				fx.watch()
				vip := fx.addr("vip")
				fault := func(want string) {
					t.Helper()
					labtest.Until(t, 3*time.Second, "the fault is "+want, func() error {
						got := x.of(vip)
						return wrong(got != want && (want == "" || !strings.Contains(got, want)), "fault %q", got)
					})
				}
				fault("")
				start := time.Now()
				fx.do(func() error { return tt.break_(fx) })
				const want = "10.1.0.2 does not answer since its route changed from eth1 to 192.0.2.254 on eth0"
				fault(want)
				t.Logf("noticed after %s", time.Since(start).Round(time.Millisecond))
				if e := fx.explainClient(); proto == lb.TCP && !strings.Contains(e.Fault, want) {
					t.Errorf("explain: fault %q", e.Fault)
				}
				fx.do(func() error { return tt.it(fx) })
				fault("")
				// By another router they answer: that change is none of our business.
				fx.do(func() error { return netlink.RouteReplace(toPeer) })
				fx.do(func() error { return tt.break_(fx) })
				for end := time.Now().Add(2 * time.Second); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
					if f := x.of(vip); f != "" {
						t.Fatalf("fault %q with a router that leads there", f)
					}
				}
			})
		}
	}
}

// A router that reports that the servers are unreachable is no answer of theirs, however often the probe is looked at.
func TestUnreachableIsNoAnswer(t *testing.T) {
	t.Parallel()
	l := labtest.New(t)
	node, router := labtest.Host(t, l, "node"), labtest.Host(t, l, "router")
	end := func(h *lab.Host, address string) lab.End {
		return lab.End{Host: h, Name: "eth0", Addresses: []netip.Prefix{netip.MustParsePrefix(address)}}
	}
	err := errors.Join(l.Link(end(node, "192.0.2.1/24"), end(router, "192.0.2.2/24"), lab.LinkOptions{}),
		node.AddRoute(lab.Default, netip.MustParseAddr("192.0.2.2")), router.Forward())
	if err != nil {
		t.Fatal(err)
	}
	for route, want := range map[string]bool{"unreachable 10.1.0.0/16": false, "local 10.2.0.1/32 dev lo": true} {
		out, err := router.Run(t.Context(), "ip", append([]string{"route", "add"}, strings.Fields(route)...)...)
		if err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		to := netip.AddrPortFrom(netip.MustParsePrefix(strings.Fields(route)[1]).Addr(), 80)
		if !want {
			to = netip.AddrPortFrom(to.Addr().Next(), 80)
		}
		err = node.Do(func() error {
			fd, err := verify.Dial(to)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			if _, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 5000); err != nil {
				return err
			}
			for i := range 2 {
				if got := verify.HasResponded(fd); got != want && (i == 0 || !want) {
					t.Errorf("%s: responded %t, look %d; want %t", route, got, i, want)
				}
			}
			return nil
		})
		if err != nil {
			t.Errorf("%s: %v", route, err)
		}
	}
}
