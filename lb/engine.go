package lb

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// EngineOptions is everything an Engine needs. All fields but Observe are required.
type EngineOptions struct {
	Datapath  Datapath
	Announcer Announcer
	Prober    Prober
	// Sources are the names that must say Complete before anything is announced or removed.
	Sources []string
	// Settle bounds how long the first announcement waits for the first answer of every check.
	Settle time.Duration
	// Retry is the delay before something that failed is tried again; it doubles up to 32 times Retry.
	Retry time.Duration
	// Withdraw bounds how long Run waits for the withdrawal of all routes after its context has ended.
	Withdraw time.Duration
	Log      *slog.Logger
	// Observe is told of every call to a consumer ("datapath", "announcer"), for metrics. It may be nil.
	Observe func(consumer string, took time.Duration, err error)
}

// Engine turns Services and Health into what the datapath, the announcers and the prober are told. It has no rules of
// its own: those are Build (plan.go), Serve and Announce (order.go). All state belongs to the goroutine of Run; every
// other method posts to its mailbox and may be called from anywhere, before Run too.
type Engine struct {
	o        EngineOptions
	mail     mailbox
	services map[string]*entry
	stale    map[string]struct{} // services to plan again
	awaited  map[string]struct{} // sources that are not complete yet
	kernel   *kernel
	routes   *routes
	settleBy time.Time // when the wait for first answers ends; zero until every source is complete
	settled  bool      // every source is complete and every service has had a plan
	drains   Drains
}

// entry is what the engine knows of one Service.
type entry struct {
	service *Service
	health  map[CheckKey]Health
	plan    *Plan // nil until the first answer of every check
	refused bool  // another service has one of its frontends
}

// NewEngine returns an Engine that starts from what the datapath already holds.
func NewEngine(o EngineOptions) (*Engine, error) {
	held, err := o.Datapath.Held()
	if err != nil {
		return nil, fmt.Errorf("read what the kernel already serves: %w", err)
	}
	if o.Observe == nil {
		o.Observe = func(string, time.Duration, error) {}
	}
	e := &Engine{
		o: o, mail: mailbox{wake: make(chan struct{}, 1)},
		services: map[string]*entry{}, stale: map[string]struct{}{}, awaited: map[string]struct{}{},
	}
	for _, s := range o.Sources {
		e.awaited[s] = struct{}{}
	}
	vips := &vipTable{byAddr: map[vipKey]*vip{}}
	e.kernel = newKernel(vips, held, o.Retry)
	e.routes = newRoutes(vips, o.Retry, o.Log)
	return e, nil
}

// Put implements Sink.
func (e *Engine) Put(s *Service) { e.mail.post(func() { e.put(s) }) }

// Delete implements Sink.
func (e *Engine) Delete(name string) { e.mail.post(func() { e.delete(name) }) }

// Complete implements Sink.
func (e *Engine) Complete(source string) { e.mail.post(func() { delete(e.awaited, source) }) }

// Health takes what a check found. It is what the Prober reports to.
func (e *Engine) Health(h Health) { e.mail.post(func() { e.healthChanged(h) }) }

// Status returns what the engine knows now. It fails only when ctx ends first.
func (e *Engine) Status(ctx context.Context) (Status, error) {
	answer := make(chan Status, 1)
	e.mail.post(func() { answer <- e.status() })
	select {
	case s := <-answer:
		return s, nil
	case <-ctx.Done():
		return Status{}, fmt.Errorf("ask the engine: %w", ctx.Err())
	}
}

// Run works until ctx ends, then withdraws every route and returns nil, or what kept it from withdrawing.
func (e *Engine) Run(ctx context.Context) error {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var calls sync.WaitGroup
	for {
		for _, f := range e.mail.take() {
			f()
		}
		now := time.Now()
		e.replan()
		e.serve(ctx, &calls, now)
		e.announce(ctx, &calls, now)
		timer.Reset(e.nextWake(now))
		select {
		case <-ctx.Done():
			calls.Wait()
			return e.withdraw(context.WithoutCancel(ctx))
		case <-e.mail.wake:
		case <-timer.C:
		}
	}
}

func (e *Engine) put(s *Service) {
	en, ok := e.services[s.Name]
	if ok && en.service.Source != s.Source {
		e.o.Log.Error("service refused", "service", s.Name, "reason", "its name is taken",
			"source", s.Source, "taken_by", en.service.Source)
		return
	}
	if !ok {
		en = &entry{health: map[CheckKey]Health{}}
		e.services[s.Name] = en
	}
	en.service = s
	checks := Checks(s)
	keep := make(map[CheckKey]Health, len(checks))
	for _, c := range checks {
		if h, ok := en.health[c.Key]; ok {
			keep[c.Key] = h
		}
	}
	en.health = keep
	e.o.Prober.Put(s.Name, checks)
	e.stale[s.Name] = struct{}{}
}

func (e *Engine) delete(name string) {
	en, ok := e.services[name]
	if !ok {
		return
	}
	delete(e.services, name)
	delete(e.stale, name)
	e.o.Prober.Put(name, nil)
	if en.plan != nil {
		e.adopt(en, nil)
	}
}

func (e *Engine) healthChanged(h Health) {
	en, ok := e.services[h.Key.Service]
	if !ok {
		return
	}
	before, known := en.health[h.Key]
	en.health[h.Key] = h
	e.stale[h.Key.Service] = struct{}{}
	if !known || before.State != h.State {
		e.o.Log.Info("backend "+h.State.String(), "service", h.Key.Service, "backend", h.Key.Backend, "reason", h.Reason)
	}
}

// replan builds the plans of services whose wish or health changed.
func (e *Engine) replan() {
	for name := range e.stale {
		en, ok := e.services[name]
		if !ok {
			delete(e.stale, name)
			continue
		}
		if en.plan == nil && !answered(en) && !e.settleTimeout() {
			continue // what an earlier run left in the kernel goes on until we know better
		}
		delete(e.stale, name)
		e.adopt(en, Build(en.service, en.health, e.drains))
	}
	e.settled = e.settled || (len(e.awaited) == 0 && len(e.stale) == 0)
}

// answered reports whether every check of the service has answered at least once.
func answered(en *entry) bool { return len(en.health) == len(Checks(en.service)) }

// settleTimeout reports whether the wait for first answers is over.
func (e *Engine) settleTimeout() bool {
	if len(e.awaited) == 0 && e.settleBy.IsZero() {
		e.settleBy = time.Now().Add(e.o.Settle)
	}
	return !e.settleBy.IsZero() && time.Now().After(e.settleBy)
}

// adopt replaces the plan of a service by the next one, or by none.
func (e *Engine) adopt(en *entry, plan *Plan) {
	old := en.plan
	en.plan = plan
	en.refused = false
	if plan != nil {
		for _, f := range e.kernel.want(plan) {
			en.refused = true
			e.o.Log.Error("frontend refused", "service", plan.Service.Name, "frontend", f, "reason", "another service has it")
		}
	}
	if old != nil && e.kernel.drop(old, plan) {
		for name, other := range e.services { // who had to do without the freed frontends gets them now
			if other.refused {
				e.mail.post(func() { e.stale[name] = struct{}{} })
			}
		}
	}
	e.routes.adopt(old, plan)
}

// serve starts a call to the datapath if there is something to do and none is under way.
func (e *Engine) serve(ctx context.Context, calls *sync.WaitGroup, now time.Time) {
	delta, ok := e.kernel.next(now, e.settled)
	if !ok {
		return
	}
	calls.Go(func() {
		start := time.Now()
		failed := e.o.Datapath.Apply(ctx, delta)
		e.o.Observe("datapath", time.Since(start), firstError(failed))
		e.mail.post(func() {
			for f, err := range failed {
				e.o.Log.Error("frontend not in force", "frontend", f, "err", err)
			}
			e.kernel.applied(delta, failed, time.Now())
			e.routes.kernelChanged()
		})
	})
}

// announce starts a call to the announcers if there is something to say and none is under way. The first one waits
// until all is known and in force: a router that keeps our routes while we restart drops those missing from it.
func (e *Engine) announce(ctx context.Context, calls *sync.WaitGroup, now time.Time) {
	if !e.routes.started && !(e.settled && e.kernel.quiet(now)) {
		return
	}
	set, ok := e.routes.next(now)
	if !ok {
		return
	}
	calls.Go(func() {
		start := time.Now()
		err := e.o.Announcer.Set(ctx, set)
		e.o.Observe("announcer", time.Since(start), err)
		e.mail.post(func() { e.routes.announced(err, time.Now()) })
	})
}

// nextWake returns how long Run may sleep when nothing happens.
func (e *Engine) nextWake(now time.Time) time.Duration {
	wake := now.Add(time.Hour)
	for _, t := range []time.Time{e.kernel.retryAt(), e.routes.retryAt, e.settleBy} {
		if t.After(now) && t.Before(wake) {
			wake = t
		}
	}
	return wake.Sub(now) + time.Millisecond
}

func (e *Engine) withdraw(ctx context.Context) error {
	if !e.routes.started {
		return nil // nothing was announced
	}
	ctx, cancel := context.WithTimeout(ctx, e.o.Withdraw)
	defer cancel()
	if err := e.o.Announcer.Set(ctx, nil); err != nil {
		return fmt.Errorf("withdraw every route: %w", err)
	}
	e.o.Log.Info("every route withdrawn")
	return nil
}

func firstError(failed map[Frontend]error) error {
	for _, err := range failed {
		return err
	}
	return nil
}
