package healthd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/lb"
)

// Options configures a Prober. Registerer may be nil. Way may be nil if no check has a VIP.
type Options struct {
	// Report is called on every change. For one check, calls never overlap, and there are none after Put has removed
	// it.
	Report func(lb.Health)
	// Way is called before each probe of a check with a VIP.
	Way func(lb.Check) (Way, error)
	// Earlier returns the health that a check had when the previous run ended. That health is reported before the first
	// probe, and only Rise or Fall probes change it. It may be nil.
	Earlier func(lb.CheckKey) (lb.Health, bool)
	// Boundary wraps each probe. It may be nil.
	Boundary   *lb.Boundary
	Log        *slog.Logger
	Registerer prometheus.Registerer
}

// Prober implements lb.Prober.
type Prober struct {
	o       Options
	metrics *metrics
	slots   slots
	own     ownTrouble
	changes atomic.Uint64 // state changes of all checks
	failing atomic.Int64  // checks whose last probe failed
	make    func(lb.Check) Checker
	measure func(timeout time.Duration) (stop func() time.Duration)

	mu     sync.Mutex                       // guards all below
	ctx    context.Context                  // of Run; nil before
	epoch  time.Time                        // the origin of the schedule
	count  int                              // number of checks
	checks map[string]map[lb.CheckKey]*loop // by service
	loops  sync.WaitGroup
}

func New(o Options) *Prober {
	p := &Prober{
		o: o, metrics: newMetrics(o.Registerer), slots: newSlots(maxProbes()),
		own: ownTrouble{log: o.Log}, checks: map[string]map[lb.CheckKey]*loop{}, measure: measureLateness,
	}
	p.make = func(c lb.Check) Checker { return checkers[c.Spec.Type](target{c, o.Way, o.Log}) }
	return p
}

type loop struct {
	check   lb.Check
	cancel  context.CancelFunc // nil before Run
	failing bool               // whether the last probe failed; owned by the loop's goroutine; see Prober.setFailing
	warned  time.Time          // time of the last warning about a weight; owned by the loop's goroutine
	mu      sync.Mutex         // guards all below; held while reporting
	ended   bool
	health  lb.Health
	times   times
	streak  int  // consecutive probes that contradict the state in the same way
	working bool // whether these probes succeeded
	earlier bool // health is from the previous run and not reported yet
}

// Put implements lb.Prober. An unchanged check continues. A changed check restarts and keeps its state until Rise or
// Fall probes contradict it.
func (p *Prober) Put(service string, checks []lb.Check) {
	p.mu.Lock()
	old := p.checks[service]
	p.count -= len(old)
	now := make(map[lb.CheckKey]*loop, len(checks))
	earlier := lb.Earlier(old, checks)
	for _, c := range checks {
		l := &loop{check: c, health: lb.Health{Key: c.Key, Weight: -1}}
		was := old[c.Key]
		if k, changed := earlier[c.Key]; changed {
			was = old[k]
		}
		if was != nil {
			if reflect.DeepEqual(was.check, c) {
				now[c.Key] = was
				delete(old, c.Key)
				continue
			}
			was.mu.Lock()
			l.health, l.earlier = was.health, was.earlier
			was.mu.Unlock()
			l.health.Key = c.Key
		} else if c.Presumed {
			l.health.State = lb.StateHealthy
		} else if p.o.Earlier != nil {
			if h, ok := p.o.Earlier(c.Key); ok {
				l.health, l.earlier = h, true
			}
		}
		now[c.Key] = l
		p.start(l)
	}
	p.checks[service] = now
	p.count += len(now)
	if len(now) == 0 {
		delete(p.checks, service)
	}
	p.mu.Unlock()
	// Not under the lock, because a report in progress may wait for the caller of Put.
	for key, l := range old {
		l.end()
		if now[key] == nil {
			p.own.forget(key)
		}
	}
	if len(checks) == 0 {
		p.metrics.forget(service)
	}
}

// start starts l if Run is running. p.mu is held.
func (p *Prober) start(l *loop) {
	if p.ctx == nil {
		return
	}
	ctx, cancel := context.WithCancel(p.ctx)
	l.cancel = cancel
	p.loops.Go(func() { p.run(ctx, l) })
}

// end stops l. After it returns, l reports nothing.
func (l *loop) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	if l.cancel != nil {
		l.cancel()
	}
}

// Run probes until ctx ends, and returns once every probe has ended.
func (p *Prober) Run(ctx context.Context) error {
	p.mu.Lock()
	p.ctx, p.epoch = ctx, time.Now()
	for _, checks := range p.checks {
		for _, l := range checks {
			p.start(l)
		}
	}
	p.mu.Unlock()
	<-ctx.Done()
	p.mu.Lock()
	p.ctx = nil // no check starts after this
	p.mu.Unlock()
	p.loops.Wait()
	return nil
}

// run probes once per interval until ctx ends.
func (p *Prober) run(ctx context.Context, l *loop) {
	var checker Checker
	object := l.check.Key.Service + " " + l.check.Key.BackendName()
	if !p.o.Boundary.Do(lb.PartProbe, object, func() { checker = p.make(l.check) }) {
		return // the backend keeps its state until the check is replaced
	}
	interval := l.check.Spec.Interval
	next := func(t time.Time) time.Time { return slotAfter(t, p.epoch, phaseOf(l.check.Key), interval) }
	l.mu.Lock()
	if l.earlier && !l.ended {
		p.o.Report(l.health)
		l.earlier = false
	}
	p.setFailing(l, l.health.State == lb.StateUnhealthy || l.health.State == lb.StateDraining)
	defer p.setFailing(l, false)
	known := l.health.State != lb.StateUnknown
	l.mu.Unlock()
	// At startup, announcements wait for the first result of a check without a state, so that probe does not wait for
	// its phase.
	first := time.Duration(phaseOf(l.check.Key) * float64(p.firstWindow(interval)))
	if known {
		first = time.Until(next(time.Now()))
	}
	if !sleep(ctx, first) {
		return
	}
	for at := time.Now(); ; {
		p.probe(ctx, l, checker, at)
		// A probe with a timeout of one interval ends just after the next slot, which must not be skipped.
		if at = next(at); time.Since(at) > interval/2 {
			at = next(time.Now())
		}
		if !sleep(ctx, time.Until(at)) {
			return
		}
	}
}

func (p *Prober) setFailing(l *loop, failing bool) {
	if failing != l.failing {
		l.failing = failing
		p.failing.Add(map[bool]int64{true: 1, false: -1}[failing])
	}
}

// ask runs one probe.
func (p *Prober) ask(ctx context.Context, l *loop, checker Checker) (result Result, err error) {
	err = errPanicked
	object := l.check.Key.Service + " " + l.check.Key.BackendName()
	p.o.Boundary.Do(lb.PartProbe, object, func() { result, err = checker.Probe(ctx) })
	return result, err
}

// errPanicked is the result of a probe that panicked. The backend keeps its state.
var errPanicked = ownError{errors.New("the check itself failed; see the log")}

func (p *Prober) probe(ctx context.Context, l *loop, checker Checker, due time.Time) {
	release, ok := p.slots.take(ctx, l.failing)
	if !ok {
		return
	}
	defer release()
	if late := time.Since(due); late > l.check.Spec.Interval/10 {
		p.metrics.late.Inc()
	}
	bounded, cancel := context.WithTimeout(ctx, l.check.Spec.Timeout)
	defer cancel()
	start, lateness := time.Now(), p.measure(l.check.Spec.Timeout)
	answersItself := ownAddress(bounded, l.check)
	result, err := p.ask(bounded, l, checker)
	if late := lateness(); err != nil && isTimeout(err) && p.isLate(ctx, l, checker, late) {
		err = errLate
	}
	if ctx.Err() != nil {
		return // the check was stopped, so the backend did not cause the error
	}
	p.setFailing(l, err != nil)
	service := l.check.Key.Service
	if err != nil && inconclusive(err) {
		p.metrics.probes.WithLabelValues(service, "inconclusive").Inc()
		why := reason(err, l.check.Spec.Timeout)
		p.own.record(l.check.Key, why)
		l.undecided(p.o.Report, why)
		return
	}
	p.own.forget(l.check.Key)
	if err != nil {
		result = Result{Reason: reason(err, l.check.Spec.Timeout), Weight: -1, Err: cause(err)}
	}
	if answersItself() && errors.Is(result.Err, context.DeadlineExceeded) {
		result.Reason += fmt.Sprintf(", but the server answers at its own address: is %s on its interface lo?",
			l.check.VIP)
	}
	took := time.Since(start)
	p.metrics.observe(service, took, err == nil)
	l.observe(took)
	p.warnOfWeight(l, result.Weight)
	if l.apply(p.o.Report, result, stateFor(err)) {
		p.changes.Add(1)
		if err != nil {
			p.metrics.flaps.WithLabelValues(service).Inc()
		}
	}
}

// warnOfWeight warns that a backend may be broken or compromised if the weight it reports has changed by more than a
// factor of two. It warns at most once a minute.
func (p *Prober) warnOfWeight(l *loop, weight int) {
	was := l.health.Weight // needs no lock: only this goroutine writes it
	if low, high := min(was, weight), max(was, weight); low < 0 || high <= 2*low || time.Since(l.warned) < logInterval {
		return
	}
	l.warned = time.Now()
	p.o.Log.Warn("backend reports a new weight", "service", l.check.Key.Service,
		"backend", l.check.Key.BackendName(), "was", was, "weight", weight)
}

// apply counts a result towards Rise or Fall and reports changes of state, weight or reason. It returns whether the
// state changed.
func (l *loop) apply(report func(lb.Health), r Result, state lb.State) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return false
	}
	h, need := &l.health, l.check.Spec.Fall
	if state == lb.StateHealthy || h.State == lb.StateUnhealthy {
		need = l.check.Spec.Rise
	}
	if h.State == state {
		l.streak = 0
		changed := h.Weight != r.Weight || h.Reason != r.Reason
		h.Weight, h.Reason, h.Err = r.Weight, r.Reason, r.Err
		if changed {
			report(*h)
		}
		return false
	}
	if working := state == lb.StateHealthy; working != l.working {
		l.working, l.streak = working, 0
	}
	l.streak++
	switch {
	case state == lb.StateHealthy && h.State == lb.StateUnknown:
	case l.streak >= need:
	case h.State == lb.StateUnknown && h.Reason != r.Reason:
		h.Reason, h.Err = r.Reason, r.Err
		report(*h) // startup need not wait for this backend if others suffice
		return false
	default:
		return false
	}
	l.streak = 0
	h.State, h.Weight, h.Reason, h.Err, h.At = state, r.Weight, r.Reason, r.Err, time.Now()
	report(*h)
	return true
}

// undecided reports why a check has no state yet.
func (l *loop) undecided(report func(lb.Health), why string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h := &l.health; !l.ended && h.State == lb.StateUnknown && h.Reason != why {
		h.Reason = why
		report(*h)
	}
}

// Health returns the health of every check that has a state, in no particular order.
func (p *Prober) Health() []lb.Health {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []lb.Health
	for _, checks := range p.checks {
		for _, l := range checks {
			l.mu.Lock()
			if l.health.State != lb.StateUnknown {
				all = append(all, l.health)
			}
			l.mu.Unlock()
		}
	}
	return all
}

// Changes returns a number that increases with every state change.
func (p *Prober) Changes() uint64 { return p.changes.Load() }
