package healthd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// fake is a Checker with a preset result. It records when each probe started.
type fake struct {
	mu      sync.Mutex
	err     error
	took    time.Duration
	started []time.Time
}

func (f *fake) Probe(ctx context.Context) (Result, error) {
	f.mu.Lock()
	f.started = append(f.started, time.Now())
	err, took := f.err, f.took
	f.mu.Unlock()
	if !sleep(ctx, took) {
		return Result{}, ctx.Err()
	}
	return Result{Reason: "fine", Weight: -1}, err
}

func (f *fake) set(err error)        { f.mu.Lock(); f.err = err; f.mu.Unlock() }
func (f *fake) take(d time.Duration) { f.mu.Lock(); f.took = d; f.mu.Unlock() }

func spec() lb.CheckSpec {
	return lb.CheckSpec{Type: lb.CheckTCP, Interval: time.Second, Timeout: 500 * time.Millisecond, Rise: 2, Fall: 3}
}

func check(i int, s lb.CheckSpec) lb.Check {
	at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i / 250), byte(i % 250)}), 80)
	return lb.Check{Key: lb.CheckKey{Service: "web", Backend: at}, Target: at, Spec: s}
}

// checks returns checks of n different backends.
func checks(n int, s lb.CheckSpec) (all []lb.Check) {
	for i := range n {
		all = append(all, check(i, s))
	}
	return all
}

// bubble runs f with a running Prober that uses checker. reports returns the reports so far.
func bubble(t *testing.T, checker Checker, f func(t *testing.T, p *Prober, reports func() []string)) {
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		var list []string
		p := New(Options{Log: slog.New(slog.DiscardHandler), Report: func(h lb.Health) {
			mu.Lock()
			defer mu.Unlock()
			list = append(list, fmt.Sprintf("%s: %s", h.State, h.Reason))
		}})
		p.make = func(lb.Check) Checker { return checker }
		must.Run(t, p.Run)
		f(t, p, func() []string {
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			return slices.Clone(list)
		})
	})
}

// wantReports fails the test unless these are the reports so far.
func wantReports(t *testing.T, reports func() []string, want ...string) {
	t.Helper()
	must.Equal(t, want, reports())
}

func TestFirstProbeThenRiseAndFall(t *testing.T) {
	f := &fake{}
	bubble(t, f, func(t *testing.T, p *Prober, reports func() []string) {
		p.Put("web", []lb.Check{check(1, spec())})
		expect := func(want ...string) { t.Helper(); wantReports(t, reports, want...) }
		time.Sleep(1001 * time.Millisecond) // the second probe is at its phase, at most one interval after the first
		expect("healthy: fine")
		n := len(f.startTimes())
		f.set(errors.New("broken"))
		time.Sleep(2 * time.Second)
		expect("healthy: fine") // 2 failures, Fall is 3
		time.Sleep(time.Second)
		expect("healthy: fine", "unhealthy: broken")
		must.Equal(t, 3, len(f.startTimes())-n)
		f.set(nil)
		time.Sleep(2 * time.Second)
		expect("healthy: fine", "unhealthy: broken", "healthy: fine")
		time.Sleep(time.Minute) // no report without a change
		expect("healthy: fine", "unhealthy: broken", "healthy: fine")
	})
}

func TestFailureIsReportedInTime(t *testing.T) {
	for _, timeout := range []time.Duration{500 * time.Millisecond, time.Second} {
		f := &fake{}
		bubble(t, f, func(t *testing.T, p *Prober, reports func() []string) {
			s := spec()
			s.Timeout = timeout
			p.Put("web", []lb.Check{check(1, s)})
			time.Sleep(10 * time.Second)
			f.take(time.Hour)                   // hangs: every probe takes its whole timeout
			time.Sleep(3*time.Second + timeout) // fall × interval + timeout
			wantReports(t, reports, "healthy: fine", "unhealthy: no response within "+timeout.String())
		})
	}
}

func TestProbesSpreadAndDoNotOverlap(t *testing.T) {
	f := &fake{took: 400 * time.Millisecond}
	bubble(t, f, func(t *testing.T, p *Prober, reports func() []string) {
		p.Put("web", checks(1000, spec()))
		time.Sleep(990 * time.Millisecond)
		first := f.startTimes()
		must.Need(t, len(first) >= 1000, "%d first probes in a second; want 1000", len(first))
		same := 0
		for _, at := range first[:1000] {
			if at.Sub(first[0]) < time.Millisecond {
				same++
			}
		}
		must.True(t, same <= 50, "%d of 1000 checks fired in the same millisecond", same)
		time.Sleep(9 * time.Second)
		n := len(f.startTimes())
		must.True(t, n >= 9500 && n <= 11000, "%d probes in ten seconds of 1000 checks a second; want about 10,300", n)
	})
}

func TestPut(t *testing.T) {
	f := &fake{err: errors.New("broken")}
	bubble(t, f, func(t *testing.T, p *Prober, reports func() []string) {
		c := check(1, spec())
		c.Spec.Fall = 1
		p.Put("web", []lb.Check{c})
		time.Sleep(100 * time.Millisecond)
		p.Put("web", []lb.Check{c}) // unchanged: no new first probe
		time.Sleep(10 * time.Millisecond)
		must.Equal(t, 1, len(f.startTimes()))
		f.set(nil)
		c.Spec.Rise = 1
		p.Put("web", []lb.Check{c})
		time.Sleep(time.Second)
		wantReports(t, reports, "unhealthy: broken", "healthy: fine")
		p.Put("web", nil)
		f.set(errors.New("broken"))
		before := len(reports())
		time.Sleep(time.Minute)
		got := reports()
		must.True(t, len(got) == before, "reports after the end: %q", got[before:])
	})
}

func BenchmarkPut10000(b *testing.B) {
	p := New(Options{Log: slog.New(slog.DiscardHandler)})
	all := checks(10_000, spec())
	for b.Loop() {
		p.Put("web", all)
	}
}

// A probe that panics leaves its backend's state unchanged. Others are probed, and so is this backend once the probe no
// longer panics.
func TestPanicOfAProbe(t *testing.T) {
	f := &fake{}
	bubble(t, f, func(t *testing.T, p *Prober, reports func() []string) {
		var on atomic.Bool
		bad := "web " + check(1, spec()).Key.BackendName()
		p.o.Boundary = &lb.Boundary{Log: slog.New(slog.DiscardHandler), Before: func(part lb.Part, object string) {
			if part == lb.PartProbe && object == bad && on.Load() {
				panic("injected")
			}
		}}
		p.Put("web", []lb.Check{check(1, spec()), check(2, spec())})
		time.Sleep(5 * time.Second)
		on.Store(true)
		f.set(errors.New("odd"))
		time.Sleep(10 * time.Second)
		wantReports(t, reports, "healthy: fine", "healthy: fine", "unhealthy: odd")
		got := p.o.Boundary.Troubles()
		must.True(t, len(got) == 1 && strings.HasPrefix(got[0], "probe "+bad), "troubles %q", got)
		on.Store(false)
		time.Sleep(10 * time.Second)
		got = reports()
		must.True(t, len(got) == 4 && got[3] == "unhealthy: odd", "reports %q; want both unhealthy", got)
	})
}

// A backend that reports that it accepts no new flows drains after Fall such results, until Fall failures or Rise
// successes.
func TestDrainingBackend(t *testing.T) {
	down, drains := errors.New("no response"), drainingError{errors.New("HTTP 503")}
	f := &fake{}
	bubble(t, f, func(t *testing.T, p *Prober, reports func() []string) {
		p.Put("web", []lb.Check{check(1, spec())}) // Rise 2, Fall 3
		var want []string
		for i, step := range []struct {
			err  error
			n    int
			want string
		}{
			{nil, 1, "healthy: fine"},
			{drains, 2, ""},
			{nil, 1, ""},
			{drains, 1, ""},
			{down, 1, ""},
			{drains, 1, "draining: HTTP 503"}, // three consecutive probes without success
			{down, 2, ""},
			{drains, 1, ""},
			{nil, 1, ""},
			{down, 2, ""},
			{down, 1, "unhealthy: no response"},
			{drains, 1, ""},
			{drains, 1, "draining: HTTP 503"},
			{nil, 1, ""},
			{nil, 1, "healthy: fine"},
		} {
			f.set(step.err)
			time.Sleep(time.Duration(step.n) * time.Second)
			if step.want != "" {
				want = append(want, step.want)
			}
			got := reports()
			must.Need(t, slices.Equal(got, want), "step %d: reports %q; want %q", i, got, want)
		}
	})
}
