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

// Options is everything a Prober needs. Registerer may be nil, and Way when no check has a VIP.
type Options struct {
	// Report is told of every change. It is never called for one check from two goroutines at once, and never after
	// Put has ended the check.
	Report func(lb.Health)
	// Way is asked before each probe of a check with a VIP.
	Way        func(lb.Check) (Way, error)
	Log        *slog.Logger
	Registerer prometheus.Registerer
}

// Prober implements lb.Prober.
type Prober struct {
	o       Options
	metrics *metrics
	slots   chan struct{} // one for each probe that may run at once
	make    func(lb.Check) Checker

	mu     sync.Mutex                       // guards all below
	ctx    context.Context                  // of Run; nil before
	checks map[string]map[lb.CheckKey]*loop // by service
	loops  sync.WaitGroup
}

// maxProbes is how many probes run at once.
const maxProbes = 1024

// New returns a Prober that asks nothing until Run.
func New(o Options) *Prober {
	p := &Prober{
		o: o, metrics: newMetrics(o.Registerer), slots: make(chan struct{}, maxProbes),
		checks: map[string]map[lb.CheckKey]*loop{},
	}
	p.make = func(c lb.Check) Checker { return checkers[c.Spec.Type](target{c, o.Way}) }
	return p
}

// loop is one check and what is known of it.
type loop struct {
	check  lb.Check
	cancel context.CancelFunc // nil before it runs
	mu     sync.Mutex         // guards all below; held while reporting
	ended  bool
	health lb.Health
	streak int // probes in a row that contradict the state
}

// Put implements lb.Prober. A check that is the same goes on as it was; one that changed starts anew and keeps its
// state until its first answer.
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
	// Outside the lock: a report under way may be waiting for whoever called Put.
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

// end makes sure that nothing more is reported.
func (l *loop) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	if l.cancel != nil {
		l.cancel()
	}
}

// Run asks until ctx ends and every probe has.
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
	p.ctx = nil // nothing starts after this
	p.mu.Unlock()
	p.loops.Wait()
	return nil
}

// run probes at the check's own rhythm.
func (p *Prober) run(ctx context.Context, l *loop) {
	checker := p.make(l.check)
	interval := l.check.Spec.Interval
	phase := phaseOf(l.check.Key)
	// The first verdict is what a start waits for: it comes within a tenth of the interval, at most 200 ms.
	if !sleep(ctx, time.Duration(phase*float64(min(interval/10, 200*time.Millisecond)))) {
		return
	}
	next := time.Now()
	for {
		p.probe(ctx, l, checker)
		// Jitter only ever shortens a gap: checks that fall together drift apart, and no verdict comes late.
		next = next.Add(interval - time.Duration(rand.Float64()*float64(interval)/20))
		if now := time.Now(); next.Before(now) {
			next = now
		}
		if !sleep(ctx, time.Until(next)) {
			return
		}
	}
}

// phaseOf is where in an interval a check has its place, 0 to 1.
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

// probe asks once and takes the answer into account.
func (p *Prober) probe(ctx context.Context, l *loop, checker Checker) {
	select {
	case p.slots <- struct{}{}:
		defer func() { <-p.slots }()
	case <-ctx.Done():
		return
	}
	bounded, cancel := context.WithTimeout(ctx, l.check.Spec.Timeout)
	defer cancel()
	start := time.Now()
	result, err := checker.Probe(bounded)
	if ctx.Err() != nil {
		return // ended, not failed
	}
	if err != nil {
		result = Result{Reason: reason(err, l.check.Spec.Timeout), Weight: -1, Err: err}
	}
	p.metrics.observe(l.check.Key.Service, time.Since(start), err == nil)
	l.take(p.o.Report, result, err == nil)
}

// take applies rise and fall, and reports what changed.
func (l *loop) take(report func(lb.Health), r Result, well bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return
	}
	state, need := lb.StateUnhealthy, l.check.Spec.Fall
	if well {
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
