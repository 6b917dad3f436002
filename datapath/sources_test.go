package datapath

import (
	"net"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

// A server that had no route and was in no table gets packets again when it has a route and is back.
func TestSourcesOfAServerThatIsBack(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		p := fx.service(lb.TCP, "b1")
		fx.openFlow(lb.TCP, 0)
		b1 := fx.addr("b1")
		host := &net.IPNet{IP: b1.AsSlice(), Mask: net.CIDRMask(b1.BitLen(), b1.BitLen())}
		blackhole := &netlink.Route{Dst: host, Type: unix.RTN_BLACKHOLE}
		fx.do(func() error { return netlink.RouteAdd(blackhole) })
		fx.do(func() error { fx.d.services.RefreshSources(); return nil })
		fx.apply(lb.Delta{Delete: []lb.Frontend{p.Frontend}}) // an open flow keeps the server
		fx.do(func() error { return netlink.RouteDel(blackhole) })
		fx.do(func() error { fx.d.services.RefreshSources(); return nil })
		fx.service(lb.TCP, "b1")
		fx.went(fx.on(1, dptest.TCP, dptest.SYN))
	})
}
