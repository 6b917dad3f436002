package lb_test

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A service is in force once the datapath has applied a plan for each of its frontends in this run. Progress can be
// read while the engine's calls block, and shows how long an event has waited.
func TestProgress(t *testing.T) {
	fx := lbtest.New(frontend(vip2)) // from an earlier run
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		want := func(step string, one, two, applied, behind bool) {
			t.Helper()
			synctest.Wait()
			p := e.Progress()
			must.True(t, p.Applied == applied && p.Behind.IsZero() != behind && p.Waiting.IsZero(),
				"%s: %+v; want applied %t, behind %t, nothing waiting", step, p, applied, behind)
			must.True(t, e.InForce("one") == one && e.InForce("two") == two,
				"%s: in force %t, %t; want %t, %t", step, e.InForce("one"), e.InForce("two"), one, two)
		}
		one := service("one", []netip.Addr{vip1}, "10.0.0.1")
		two := service("two", []netip.Addr{vip2}, "10.0.0.2")
		want("start", false, false, false, false)
		fx.Pause()
		serve(e, one)
		want("a call blocks", false, false, false, true)
		fx.Resume()
		want("applied", true, false, true, false)
		fx.Pause()
		serve(e, two)
		want("a frontend of an earlier run", true, false, true, true)
		fx.Resume()
		want("both", true, true, true, false)
		fx.Pause()
		answer(e, one, lb.StateUnhealthy)
		want("a later plan is pending", true, true, true, true)
		fx.Resume()
		e.Delete("two")
		want("deleted", true, false, true, false)
		serve(e, service("two", []netip.Addr{vip1}, "10.0.0.2"))
		want("its frontend belongs to another service", true, false, true, false)
	})
}

// An engine that does not run has waiting events; a running one has none.
func TestProgressOfAnEngineThatDoesNotRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fx := lbtest.New()
		e := must.Get(lb.NewEngine(lb.EngineOptions{Datapath: fx, Announcer: fx, Prober: fx}))(t)
		p := e.Progress()
		must.True(t, p.Waiting.IsZero(), "nothing posted: waiting since %s", p.Waiting)
		first := time.Now()
		e.Complete("file")
		time.Sleep(time.Minute)
		e.Complete("file")
		p = e.Progress()
		must.True(t, p.Waiting.Equal(first) && !p.Applied, "%+v; want waiting since %s", p, first)
	})
}

// A status that takes several queries has every service and route once, in order, and other events are handled between.
func TestStatusOfManyServices(t *testing.T) {
	fx := lbtest.New()
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		const n = 250
		for i := range byte(n) {
			vips := []netip.Addr{netip.AddrFrom4([4]byte{203, 0, 113, i})}
			serve(e, service(fmt.Sprintf("s%03d", i), vips, "10.0.0.1"))
		}
		synctest.Wait()
		st, err := e.Status(t.Context())
		must.Need(t, err == nil && len(st.Services) == n && len(st.Backends) == n && len(st.Routes) == n,
			"%d services, %d backends, %d routes, %v; want %d of each", len(st.Services), len(st.Backends),
			len(st.Routes), err, n)
		for i := range byte(n) {
			addr := netip.AddrFrom4([4]byte{203, 0, 113, i})
			must.True(t, st.Services[i].Address == addr && st.Backends[i].Service == st.Services[i].Service &&
				st.Routes[i].Address == addr && st.Routes[i].Announced,
				"row %d: %+v, %+v, %+v", i, st.Services[i], st.Backends[i], st.Routes[i])
		}
	})
}

// The status of a VIP has only its services and its route, at a cost that does not depend on the number of services.
// Explain and the agent's health used to be as slow as the status of all services: seconds with 10,000.
func TestStatusOfAVIP(t *testing.T) {
	vip := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}) }
	allocated := map[int]float64{}
	for _, n := range []int{3, 1000} {
		fx := lbtest.New()
		inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
			for i := range n {
				s := service(fmt.Sprintf("s%04d", i), []netip.Addr{vip(i)}, "10.0.0.1", "10.0.0.2")
				if i == 1 {
					s.Refused = []lb.RefusedVIP{{VIP: vip(n), Reason: "refused: a test"}}
				}
				serve(e, s)
			}
			synctest.Wait()
			all := must.Get(e.Status(t.Context()))(t)
			for _, i := range []int{0, 2, n, n + 1} { // two that exist, one that is refused, one that nobody has
				got := must.Get(e.StatusOf(t.Context(), vip(i)))(t)
				isOther := func(a netip.Addr) bool { return a != vip(i) }
				services := slices.DeleteFunc(slices.Clone(all.Services),
					func(s lb.ServiceStatus) bool { return isOther(s.Address) })
				routes := slices.DeleteFunc(slices.Clone(all.Routes),
					func(r lb.RouteStatus) bool { return isOther(r.Address) })
				must.True(t, got.Settled && reflect.DeepEqual(got.Services, services),
					"services of %s, settled %t:\n%+v\nwant\n%+v", vip(i), got.Settled, got.Services, services)
				must.Row(t, fmt.Sprintf("routes of %s", vip(i)), routes, got.Routes)
			}
			allocated[n] = testing.AllocsPerRun(10, func() { must.Get(e.StatusOf(t.Context(), vip(0)))(t) })
		})
	}
	must.True(t, allocated[1000] <= 2*allocated[3],
		"%g allocations with 1,000 services, %g with 3", allocated[1000], allocated[3])
}
