package datapath

import (
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
)

// problems waits until these are the only ones.
func (fx *fixture) problems(want ...string) {
	fx.t.Helper()
	labtest.Until(fx.t, 10*time.Second, "the problems are reported", func() error {
		got := lbtest.Texts(fx.d.Findings())
		return wrong(!slices.Equal(got, want), "%q; want %q", got, want)
	})
}

// One backend of several that cannot be reached withdraws no address, and is a problem of this node.
func TestOneUnreachedBackend(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	fx.service(lb.TCP, "b1", "unknown")
	fx.watch()
	const no = "packets are not forwarded: no_route: "
	text := v4["unknown"] + ":8080 of " + v4["vip"] + ":80/tcp: " + no + meaning("no_route")
	fx.problems("packets of clients do not get to a server: " + text)
	if f := x.of(fx.addr("vip")); f != "" {
		t.Errorf("fault %q", f)
	}
	way := &netlink.Route{Dst: prefix(v4["unknown"] + "/32"), Gw: prefix(v4["router"] + "/32").IP}
	fx.do(func() error { return netlink.RouteAdd(way) })
	fx.problems()
	fx.do(func() error { return netlink.RouteDel(way) })
	fx.problems("packets of clients do not get to a server: " + text)
	fx.service(lb.TCP, "b1")
	fx.problems()
	fx.service(lb.TCP, "unknown")
	labtest.Until(t, 10*time.Second, "it is a fault of the address alone", func() error {
		f := x.of(fx.addr("vip"))
		return wrong(f != no+meaning("no_route"), "fault %q", f)
	})
	fx.problems()
}
