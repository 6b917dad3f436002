package lb_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
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

// A change is measured from its report until it takes effect, in the datapath and as a route.
func TestTimeToEffect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fx := slowConsumers{lbtest.New()}
		var mu sync.Mutex
		var effects, routes []string
		o := engineOptions(fx)
		o.InEffect = func(e lb.Effect, took time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			effects = append(effects, fmt.Sprintf("%s %s", e, took))
		}
		o.RouteChanged = func(r lb.RouteStatus) {
			mu.Lock()
			defer mu.Unlock()
			routes = append(routes, fmt.Sprintf("%s %s %q", r.Address, r.State, r.Reason))
		}
		e := must.Get(lb.NewEngine(o))(t)
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

// slowDatapath takes as long as the kernel for each target.
type slowDatapath struct {
	*lbtest.Fixture
	targets atomic.Int64 // put so far
	most    atomic.Int64 // by one call
}

func (d *slowDatapath) Apply(ctx context.Context, delta lb.Delta) map[lb.Frontend]error {
	n := 0
	for _, f := range delta.Put {
		n += len(f.Targets)
	}
	d.most.Store(max(d.most.Load(), int64(n)))
	time.Sleep(time.Duration(n) * 20 * time.Microsecond)
	d.targets.Add(int64(n))
	return d.Fixture.Apply(ctx, delta)
}

// While 140,000 pairs of endpoint and port are written, the engine responds, and a failed server of another service is
// removed.
func TestLargeServiceDelaysNothing(t *testing.T) {
	d := &slowDatapath{Fixture: lbtest.New()}
	e := must.Get(lb.NewEngine(engineOptions(d)))(t)
	must.Run(t, e.Run)
	small := service("small", []netip.Addr{vip2}, "10.0.0.1", "10.0.0.2")
	serve(e, small)
	targets := func() int {
		if f, ok := d.Served(frontend(vip2)); ok {
			return len(f.Targets)
		}
		return 0
	}
	await := func(what string, within time.Duration, ok func() bool) {
		t.Helper()
		for start := time.Now(); !ok(); time.Sleep(time.Millisecond) {
			must.Need(t, time.Since(start) <= within, "%s: not within %s", what, within)
		}
	}
	await("the small service is served", 5*time.Second, func() bool { return targets() == 2 })

	e.Put(large("large", vip1, 140, 1000))
	await("it is being written", 10*time.Second, func() bool { return d.targets.Load() > 5000 })
	answer(e, small, lb.StateUnhealthy, 0)
	await("the failed server is taken out", time.Second, func() bool { return targets() == 1 })
	for range 20 {
		start := time.Now()
		must.Get(e.StatusOf(t.Context(), vip2))(t)
		took := time.Since(start)
		must.True(t, took <= time.Second, "a status took %s", took)
		time.Sleep(10 * time.Millisecond)
	}
	n := d.targets.Load()
	must.True(t, n <= 120000, "%d pairs were written before the failed server was taken out", n)
	n = d.most.Load()
	must.True(t, n <= 5000, "one call has written %d pairs", n)
	begin := time.Now()
	st, err := e.Status(t.Context())
	t.Log("status of all", time.Since(begin), len(st.Backends), err)
}

// large is a service with this number of ports and backends.
func large(name string, vip netip.Addr, ports, backends int) *lb.Service {
	s := &lb.Service{
		Name: name, Source: "file", VIPs: []netip.Addr{vip}, Method: lb.MethodNAT, MinHealthy: 1,
		Algorithm: lb.AlgorithmMaglev, Check: lb.CheckSpec{Type: lb.CheckNone},
	}
	for p := range uint16(ports) {
		port := lb.ServicePort{Port: lb.Port{Port: 1000 + p, Target: 1000 + p, Protocol: lb.TCP}}
		for b := range backends {
			addr := netip.AddrFrom4([4]byte{10, 1, byte(b >> 8), byte(b)})
			port.Backends = append(port.Backends, lb.Backend{Addr: addr, Port: 1000 + p, Weight: 1})
		}
		s.Ports = append(s.Ports, port)
	}
	return s
}

// BenchmarkEngine measures single events with 10,000 services of 10 backends, until they take effect.
func BenchmarkEngine(b *testing.B) {
	const services = 10_000
	fx := lbtest.New()
	e := must.Get(lb.NewEngine(lb.EngineOptions{
		Datapath: fx, Announcer: fx, Prober: fx, Settle: time.Second, Retry: time.Second,
		Withdraw: time.Second, Log: slog.New(slog.DiscardHandler),
	}))(b)
	must.Run(b, e.Run)
	make10 := func(i, n int) *lb.Service {
		var backends []string
		for k := range n {
			backends = append(backends, fmt.Sprintf("10.0.0.%d", k))
		}
		addr := netip.AddrFrom4([4]byte{203, 0, byte(i / 256), byte(i)})
		return service(fmt.Sprint(i), []netip.Addr{addr}, backends...)
	}
	for i := range services {
		serve(e, make10(i, 10))
	}
	last := make10(services-1, 10)
	until := func(targets int) {
		for {
			p, ok := fx.Served(frontend(last.VIPs[0]))
			if ok && len(p.Targets) == targets && e.Progress() == (lb.Progress{Applied: true}) {
				return
			}
			time.Sleep(20 * time.Microsecond)
		}
	}
	until(10)
	for _, x := range []struct {
		name string
		do   func(i int)
	}{
		{"endpoint", func(i int) {
			e.Put(make10(services-1, 10+i%2))
			answer(e, make10(services-1, 10+i%2), lb.StateHealthy)
			until(10 + i%2)
		}},
		{"verdict", func(i int) {
			answer(e, last, lb.StateHealthy+lb.State(1-i%2), 0)
			until(9 + i%2)
		}},
		{"drain of a service", func(i int) {
			e.Drain(lb.Drains{}.With(lb.DrainTarget{Service: "7"}, i%2 == 0))
			until(10)
		}},
		{"drain of the node", func(i int) {
			e.Drain(lb.Drains{Node: i%2 == 0})
			until(10)
		}},
		{"health request", func(int) { e.Progress(); e.InForce("7") }},
		{"Status", func(int) { must.Get(e.Status(b.Context()))(b) }},
	} {
		e.Put(last)
		answer(e, last, lb.StateHealthy)
		until(10)
		b.Run(x.name, func(b *testing.B) {
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				x.do(i)
			}
		})
	}
}
