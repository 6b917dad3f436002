package healthd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A backend without a state becomes unhealthy only after Fall failures. The health from the previous run is reported
// before the first probe, and one failure does not change it. A presumed check is healthy, and reports no failure
// before Fall probes have failed.
func TestFirstHealth(t *testing.T) {
	broken := errors.New("broken")
	for _, tt := range []struct {
		earlier  lb.State
		presumed bool
		err      error
		after    time.Duration
		want     []string
	}{
		{lb.StateUnknown, false, broken, time.Second, []string{"unknown: broken"}},
		{lb.StateUnknown, false, broken, 3 * time.Second, []string{"unknown: broken", "unhealthy: broken"}},
		{lb.StateUnknown, true, broken, 1990 * time.Millisecond, nil},
		{lb.StateUnknown, true, broken, 3 * time.Second, []string{"unhealthy: broken"}},
		{lb.StateHealthy, false, broken, 1990 * time.Millisecond, []string{"healthy: earlier"}},
		{lb.StateHealthy, false, broken, 3 * time.Second, []string{"healthy: earlier", "unhealthy: broken"}},
		{lb.StateUnhealthy, false, nil, 990 * time.Millisecond, []string{"unhealthy: earlier"}},
		{lb.StateUnhealthy, false, nil, 2 * time.Second, []string{"unhealthy: earlier", "healthy: fine"}},
	} {
		t.Run(fmt.Sprint(tt.earlier, tt.presumed, tt.after), func(t *testing.T) {
			bubble(t, &fake{err: tt.err}, func(t *testing.T, p *Prober, reports func() []string) {
				has := tt.earlier != lb.StateUnknown
				p.o.Earlier = func(k lb.CheckKey) (lb.Health, bool) {
					return lb.Health{Key: k, State: tt.earlier, Reason: "earlier", Weight: -1}, has
				}
				c := check(1, spec())
				c.Presumed = tt.presumed
				p.Put("web", []lb.Check{c})
				if has {
					wantReports(t, reports, tt.want[:1]...)
				}
				time.Sleep(tt.after)
				wantReports(t, reports, tt.want...)
			})
		})
	}
}

// Backends that do not respond do not delay other checks: with 10,000 backends, half of them down, every failure and
// recovery is reported within the guaranteed time.
func TestDeadBackendsDelayNoOthers(t *testing.T) {
	const all = 10_000
	s := lb.CheckSpec{Type: lb.CheckTCP, Interval: 2 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3}
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex
		down, changed := map[netip.AddrPort]bool{}, map[netip.AddrPort]time.Time{}
		p := New(Options{Log: slog.New(slog.DiscardHandler), Report: func(h lb.Health) {
			mu.Lock()
			defer mu.Unlock()
			if h.State != lb.StateUnknown {
				changed[h.Key.Backend] = time.Now()
			}
		}})
		p.slots = newSlots(32768)
		p.make = func(c lb.Check) Checker {
			return checkerFunc(func(ctx context.Context) (Result, error) {
				mu.Lock()
				hangs := down[c.Target]
				mu.Unlock()
				if !hangs {
					return ok("fine")
				}
				<-ctx.Done()
				return Result{}, ctx.Err()
			})
		}
		must.Run(t, p.Run)
		list := checks(all, s)
		for i, c := range list {
			down[c.Target] = i%2 == 0
		}
		p.Put("web", list)
		time.Sleep(10 * time.Second)
		turn := func(what string, value bool, within time.Duration, which func(i int) bool) {
			mu.Lock()
			clear(changed)
			begin := time.Now()
			for i := range all {
				if which(i) {
					down[list[i].Target] = value
				}
			}
			mu.Unlock()
			time.Sleep(10 * time.Second)
			mu.Lock()
			defer mu.Unlock()
			var most time.Duration
			for i := range all {
				at, ok := changed[list[i].Target]
				must.Need(t, ok == which(i), "%s: backend %d reported: %t; want %t", what, i, ok, which(i))
				if ok {
					most = max(most, at.Sub(begin))
				}
			}
			must.True(t, most <= within, "%s: the last report is after %s; want %s", what, most, within)
		}
		promise := time.Duration(s.Fall)*s.Interval + s.Timeout
		turn("a quarter fails", true, promise, func(i int) bool { return i%4 == 1 })
		turn("it recovers", false, time.Duration(s.Rise)*s.Interval+s.Timeout, func(i int) bool { return i%4 == 1 })
	})
}

// Checks whose last probe failed may use only half of the slots.
func TestFailingProbesLeaveSlots(t *testing.T) {
	s := newSlots(4)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for range 2 {
		_, ok := s.take(t.Context(), true)
		must.Need(t, ok, "no slot for a failing probe")
	}
	_, ok := s.take(ended, true)
	must.True(t, !ok, "failing probes take more than half of the slots")
	for range 2 {
		_, ok := s.take(t.Context(), false)
		must.Need(t, ok, "no slot for another probe")
	}
	_, ok = s.take(ended, false)
	must.True(t, !ok, "more slots than four")
}

// A check whose port changes keeps the backend's state.
func TestChangedPortKeepsTheState(t *testing.T) {
	f := &fake{}
	bubble(t, f, func(t *testing.T, p *Prober, reports func() []string) {
		c := check(1, spec())
		c.Key.Port = lb.Port{Port: 80, Target: 80, Protocol: lb.TCP}
		p.Put("web", []lb.Check{c})
		time.Sleep(time.Second)
		f.set(errors.New("broken"))
		c.Key.Port.Target = 8080
		p.Put("web", []lb.Check{c})
		time.Sleep(1900 * time.Millisecond)
		wantReports(t, reports, "healthy: fine")
		h := p.Health()
		must.True(t, len(h) == 1 && h[0].Key == c.Key, "health %+v", h)
	})
}

// silentServer never responds. During the first probe, this process is stopped for 0.3 s.
type silentServer struct {
	probes  int
	trouble func() []string
	found   []string // findings at the second probe
}

func (s *silentServer) Probe(ctx context.Context) (Result, error) {
	s.probes++
	if s.probes == 1 {
		if err := exec.Command("sh", "-c", "kill -STOP $PPID; sleep 0.3; kill -CONT $PPID").Run(); err != nil {
			return Result{}, ownError{err}
		}
	} else if s.probes == 2 {
		s.found = s.trouble()
	}
	<-ctx.Done()
	return Result{}, ctx.Err()
}

// A timeout while this node was suspended says nothing about the server. The next timeout does.
func TestLateProbeIsInconclusive(t *testing.T) {
	reports := make(chan lb.Health, 8)
	p := New(Options{Report: func(h lb.Health) { reports <- h }, Log: slog.New(slog.DiscardHandler)})
	server := &silentServer{trouble: func() []string { return lbtest.Texts(p.Findings()) }}
	p.make = func(lb.Check) Checker { return server }
	p.Put("web", []lb.Check{{Key: lb.CheckKey{Service: "web"}, Presumed: true, Spec: lb.CheckSpec{
		Type: lb.CheckTCP, Interval: 500 * time.Millisecond, Timeout: 200 * time.Millisecond, Rise: 1, Fall: 1}}})
	stop := must.Run(t, p.Run)
	h := <-reports
	stop()
	must.True(t, h.State == lb.StateUnhealthy && h.Reason == "no response within 200ms" && server.probes >= 2,
		"%s (%s) after %d probes; want unhealthy, after the first", h.State, h.Reason, server.probes)
	want := "1 health checks are inconclusive, and their backends keep their state: " + errLate.Error()
	must.True(t, len(server.found) == 1 && server.found[0] == want,
		"problems after the first probe: %q; want %q", server.found, want)
}

// If this node was a little late, and most servers time out, each server is asked once more.
func TestServersAreAskedOnceMore(t *testing.T) {
	for _, tt := range []struct {
		late    time.Duration
		failing byte // of three servers
		answers bool // the second question
		want    int  // unhealthy servers
	}{
		{50 * time.Millisecond, 3, true, 0}, {50 * time.Millisecond, 3, false, 3}, {50 * time.Millisecond, 1, true, 1},
		{0, 3, true, 3},
	} {
		bubble(t, nil, func(t *testing.T, p *Prober, reports func() []string) {
			begin := time.Now()
			p.measure = func(time.Duration) func() time.Duration { return func() time.Duration { return tt.late } }
			p.make = func(c lb.Check) Checker {
				return checkerFunc(func(ctx context.Context) (Result, error) {
					end, _ := ctx.Deadline()
					answers := tt.answers && time.Until(end) <= c.Spec.Timeout/2
					if time.Since(begin) < 5*time.Second || c.Target.Addr().As4()[3] >= tt.failing || answers {
						return ok("fine")
					}
					<-ctx.Done()
					return Result{}, ctx.Err()
				})
			}
			p.Put("web", checks(3, spec()))
			time.Sleep(15 * time.Second)
			got := strings.Count(strings.Join(reports(), " "), "unhealthy")
			must.Row(t, fmt.Sprintf("%+v", tt), tt.want, got)
		})
	}
}
