package lb_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// slowConsumers take 10 ms to apply and 20 ms to announce.
type slowConsumers struct{ *lbtest.Fixture }

func (s slowConsumers) Apply(ctx context.Context, d lb.Delta) map[lb.Frontend]error {
	time.Sleep(10 * time.Millisecond)
	return s.Fixture.Apply(ctx, d)
}

func (s slowConsumers) Set(ctx context.Context, set []lb.Announcement) error {
	time.Sleep(20 * time.Millisecond)
	return s.Fixture.Set(ctx, set)
}

// A change is measured from its report to the moment at which it is in force: in the datapath, and as a route.
func TestTimeToEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fx := slowConsumers{lbtest.New()}
		var mu sync.Mutex
		var effects, routes []string
		e := must.Get(lb.NewEngine(lb.EngineOptions{
			Datapath: fx, Announcer: fx, Prober: fx, Sources: []string{"file"},
			Settle: 10 * time.Second, Retry: 100 * time.Millisecond, Withdraw: 5 * time.Second,
			Log: slog.New(slog.DiscardHandler),
			InEffect: func(e lb.Effect, took time.Duration) {
				mu.Lock()
				defer mu.Unlock()
				effects = append(effects, fmt.Sprintf("%s %s", e, took))
			},
			RouteChanged: func(r lb.RouteStatus) {
				mu.Lock()
				defer mu.Unlock()
				routes = append(routes, fmt.Sprintf("%s %s %q", r.Address, r.State, r.Reason))
			},
		}))(t)
		must.Run(t, e.Run)
		s := service("web", []netip.Addr{vip1}, "10.0.0.1", "10.0.0.2")
		s.MinHealthy = 2
		fault := func(text string) { e.Faults(map[netip.Addr]string{vip1: text}) }
		const few = "1 of 2 backends healthy, min_healthy is 2"
		for _, step := range []struct {
			what  string
			do    func()
			want  []string
			route string
		}{
			{"the service waits for its checks", func() { e.Put(s); e.Complete("file") }, nil, ""},
			{"they succeed", func() { answer(e, s, lb.StateHealthy) }, []string{"datapath 10ms"}, `announced ""`},
			{"a backend fails", func() { answer(e, s, lb.StateUnhealthy, 1) },
				[]string{"datapath 10ms", "withdrawn 20ms"}, fmt.Sprintf("withheld %q", few)},
			{"and recovers", func() { answer(e, s, lb.StateHealthy, 1) },
				[]string{"announced 20ms", "datapath 10ms"}, `announced ""`},
			{"a change without effect on the route", func() {
				next := *s
				next.Affinity = time.Minute
				e.Put(&next)
			}, []string{"datapath 10ms"}, ""},
			{"a fault", func() { fault("eth0 is down") }, []string{"withdrawn 20ms"}, `withheld "eth0 is down"`},
			{"it ends", func() { fault("") }, []string{"announced 20ms"}, `announced ""`},
			{"two changes in one call", func() {
				answer(e, s, lb.StateUnhealthy)
				time.Sleep(5 * time.Millisecond)
				e.Delete("web")
			}, []string{"datapath 10ms", "withdrawn 20ms"}, `withheld "no service has it"`},
		} {
			effects, routes = nil, nil
			step.do()
			time.Sleep(time.Second)
			synctest.Wait()
			mu.Lock()
			slices.Sort(effects)
			want := []string{}
			if step.route != "" {
				want = append(want, fmt.Sprintf("%s %s", vip1, step.route))
			}
			if !slices.Equal(effects, step.want) && len(effects)+len(step.want) > 0 ||
				fmt.Sprint(routes) != fmt.Sprint(want) {
				t.Errorf("%s: effects %q, routes %q; want %q, %q", step.what, effects, routes, step.want, want)
			}
			mu.Unlock()
		}
	})
}
