package healthd

import (
	"context"
	"hash/fnv"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/lb"
)

// Options configures a Prober. Registerer may be nil; Way may be nil when no check has a VIP.
type Options struct {
	// Report is called on every change. It is never called for one check from two goroutines at once, and never after
	// Put has removed the check.
	Report func(lb.Health)
	// Way is called before each probe of a check with a VIP.
	Way        func(lb.Check) (Way, error)
	Log        *slog.Logger
	Registerer prometheus.Registerer
}

// Prober implements lb.Prober.
type Prober struct {
	o       Options
	metrics *metrics
	running chan struct{} // one element for each running probe
	make    func(lb.Check) Checker

	mu     sync.Mutex                       // guards all below
	ctx    context.Context                  // of Run; nil before
	checks map[string]map[lb.CheckKey]*loop // by service
	loops  sync.WaitGroup
}

// maxProbes is how many probes run at once.
const maxProbes = 1024

// New returns a Prober that starts no probe before Run.
func New(o Options) *Prober {
	p := &Prober{
		o: o, metrics: newMetrics(o.Registerer), running: make(chan struct{}, maxProbes),
		checks: map[string]map[lb.CheckKey]*loop{},
	}
	p.make = func(c lb.Check) Checker { return checkers[c.Spec.Type](target{c, o.Way}) }
	return p
}

// loop is one check and its state.
type loop struct {
	check  lb.Check
	cancel context.CancelFunc // nil before Run
	mu     sync.Mutex         // guards all below; held while reporting
	ended  bool
	health lb.Health
	streak int // consecutive probes whose result differs from the state
}

// Put implements lb.Prober. An unchanged check continues; a changed one starts anew and keeps its state until Rise or
// Fall probes contradict it.
func (p *Prober) Put(service string, checks []lb.Check) {
	p.mu.Lock()
	old := p.checks[service]
	now := make(map[lb.CheckKey]*loop, len(checks))
	for _, c := range checks {
		l := &loop{check: c, health: lb.Health{Key: c.Key, Weight: -1}}
		if was := old[c.Key]; was != nil {
			if reflect.DeepEqual(was.check, c) {
				now[c.Key] = was
				delete(old, c.Key)
				continue
			}
			was.mu.Lock()
			l.health = was.health
			was.mu.Unlock()
		}
		now[c.Key] = l
		p.start(l)
	}
	p.checks[service] = now
	if len(now) == 0 {
		delete(p.checks, service)
	}
	p.mu.Unlock()
	// Outside the lock: a report in progress may wait for the caller of Put.
	for _, l := range old {
		l.end()
	}
	if len(checks) == 0 {
		p.metrics.forget(service)
	}
}

// start runs l if Run runs; p.mu is held.
func (p *Prober) start(l *loop) {
	if p.ctx == nil {
		return
	}
	ctx, cancel := context.WithCancel(p.ctx)
	l.cancel = cancel
	p.loops.Go(func() { p.run(ctx, l) })
}

// end stops l: after it returns, nothing more is reported.
func (l *loop) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	if l.cancel != nil {
		l.cancel()
	}
}

// Run probes until ctx ends and every probe has ended.
func (p *Prober) Run(ctx context.Context) error {
	p.mu.Lock()
	p.ctx = ctx
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
	checker := p.make(l.check)
	interval := l.check.Spec.Interval
	phase := phaseOf(l.check.Key)
	// A start waits for the first result, so the first probe is delayed by a tenth of the interval at most.
	if !sleep(ctx, time.Duration(phase*float64(min(interval/10, 200*time.Millisecond)))) {
		return
	}
	next := time.Now()
	for {
		p.probe(ctx, l, checker)
		// Jitter only shortens the gap: checks that coincide drift apart, and no report is late.
		next = next.Add(interval - time.Duration(rand.Float64()*float64(interval)/20))
		if now := time.Now(); next.Before(now) {
			next = now
		}
		if !sleep(ctx, time.Until(next)) {
			return
		}
	}
}

// phaseOf returns the position of a check in its interval, in [0, 1), derived from its key.
func phaseOf(k lb.CheckKey) float64 {
	h := fnv.New32a()
	h.Write([]byte(k.Service))
	h.Write([]byte(k.Backend.String()))
	return float64(h.Sum32()) / (1 << 32)
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// probe runs one probe and applies its result.
func (p *Prober) probe(ctx context.Context, l *loop, checker Checker) {
	select {
	case p.running <- struct{}{}:
		defer func() { <-p.running }()
	case <-ctx.Done():
		return
	}
	bounded, cancel := context.WithTimeout(ctx, l.check.Spec.Timeout)
	defer cancel()
	start := time.Now()
	result, err := checker.Probe(bounded)
	if ctx.Err() != nil {
		return // the check was stopped: the error is not that of the backend
	}
	if err != nil {
		result = Result{Reason: reason(err, l.check.Spec.Timeout), Weight: -1, Err: err}
	}
	p.metrics.observe(l.check.Key.Service, time.Since(start), err == nil)
	l.apply(p.o.Report, result, err == nil)
}

// apply counts a result towards Rise or Fall, and reports a change of state, weight or reason.
func (l *loop) apply(report func(lb.Health), r Result, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return
	}
	state, need := lb.StateUnhealthy, l.check.Spec.Fall
	if ok {
		state, need = lb.StateHealthy, l.check.Spec.Rise
	}
	h := &l.health
	if h.State == state {
		l.streak = 0
		changed := h.Weight != r.Weight || h.Reason != r.Reason
		h.Weight, h.Reason, h.Err = r.Weight, r.Reason, r.Err
		if changed {
			report(*h)
		}
		return
	}
	if l.streak++; h.State != lb.StateUnknown && l.streak < need {
		return
	}
	l.streak = 0
	h.State, h.Weight, h.Reason, h.Err, h.At = state, r.Weight, r.Reason, r.Err, time.Now()
	report(*h)
}
