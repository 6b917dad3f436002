package lb_test

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var (
	vip1 = netip.MustParseAddr("203.0.113.10")
	vip2 = netip.MustParseAddr("203.0.113.11")
)

func service(name string, vips []netip.Addr, backends ...string) *lb.Service {
	s := &lb.Service{
		Name: name, Source: "file", VIPs: vips, Policy: lb.PolicyCluster,
		Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, MinHealthy: 1,
	}
	var list []lb.Backend
	for _, b := range backends {
		list = append(list, lb.Backend{Addr: netip.MustParseAddr(b), Weight: 1})
	}
	port := lb.Port{Port: 80, Target: 8080, Protocol: lb.TCP}
	s.Ports, s.Check = lb.PortsOn(list, port), lb.CheckSpec{Type: lb.CheckTCP, ServicePort: port}
	return s
}

func frontend(vip netip.Addr) lb.Frontend { return lb.Frontend{VIP: vip, Port: 80, Protocol: lb.TCP} }

// engineOptions returns the options of an engine with consumers in memory.
func engineOptions(consumer consumers) lb.EngineOptions {
	return lb.EngineOptions{
		Datapath: consumer, Announcer: consumer, Prober: consumer, Sources: []string{"file"},
		Settle: 10 * time.Second, Retry: 100 * time.Millisecond, Withdraw: 5 * time.Second,
		Log: slog.New(slog.DiscardHandler),
	}
}

type consumers interface {
	lb.Datapath
	lb.Announcer
	lb.Prober
}

// inEngine runs f with a running engine, in a synctest bubble. change sets other options.
func inEngine(t *testing.T, fx *lbtest.Fixture, f func(t *testing.T, e *lb.Engine), change ...func(*lb.EngineOptions)) {
	synctest.Test(t, func(t *testing.T) {
		o := engineOptions(fx)
		for _, set := range change {
			set(&o)
		}
		e := must.Get(lb.NewEngine(o))(t)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- e.Run(ctx) }()
		f(t, e)
		cancel()
		if err := <-done; err != nil && fx.Fail == 0 {
			t.Errorf("Run: %v", err)
		}
		must.Row(t, "violations of the order", nil, fx.Violations())
	})
}

func answer(e *lb.Engine, s *lb.Service, state lb.State, which ...int) {
	for i, c := range lb.Checks(s) {
		if len(which) == 0 || slices.Contains(which, i) {
			e.Health(lb.Health{Key: c.Key, State: state, Weight: -1, At: time.Now()})
		}
	}
}

// serve puts healthy services and completes the source.
func serve(e *lb.Engine, services ...*lb.Service) {
	for _, s := range services {
		e.Put(s)
		answer(e, s, lb.StateHealthy)
	}
	e.Complete("file")
}

func wantAnnounced(t *testing.T, fx *lbtest.Fixture, want ...netip.Addr) {
	t.Helper()
	synctest.Wait()
	must.Equal(t, want, fx.Announced())
}

func wantTargets(t *testing.T, fx *lbtest.Fixture, f lb.Frontend, want int) {
	t.Helper()
	synctest.Wait()
	p, ok := fx.Served(f)
	must.True(t, ok && p != nil && len(p.Targets) == want, "%s is served as %+v; want %d targets", f, p, want)
}

func TestServiceIsServedThenAnnouncedThenFollowsHealth(t *testing.T) {
	fx := lbtest.New()
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		s := service("web", []netip.Addr{vip1}, "10.0.0.1", "10.0.0.2")
		s.MinHealthy = 2
		e.Put(s)
		e.Complete("file")
		wantAnnounced(t, fx)
		_, ok := fx.Served(frontend(vip1))
		must.True(t, !ok, "served before the first results of the checks")
		answer(e, s, lb.StateHealthy)
		wantAnnounced(t, fx, vip1)
		wantTargets(t, fx, frontend(vip1), 2)

		answer(e, s, lb.StateUnhealthy, 1)
		wantAnnounced(t, fx) // one healthy backend is fewer than min_healthy
		wantTargets(t, fx, frontend(vip1), 1)
		p, _ := fx.Served(frontend(vip1))
		must.True(t, len(p.Down) == 1, "down backends %v; want one", p.Down)
		st := must.Get(e.Status(t.Context()))(t)
		must.Equal(t, "1 of 2 backends healthy, min_healthy is 2", st.Routes[0].Reason)
		answer(e, s, lb.StateHealthy, 1)
		wantAnnounced(t, fx, vip1)

		e.Delete("web")
		wantAnnounced(t, fx)
		_, ok = fx.Served(frontend(vip1))
		must.True(t, !ok, "still served after deletion")
		must.Equal(t, nil, fx.Checks("web"))
	})
}

// A service that is newly checked stays served while its backends are presumed healthy.
func TestPresumedBackends(t *testing.T) {
	fx := lbtest.New()
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		s := service("web", []netip.Addr{vip1}, "10.0.0.1", "10.0.0.2")
		unchecked, presumed := *s, *s
		unchecked.Check, presumed.Check.Presumed = lb.CheckSpec{Type: lb.CheckNone}, true
		e.Put(&unchecked)
		e.Complete("file")
		wantTargets(t, fx, frontend(vip1), 2)
		e.Put(&presumed)
		wantTargets(t, fx, frontend(vip1), 2)
		answer(e, &presumed, lb.StateUnhealthy, 1)
		wantTargets(t, fx, frontend(vip1), 1)
	})
}

// When the only backend recovers, the route waits until the datapath has the new table.
func TestRecoveryWaitsForTheNewTable(t *testing.T) {
	fx := lbtest.New()
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		s := service("web", []netip.Addr{vip1}, "10.0.0.1")
		serve(e, s)
		wantAnnounced(t, fx, vip1)
		answer(e, s, lb.StateUnhealthy)
		wantAnnounced(t, fx)
		wantTargets(t, fx, frontend(vip1), 0)
		fx.Pause()
		answer(e, s, lb.StateHealthy)
		wantAnnounced(t, fx)
		fx.Resume()
		wantTargets(t, fx, frontend(vip1), 1)
		wantAnnounced(t, fx, vip1)
	})
}

func TestShutdownWithdraws(t *testing.T) {
	fx := lbtest.New()
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		serve(e, service("web", []netip.Addr{vip1}, "10.0.0.1"))
		wantAnnounced(t, fx, vip1)
	})
	must.Equal(t, nil, fx.Announced())
	_, ok := fx.Served(frontend(vip1))
	must.True(t, ok, "no longer served after the end; flows would break")
}

func TestRestartKeepsWhatTheKernelHolds(t *testing.T) {
	fx := lbtest.New(frontend(vip1), frontend(vip2))
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		s := service("web", []netip.Addr{vip1}, "10.0.0.1")
		e.Put(s)
		synctest.Wait()
		must.Need(t, fx.Sets() == 0,
			"announced before the sources were complete: routers would drop the routes missing from the set")
		e.Complete("file")
		synctest.Wait()
		must.Need(t, fx.Sets() == 0, "announced before the first results of the checks")
		wantAnnounced(t, fx, vip1, vip2)
		answer(e, s, lb.StateHealthy)
		wantAnnounced(t, fx, vip1)
		_, ok := fx.Served(frontend(vip2))
		must.True(t, !ok, "a frontend that no service wants was not removed")
	})
}

// A check without results delays the announcements of other services only for Settle.
func TestSettleIsBounded(t *testing.T) {
	fx := lbtest.New()
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		a, b := service("a", []netip.Addr{vip1}, "10.0.0.1"), service("b", []netip.Addr{vip2}, "10.0.0.2")
		e.Put(a)
		e.Put(b)
		e.Complete("file")
		answer(e, a, lb.StateHealthy)
		wantAnnounced(t, fx)
		time.Sleep(11 * time.Second)
		wantAnnounced(t, fx, vip1)
	})
}

func TestSharedVIPNeedsOneHealthyService(t *testing.T) {
	fx := lbtest.New()
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		a, b := service("a", []netip.Addr{vip1}, "10.0.0.1"), service("b", []netip.Addr{vip1}, "10.0.0.2")
		b.Ports[0].Port = lb.Port{Port: 53, Target: 53, Protocol: lb.UDP}
		e.Put(a)
		e.Put(b)
		e.Complete("file")
		answer(e, a, lb.StateHealthy)
		answer(e, b, lb.StateUnhealthy)
		wantAnnounced(t, fx, vip1)
		answer(e, a, lb.StateUnhealthy)
		wantAnnounced(t, fx)
	})
}

func TestFrontendOfAnotherServiceIsRefusedUntilFree(t *testing.T) {
	fx := lbtest.New()
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		a, b := service("a", []netip.Addr{vip1}, "10.0.0.1"), service("b", []netip.Addr{vip1}, "10.0.0.2", "10.0.0.3")
		e.Put(a)
		answer(e, a, lb.StateHealthy)
		synctest.Wait()
		e.Put(b)
		answer(e, b, lb.StateHealthy)
		e.Complete("file")
		wantTargets(t, fx, frontend(vip1), 1)
		e.Delete("a")
		wantTargets(t, fx, frontend(vip1), 2)
		wantAnnounced(t, fx, vip1)
	})
}

// The VIPs of a drained service are served but not announced, except VIPs that another service also uses.
func TestDrain(t *testing.T) {
	fx := lbtest.New()
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		one := service("one", []netip.Addr{vip1}, "10.0.0.1")
		both := service("both", []netip.Addr{vip1, vip2}, "10.0.0.2")
		both.Ports[0].Port.Port = 81
		serve(e, one, both)
		wantAnnounced(t, fx, vip1, vip2)
		d := lb.Drains{}.With(lb.DrainTarget{Service: "both"}, true)
		e.Drain(d)
		wantAnnounced(t, fx, vip1)
		wantTargets(t, fx, lb.Frontend{VIP: vip2, Port: 81, Protocol: lb.TCP}, 1)
		st, err := e.Status(t.Context())
		must.True(t, err == nil && st.Routes[1].Reason == "drained by the operator" &&
			st.Services[0].State == lb.StateDraining, "status: %v, %+v", err, st)
		e.Drain(d.With(lb.DrainTarget{}, true))
		wantAnnounced(t, fx)
		e.Drain(lb.Drains{})
		wantAnnounced(t, fx, vip1, vip2)
		server := lb.DrainTarget{Service: "both", Address: netip.MustParseAddr("10.0.0.2")}
		e.Drain(lb.Drains{}.With(server, true))
		wantAnnounced(t, fx, vip1)
		st = must.Get(e.Status(t.Context()))(t)
		must.Row(t, "the server", lb.StateDraining, st.Backends[0].State)
		must.Row(t, "reason", "drained by the operator", st.Backends[0].Reason)
		serve(e, both) // the source may put it again
		wantAnnounced(t, fx, vip1)
		e.Drain(lb.Drains{})
		wantAnnounced(t, fx, vip1, vip2)
	})
}

// Behind and Status say when the datapath began to lack a wanted frontend.
func TestBehind(t *testing.T) {
	fx := lbtest.New()
	fx.Rand = rand.New(rand.NewPCG(1, 1))
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		behind := func() time.Duration {
			synctest.Wait()
			st := must.Get(e.Status(t.Context()))(t)
			since, err := e.Behind(t.Context())
			must.True(t, err == nil && since.Equal(st.Behind), "Behind: %s, %v; Status says %s", since, err, st.Behind)
			if since.IsZero() {
				return 0
			}
			return time.Since(since)
		}
		e.Complete("file")
		must.Equal(t, 0, behind())
		fx.SetFail(1)
		serve(e, service("web", []netip.Addr{vip1}, "10.0.0.1"))
		time.Sleep(70 * time.Second)
		d := behind()
		must.True(t, d >= 69*time.Second && d <= 71*time.Second, "behind for %s after 70 s of failures", d)
		fx.SetFail(0)
		time.Sleep(time.Minute)
		must.Equal(t, 0, behind())
	})
}

// Random changes with slow and failing consumers: no VIP is announced without being served, and in the end the
// announcements and the datapath are as wanted.
func TestRandomChangesWithFailures(t *testing.T) {
	for seed := range uint64(60) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := rand.New(rand.NewPCG(seed, 2))
			fx := lbtest.New(frontend(vip2))
			fx.Fail, fx.Delay, fx.Rand = 0.1, 50*time.Millisecond, rand.New(rand.NewPCG(seed, 3))
			inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
				e.Complete("file")
				services := map[string]*lb.Service{}
				states := map[lb.CheckKey]lb.State{}
				for range 200 {
					name := string(rune('a' + r.IntN(3)))
					vips := [][]netip.Addr{{vip1}, {vip2}, {vip1, vip2}}[r.IntN(3)]
					switch s, ok := services[name]; {
					case !ok || r.IntN(4) == 0:
						s = service(name, vips, "10.0.0.1", "10.0.0.2")
						s.Ports[0].Port.Port = 80 + uint16(name[0]-'a')
						services[name] = s
						e.Put(s)
					case r.IntN(6) == 0:
						delete(services, name)
						e.Delete(name)
					default:
						c := lb.Checks(s)[r.IntN(2)]
						states[c.Key] = lb.StateHealthy + lb.State(r.IntN(2))
						e.Health(lb.Health{Key: c.Key, State: states[c.Key]})
					}
					time.Sleep(time.Duration(r.IntN(100)) * time.Millisecond)
				}
				var want []netip.Addr
				for _, s := range services {
					answer(e, s, lb.StateHealthy)
					want = append(want, s.VIPs...)
				}
				slices.SortFunc(want, netip.Addr.Compare)
				want = slices.Compact(want)
				time.Sleep(5 * time.Minute)
				wantAnnounced(t, fx, want...)
				held := must.Get(fx.Held())(t)
				gone := func(f lb.Frontend) bool { return !slices.Contains(want, f.VIP) }
				must.True(t, !slices.ContainsFunc(held, gone), "still served: %v; want only %v", held, want)
			})
		})
	}
}
