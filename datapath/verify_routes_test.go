package datapath

import (
	"net"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/datapath/internal/verify"
	"github.com/steelyard-lb/steelyard/lb"
)

// watched is a verified service of b1 with a default route, whose answers about routes do not expire.
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

// ticks verifies again and again, each time also the routers.
func (fx *fixture) ticks(n int) {
	fx.t.Helper()
	fx.do(func() error {
		for range n {
			fx.d.verifier.Routers.At = time.Time{}
			fx.d.verifier.Tick()
		}
		return nil
	})
}

// While a router does not answer, routes are asked for again: the kernel may use another one without a report.
func TestRoutesAreAskedForAgainWhileARouterIsSilent(t *testing.T) {
	t.Parallel()
	fx := watchedRoutes(t, "192.0.2.99")
	since := fx.d.verifier.Routes.Since
	fx.ticks(4)
	if !fx.d.verifier.Routes.Since.After(since) {
		t.Error("the answers are kept")
	}
}

// While nothing changes the kernel is not asked again. A change that is not reported is found when the answers expire.
func TestRoutesExpire(t *testing.T) {
	t.Parallel()
	fx := watchedRoutes(t, v4["router"])
	v := fx.d.verifier
	fx.ticks(1)
	had := v.Clients.Had4
	fx.do(func() error { return netlink.RouteDel(&netlink.Route{Gw: net.ParseIP(v4["router"])}) })
	fx.ticks(2)
	if v.Clients.Had4 != had || had != verify.ReachPublic {
		t.Errorf("clients %d, then %d; want %d", had, v.Clients.Had4, verify.ReachPublic)
	}
	routed := func() (ok bool) {
		fx.do(func() error { ok = v.Routes.Routed(route.Far4.Public[0]); return nil })
		return ok
	}
	if !routed() {
		t.Error("the kernel was asked again")
	}
	v.Routes.Until = time.Now()
	fx.ticks(2)
	if routed() || v.Clients.Chosen != v.Routes.Since {
		t.Error("the kernel was not asked again")
	}
}

// There may be many backends behind one router: while it answers, the kernel is not asked for the route to each.
func TestRoutesToBackendsAreNotAskedFor(t *testing.T) {
	t.Parallel()
	fx := watchedRoutes(t, v4["router"])
	fx.service(lb.TCP, "far")
	fx.ticks(4)
	if _, asked := fx.d.verifier.Routes.Routes[route.Question{To: fx.addr("far"), Entry: true}]; asked {
		t.Error("the kernel was asked")
	}
}
