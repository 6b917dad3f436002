package datapath

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// An interface that leads to clients and was set down, or does not ask for MAC addresses, is named by the fault. One
// that is down is so in the status, and explain says it.
func TestInterfaceThatLeadsToClientsIsNamed(t *testing.T) {
	t.Parallel()
	router := &netlink.Neigh{
		IP: net.ParseIP(v4["router"]), State: netlink.NUD_PERMANENT, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9},
	}
	route := func(*fixture) error { return netlink.RouteReplace(&netlink.Route{Gw: net.ParseIP(v4["router"])}) }
	for _, tt := range []struct {
		name       string
		break_, it func(*fixture) error // it ends the state
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
			fx, x := verified(t, ModeTC, false, nil, func(fx *fixture) {
				fx.secondNIC()
				fx.do(func() error { return route(fx) })
			})
			fx.service(lb.TCP, "inside")
			fx.watch()
			vip := fx.addr("vip")
			fault := func(want string, within time.Duration) {
				t.Helper()
				labtest.Until(t, within, "the fault is "+want, func() error {
					got := x.of(vip)
					return wrong((got == "") != (want == "") || !strings.Contains(got, want), "fault %q", got)
				})
			}
			fault("", noticed)
			fx.do(func() error { return tt.break_(fx) })
			fault(tt.want, 2*noticed)
			e := fx.explainClient()
			if says := strings.Contains(strings.Join(e.Steps, "\n"), "eth0 is down"); says != tt.down {
				t.Errorf("explain:\n%s", strings.Join(e.Steps, "\n"))
			}
			for _, s := range fx.d.Interfaces() {
				if want := tt.down && s.Name == "eth0"; s.Down != want {
					t.Errorf("%+v", s)
				}
			}
			fx.do(func() error { return tt.it(fx) })
			fault("", 5*time.Second)
		})
	}
}

// An interface towards the servers that was set down is named, whether another route leads on or none does.
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
			fx.do(func() error {
				nic, err := netlink.LinkByName("eth1")
				if err != nil {
					return err
				}
				return netlink.LinkSetDown(nic)
			})
			labtest.Until(t, 3*time.Second, "the fault names eth1", func() error {
				got := x.of(fx.addr("vip"))
				return wrong(!strings.Contains(got, want), "fault %q", got)
			})
		})
	}
}

// A program of others that drops packets was not looked at while no frontend had backends. It is when one gets them.
func TestFaultOfTheNodeIsReportedWithTheFirstBackend(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.do(func() error { return dptest.AttachXDP("eth0", dptest.XDPDrop) })
	fx.service(lb.TCP, "b1")
	if f := x.of(fx.addr("vip")); !strings.Contains(f, "does not pass packets on") {
		t.Errorf("fault %q when Apply returns", f)
	}
}
