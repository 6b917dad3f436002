package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// routeEventsFixture has RouteEvents that do not run, about the Service web.
type routeEventsFixture struct {
	*RouteEvents
	recorder *record.FakeRecorder
	offered  string // why nobody receives routes
	stored   []AnnouncedRoute
}

func newRouteEventsFixture(earlier ...AnnouncedRoute) *routeEventsFixture {
	fx := &routeEventsFixture{recorder: record.NewFakeRecorder(100)}
	web := aService(func(*core.Service) {})
	fx.RouteEvents = NewRouteEvents(RouteEventsOptions{
		Node: "n1", Earlier: earlier, Keep: func(all []AnnouncedRoute) { fx.stored = all },
		Service: func(name string) *core.Service {
			if name == nameOf(web) {
				return web
			}
			return nil
		},
		Judge: func(all []lb.RouteStatus) []lb.RouteStatus {
			s := lb.Status{Routes: slices.Clone(all)}
			s.MarkOffered(func(lb.RouteStatus) string { return fx.offered })
			return s.Routes
		},
	})
	fx.events, fx.began = fx.recorder, time.Now()
	return fx
}

// emitted emits what is due and returns it.
func (fx *routeEventsFixture) emitted() (all []string) {
	fx.emit(true)
	fx.keep()
	for len(fx.recorder.Events) > 0 {
		all = append(all, <-fx.recorder.Events)
	}
	return all
}

// Events say when and why a node starts or stops announcing an address.
func TestRouteEvents(t *testing.T) {
	addr := netip.MustParseAddr("203.0.113.10")
	up := lb.RouteStatus{Address: addr, Services: []string{webName}, Announced: true, State: lb.RouteAnnounced}
	lower, down, drained := up, up, up
	lower.Reason = "with a lower preference: the proxy fails"
	down.Announced, down.State, down.Reason = false, lb.RouteWithheld, "eth0 is down"
	drained.Announced, drained.State, drained.Reason, drained.Intended = false, lb.RouteWithheld, "drained", true
	fx := newRouteEventsFixture()
	for i, step := range []struct {
		do   func()
		want string
	}{
		{func() { fx.Changed(down) }, ""}, // it has not been announced
		{func() { fx.offered = "no peer has it"; fx.Changed(up) }, ""},
		{func() { fx.offered = "" }, "Normal Announced 203.0.113.10 is announced from node n1"},
		{func() {}, ""},
		{func() { fx.Changed(lower) },
			"Warning Announced 203.0.113.10 is announced from node n1 with a lower preference: the proxy fails"},
		{func() { fx.Changed(down) },
			"Warning NotAnnounced 203.0.113.10 is no longer announced from node n1: eth0 is down"},
		{func() { fx.Changed(up); fx.Changed(down) }, ""},
		{func() { fx.Changed(up) }, "Normal Announced 203.0.113.10 is announced from node n1"},
		{func() { fx.offered = "no peer has it" },
			"Warning NotAnnounced 203.0.113.10 is no longer announced from node n1: no peer has it"},
		{func() { fx.offered = "" }, "Normal Announced 203.0.113.10 is announced from node n1"},
		{func() { fx.Changed(drained) },
			"Normal NotAnnounced 203.0.113.10 is no longer announced from node n1: drained"},
		{func() { up.Services = []string{"of-the-file"}; fx.Changed(up) }, ""},
		{func() { fx.Changed(lb.RouteStatus{Address: addr}) }, ""},
	} {
		step.do()
		must.Row(t, fmt.Sprint("step ", i), step.want, strings.Join(fx.emitted(), "; "))
	}
	must.True(t, len(fx.routes) == 0, "%d addresses kept of deleted services", len(fx.routes))
}

// When every route changes at the same time, only a few Events are emitted, and first about lost addresses.
func TestRouteEventsAreLimited(t *testing.T) {
	fx := newRouteEventsFixture()
	route := func(i byte, announced bool) {
		fx.Changed(lb.RouteStatus{
			Address: netip.AddrFrom4([4]byte{203, 0, 113, i}), Services: []string{webName}, Announced: announced,
			Reason: map[bool]string{false: "eth0 is down"}[announced],
		})
	}
	route(1, true)
	route(2, true)
	fx.emitted()
	for i := range byte(100) {
		route(i, i > 2)
	}
	got := fx.emitted()
	lost := slices.IndexFunc(got, func(s string) bool { return strings.Contains(s, " Announced ") })
	must.True(t, len(got) == routeEventsBurst-2 && lost == 2,
		"%d events, the first about an announcement is number %d; want %d, 2:\n%s", len(got), lost, routeEventsBurst-2,
		fmt.Sprint(strings.Join(got, "\n")))
	must.Row(t, "emitted later", nil, fx.emitted())
}

// When there are too many Events, one that corrects the last Event about an address is delayed, not omitted.
func TestRouteEventsAreCorrected(t *testing.T) {
	fx := newRouteEventsFixture()
	route := func(announced bool) {
		fx.Changed(lb.RouteStatus{
			Address: netip.MustParseAddr("203.0.113.1"), Services: []string{webName}, Announced: announced,
		})
	}
	some := fx.limit
	route(true)
	if got := fx.emitted(); len(got) != 1 {
		t.Fatalf("events %q; want one", got)
	}
	fx.limit = flowcontrol.NewFakeNeverRateLimiter()
	route(false)
	if got := fx.emitted(); len(got) > 0 {
		t.Fatalf("events beyond the limit: %q; want none", got)
	}
	fx.limit = some
	got := fx.emitted()
	must.True(t, len(got) == 1 && strings.Contains(got[0], "no longer announced"), "later: %q", got)
	fx.limit = flowcontrol.NewFakeNeverRateLimiter()
	route(true)
	fx.emitted()
	route(false)
	fx.limit = some
	must.Row(t, "as the last one says", nil, fx.emitted())
}

// After a restart there is an Event only about differences from before, once they are certain.
func TestRouteEventsAfterARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		route := func(i byte, announced bool, reason string) lb.RouteStatus {
			return lb.RouteStatus{
				Address: netip.AddrFrom4([4]byte{203, 0, 113, i}), Services: []string{webName}, Announced: announced,
				Reason: reason,
			}
		}
		before := newRouteEventsFixture()
		for i := range byte(6) {
			before.Changed(route(i, true, ""))
		}
		before.emitted()
		moved := before.stored[4]
		moved.Services = []string{"default/other"} // had this address
		fx := newRouteEventsFixture(append(slices.Clone(before.stored[:4]), moved, before.stored[5])...)
		expect := func(when string, want ...string) {
			t.Helper()
			got := fx.emitted()
			slices.Sort(got)
			must.Row(t, when, want, got)
		}
		const starting = "the BGP sessions are not up"
		for i := range byte(5) {
			fx.Changed(route(i, false, starting))
		}
		expect("at first")
		fx.Changed(route(0, true, ""))
		fx.Changed(route(1, true, "with a lower preference: the proxy fails"))
		fx.Changed(route(4, true, ""))
		expect("when announced",
			"Normal Announced 203.0.113.4 is announced from node n1",
			"Warning Announced 203.0.113.1 is announced from node n1 with a lower preference: the proxy fails")
		fx.Changed(route(0, false, "eth0 is down"))
		expect("when withdrawn", "Warning NotAnnounced 203.0.113.0 is no longer announced from node n1: eth0 is down")
		fx.Changed(lb.RouteStatus{Address: netip.AddrFrom4([4]byte{203, 0, 113, 2})}) // deleted
		expect("when deleted")
		n := len(fx.stored)
		must.True(t, n == 4, "%d routes stored: %+v; want 1, 3, 4, and 5, which is not known yet", n, fx.stored)
		time.Sleep(earlierFor)
		expect("when it is certain",
			"Normal NotAnnounced 203.0.113.5 is no longer announced from node n1",
			"Warning NotAnnounced 203.0.113.3 is no longer announced from node n1: "+starting)
		expect("later")
		n = len(fx.stored)
		must.True(t, n == 2, "%d routes stored: %+v; want 1 and 4", n, fx.stored)
	})
}

// Routes that have not changed are neither judged at every tick nor stored again.
func TestRouteEventsOfUnchangedRoutes(t *testing.T) {
	fx := newRouteEventsFixture()
	judged, stored := 0, 0
	judge, keep := fx.o.Judge, fx.o.Keep
	fx.o.Judge = func(all []lb.RouteStatus) []lb.RouteStatus { judged += len(all); return judge(all) }
	fx.o.Keep = func(all []AnnouncedRoute) { stored++; keep(all) }
	route := func(i byte, announced bool) {
		fx.Changed(lb.RouteStatus{
			Address: netip.AddrFrom4([4]byte{203, 0, 113, i}), Services: []string{webName}, Announced: announced,
		})
	}
	for i := range byte(10) {
		route(i, true)
	}
	for i, step := range []struct {
		do                     func()
		every                  bool
		judged, events, stored int
	}{
		{func() {}, false, 10, 10, 1},
		{func() {}, false, 0, 0, 0},
		{func() { route(3, false) }, false, 1, 1, 1},
		{func() { fx.offered = "no peer has it" }, false, 0, 0, 0},
		{func() {}, true, 10, 9, 1},
		{func() {}, true, 10, 0, 0},
	} {
		judged, stored = 0, 0
		step.do()
		fx.emit(step.every)
		fx.keep()
		events := len(fx.recorder.Events)
		for range events {
			<-fx.recorder.Events
		}
		must.True(t, judged == step.judged && events == step.events && stored == step.stored,
			"step %d: %d routes judged, %d Events, stored %d times; want %d, %d, %d", i, judged, events, stored,
			step.judged, step.events, step.stored)
	}
}
