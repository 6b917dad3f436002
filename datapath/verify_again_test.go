package datapath

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// A frontend that gets backends again is verified before Apply returns: a fault that was forgotten while it had none
// must not let its VIP be announced.
func TestFaultsOfAFrontendWithBackendsAgainAreReportedAtOnce(t *testing.T) {
	t.Parallel()
	route := &netlink.Route{Gw: net.ParseIP(v4["router"])}
	fx, x := verified(t, ModeTC, false, nil, func(fx *fixture) {
		fx.do(func() error { return netlink.RouteAdd(route) })
	})
	fx.service(lb.TCP, "b1")
	fx.watch()
	vip := fx.addr("vip")
	fx.do(func() error { return netlink.RouteDel(route) })
	labtest.Until(t, noticed, "the fault is reported",
		func() error { return wrong(!strings.Contains(x.of(vip), "no route to clients"), "%q", x.of(vip)) })
	fx.service(lb.TCP)
	labtest.Until(t, 5*time.Second, "the fault is forgotten",
		func() error { return wrong(x.of(vip) != "", "%q", x.of(vip)) })
	fx.service(lb.TCP, "b1")
	if f := x.of(vip); !strings.Contains(f, "no route to clients") {
		t.Errorf("fault %q when Apply returns", f)
	}
	fx.do(func() error { return netlink.RouteAdd(route) })
	labtest.Until(t, 5*time.Second, "the fault is withdrawn",
		func() error { return wrong(x.of(vip) != "", "%q", x.of(vip)) })
}
