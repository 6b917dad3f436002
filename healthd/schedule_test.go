package healthd

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

type checkerFunc func(ctx context.Context) (Result, error)

func (f checkerFunc) Probe(ctx context.Context) (Result, error) { return f(ctx) }

// startTimes returns when f's probes started.
func (f *fake) startTimes() []time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.started)
}

// gaps returns the time between the starts of consecutive probes.
func (f *fake) gaps() []time.Duration {
	times := f.startTimes()
	var all []time.Duration
	for i := range times[1:] {
		all = append(all, times[i+1].Sub(times[i]))
	}
	return all
}

func TestPhaseOf(t *testing.T) {
	least, most := 1.0, 0.0
	for i := range 1000 {
		phase := phaseOf(check(i, spec()).Key)
		least, most = min(least, phase), max(most, phase)
	}
	must.True(t, least >= 0 && least <= 0.05 && most >= 0.95 && most < 1,
		"phases from %f to %f; want them spread over [0, 1)", least, most)
	a, b := check(1, spec()).Key, check(1, spec()).Key
	b.Service = "api"
	must.True(t, phaseOf(a) != phaseOf(b), "two services check one backend at the same phase")
}

// The first probes are spread over a tenth of the interval, but at most over 200 ms.
func TestFirstProbesAreSpread(t *testing.T) {
	for interval, want := range map[time.Duration]time.Duration{
		time.Second: 100 * time.Millisecond, time.Hour: 200 * time.Millisecond,
	} {
		f := &fake{}
		bubble(t, f, func(t *testing.T, p *Prober, _ func() []string) {
			s := spec()
			s.Interval = interval
			begin := time.Now()
			p.Put("web", checks(1000, s))
			time.Sleep(want)
			times := f.startTimes() // including some second probes, at their phase
			n := len(times)
			must.Need(t, n >= 1000 && n <= 1200, "%d probes in %s; want 1000 first ones", n, want)
			slots := map[time.Duration]int{}
			for _, at := range times {
				slots[at.Sub(begin)/(want/10)]++
			}
			for slot, n := range slots {
				must.True(t, n <= 150,
					"interval %s: %d probes in tenth %d of %s; want about 100", interval, n, slot, want)
			}
		})
	}
}

// Probes stay spread over the interval: no tenth of it ever has many more than a tenth of the probes, even if the
// checks were added together.
func TestProbesStaySpread(t *testing.T) {
	f := &fake{took: time.Millisecond}
	bubble(t, f, func(t *testing.T, p *Prober, _ func() []string) {
		s := spec()
		s.Interval = 2 * time.Second
		begin := time.Now()
		p.Put("web", checks(1000, s))
		time.Sleep(60 * time.Second)
		slots := map[time.Duration]int{}
		for _, at := range f.startTimes() {
			slots[at.Sub(begin)/(200*time.Millisecond)]++
		}
		for slot, n := range slots {
			if most := 150; n > most && slot > 1 {
				t.Errorf("%d probes start within 200 ms, %s after the first; want up to %d of 1000",
					n, slot*200*time.Millisecond, most)
			}
		}
		n := slots[60] + slots[61] + slots[62] + slots[63] + slots[64]
		must.True(t, n >= 400, "%d probes in one second; want about 500", n)
	})
}

// A probe that overruns the interval delays the next one, and the probes that it displaced are skipped.
func TestOverrunIsNotMadeUp(t *testing.T) {
	f := &fake{took: 3500 * time.Millisecond}
	bubble(t, f, func(t *testing.T, p *Prober, _ func() []string) {
		s := spec()
		s.Timeout = 10 * time.Second
		p.Put("web", []lb.Check{check(1, s)})
		time.Sleep(time.Second)
		f.take(0)
		time.Sleep(5 * time.Second)
		gaps := f.gaps()
		must.True(t, gaps[0] >= 3500*time.Millisecond && gaps[0] <= 4500*time.Millisecond,
			"the next probe started after %s; want its next slot after 3.5 s", gaps[0])
		for _, gap := range gaps[2:] {
			must.Equal(t, time.Second, gap)
		}
	})
}

func TestConcurrentProbesAreBounded(t *testing.T) {
	var running, most atomic.Int32
	slow := checkerFunc(func(ctx context.Context) (Result, error) {
		most.Store(max(most.Load(), running.Add(1)))
		defer running.Add(-1)
		sleep(ctx, 400*time.Millisecond)
		return ok("fine")
	})
	bubble(t, slow, func(t *testing.T, p *Prober, reports func() []string) {
		p.slots = newSlots(1024)
		p.Put("web", checks(1100, spec()))
		time.Sleep(350 * time.Millisecond)
		must.Equal(t, 1024, running.Load())
		time.Sleep(time.Second)
		must.Row(t, "checks that reported", 1100, len(reports()))
		must.Row(t, "probes at once", 1024, most.Load())
	})
}

// A weight that changes by more than a factor of two is logged, at most once per minute.
func TestWarningOfWeights(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		p := New(Options{Log: slog.New(slog.NewTextHandler(&log, nil))})
		l := &loop{check: check(1, spec()), health: lb.Health{Weight: -1}}
		for _, tt := range []struct {
			weight int
			want   bool
		}{{3, false}, {6, false}, {2, true}, {1000, false}, {-1, false}, {0, false}, {1, true}, {0, false}} {
			log.Reset()
			p.warnOfWeight(l, tt.weight)
			got := strings.Contains(log.String(), "a new weight")
			must.True(t, got == tt.want, "%d after %d: logged %t %q", tt.weight, l.health.Weight, got, log.String())
			l.health.Weight = tt.weight
			time.Sleep(30 * time.Second)
		}
	})
}

// A changed reason or weight is reported even if the state is unchanged. At is the time of the last state change.
func TestReportsWithinAState(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var got []lb.Health
		l := &loop{check: check(1, spec()), health: lb.Health{Weight: -1}}
		report := func(h lb.Health) { got = append(got, h) }
		begin := time.Now()
		step := func(r Result, ok bool) {
			time.Sleep(time.Second)
			state := lb.StateUnhealthy
			if ok {
				state = lb.StateHealthy
			}
			l.apply(report, r, state)
		}
		step(Result{Reason: "a", Weight: 1}, true)
		step(Result{Reason: "a", Weight: 1}, true)
		step(Result{Reason: "b", Weight: 1}, true)
		step(Result{Reason: "b", Weight: 2}, true)
		step(Result{Reason: "x", Weight: -1}, false)
		step(Result{Reason: "b", Weight: 2}, true) // resets the count of failures
		step(Result{Reason: "x", Weight: -1}, false)
		step(Result{Reason: "x", Weight: -1}, false)
		step(Result{Reason: "x", Weight: -1}, false)
		l.end()
		step(Result{Reason: "y", Weight: -1}, false)
		at := func(s int) time.Time { return begin.Add(time.Duration(s) * time.Second) }
		want := []lb.Health{
			{State: lb.StateHealthy, Reason: "a", Weight: 1, At: at(1)},
			{State: lb.StateHealthy, Reason: "b", Weight: 1, At: at(1)},
			{State: lb.StateHealthy, Reason: "b", Weight: 2, At: at(1)},
			{State: lb.StateUnhealthy, Reason: "x", Weight: -1, At: at(9)},
		}
		must.True(t, slices.Equal(got, want), "got  %+v\nwant %+v", got, want)
	})
}

// Run returns only after every probe has ended.
func TestRunWaitsForProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := New(Options{Log: slog.New(slog.DiscardHandler), Report: func(lb.Health) {}})
		p.make = func(lb.Check) Checker {
			return checkerFunc(func(context.Context) (Result, error) {
				time.Sleep(10 * time.Second) // ignores its context
				return ok("fine")
			})
		}
		p.Put("web", []lb.Check{check(1, spec())})
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began := time.Now()
		must.Do(t, p.Run(ctx))
		must.True(t, time.Since(began) >= 10*time.Second, "Run returned after %s", time.Since(began))
	})
}

// A failed probe has no weight, whatever the backend's weight was.
func TestFailureHasNoWeight(t *testing.T) {
	var got []int
	p := New(Options{Log: slog.New(slog.DiscardHandler), Report: func(h lb.Health) { got = append(got, h.Weight) }})
	l := &loop{check: check(1, spec()), health: lb.Health{Weight: -1}}
	l.check.Spec.Fall = 1
	for _, err := range []error{nil, syscall.ECONNREFUSED} {
		answer := func(context.Context) (Result, error) { return Result{Weight: 3}, err }
		p.probe(t.Context(), l, checkerFunc(answer), time.Now())
	}
	must.Row(t, "weights", []int{3, -1}, got)
	must.True(t, errors.Is(l.health.Err, syscall.ECONNREFUSED), "error %v", l.health.Err)
}

// Checks put before Run start with Run. Checks put after its end never start.
func TestPutOutsideRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{}
		p := New(Options{Log: slog.New(slog.DiscardHandler), Report: func(lb.Health) {}})
		p.make = func(lb.Check) Checker { return f }
		c := check(1, spec())
		c.Spec.Interval = time.Hour
		p.Put("web", []lb.Check{c})
		p.Put("removed", []lb.Check{check(2, spec())})
		p.Put("removed", nil)
		time.Sleep(time.Minute)
		stop := must.Run(t, p.Run)
		time.Sleep(500 * time.Millisecond)
		stop()
		p.Put("late", []lb.Check{check(3, spec())})
		time.Sleep(time.Minute)
		must.Equal(t, 1, len(f.startTimes()))
		must.True(t, len(p.checks) == 2 && p.checks["removed"] == nil, "services %v; want web and late", p.checks)
	})
}

func TestMetrics(t *testing.T) {
	f := &fake{took: 2 * time.Millisecond}
	synctest.Test(t, func(t *testing.T) {
		registry := prometheus.NewRegistry()
		p := New(Options{Log: slog.New(slog.DiscardHandler), Report: func(lb.Health) {}, Registerer: registry})
		p.make = func(lb.Check) Checker { return f }
		must.Run(t, p.Run)
		s := spec()
		s.Interval, s.Fall = time.Hour, 1
		of := func(service string, i int) []lb.Check {
			c := check(i, s)
			c.Key.Service = service
			return []lb.Check{c}
		}
		p.Put("web", of("web", 1))
		p.Put("api", of("api", 2))
		time.Sleep(5 * time.Second)
		f.set(errors.New("broken"))
		p.Put("api", of("api", 3)) // a service that has a check keeps its series
		time.Sleep(3 * time.Second)
		const head = `# HELP steelyard_health_probes_total Probes of backends by result: ok, failed or inconclusive.
# TYPE steelyard_health_probes_total counter
`
		const name = "steelyard_health_probes_total"
		expect := func(lines, name string) {
			t.Helper()
			must.Do(t, testutil.GatherAndCompare(registry, strings.NewReader(lines), name))
		}
		expect(head+`steelyard_health_probes_total{result="failed",service="api"} 1
steelyard_health_probes_total{result="ok",service="api"} 1
steelyard_health_probes_total{result="ok",service="web"} 1
`, name)
		expect(`# HELP steelyard_flaps_total How often backends of a service became unhealthy.
# TYPE steelyard_flaps_total counter
steelyard_flaps_total{service="api"} 1
`, "steelyard_flaps_total")
		p.Put("api", nil)
		expect(head+`steelyard_health_probes_total{result="ok",service="web"} 1
`, name)
		expect(`# HELP steelyard_health_probe_duration_seconds Duration of the probes of the backends of a service.
# TYPE steelyard_health_probe_duration_seconds histogram
steelyard_health_probe_duration_seconds_bucket{service="web",le="0.0005"} 0
steelyard_health_probe_duration_seconds_bucket{service="web",le="0.002"} 1
steelyard_health_probe_duration_seconds_bucket{service="web",le="0.008"} 1
steelyard_health_probe_duration_seconds_bucket{service="web",le="0.032"} 1
steelyard_health_probe_duration_seconds_bucket{service="web",le="0.128"} 1
steelyard_health_probe_duration_seconds_bucket{service="web",le="0.512"} 1
steelyard_health_probe_duration_seconds_bucket{service="web",le="2.048"} 1
steelyard_health_probe_duration_seconds_bucket{service="web",le="8.192"} 1
steelyard_health_probe_duration_seconds_bucket{service="web",le="+Inf"} 1
steelyard_health_probe_duration_seconds_sum{service="web"} 0.002
steelyard_health_probe_duration_seconds_count{service="web"} 1
`, "steelyard_health_probe_duration_seconds")
	})
}
