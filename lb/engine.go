package lb

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"
)

// EngineOptions are the inputs of an Engine. All fields are required unless they may be nil.
type EngineOptions struct {
	Datapath  Datapath
	Announcer Announcer
	Prober    Prober
	// Sources names the sources that must be complete before anything is announced or removed.
	Sources []string
	// Settle bounds how long the first announcement waits for every check's first result.
	Settle time.Duration
	// Retry is the delay before a failed call is retried; it doubles with each failure, up to 32 × Retry.
	Retry time.Duration
	// Grace returns how long these announcers announce a route with a lower preference before a planned withdrawal,
	// because of a drain or because Run ends. Nil means 0.
	Grace func(by []AnnouncerKind) time.Duration
	// Withdraw bounds how long Run waits for the withdrawal of all routes after its context has ended.
	Withdraw time.Duration
	Log      *slog.Logger
	// Observe is called after every call to a consumer ("datapath", "announcer"), for metrics. It may be nil.
	Observe func(consumer string, took time.Duration, err error)
	// InEffect is called when a change takes effect, with the time since it was reported. It may be nil.
	InEffect func(e Effect, took time.Duration)
	// RouteChanged is called in the engine's goroutine after a VIP was announced, withdrawn, or announced with another
	// preference. It must not block. It may be nil.
	RouteChanged func(RouteStatus)
	// Boundary surrounds the planning of each service. It may be nil.
	Boundary *Boundary
}

// Engine turns Services and Health into calls to the datapath, the announcers and the prober. The rules are in Build
// (plan.go), Serve and Announce (order.go). All state belongs to the goroutine of Run; every other method posts to its
// mailbox and may be called from any goroutine, even before Run.
type Engine struct {
	o        EngineOptions
	checks   *slog.Logger // for results of health checks
	mail     mailbox
	services map[string]*entry
	stale    map[string]time.Time // services that need a new plan, and since when; zero while waiting for checks
	refused  map[string]refusal   // services with a frontend that belongs to another service
	awaited  map[string]struct{}  // sources that are not complete yet
	datapath *datapathState
	routes   *routes
	progress progress
	settleBy time.Time     // when the wait for first results ends; zero until every source is complete
	settled  chan struct{} // closed once every source is complete and every service has had a plan
	drains   Drains
}

// entry is one Service, its health and its plan.
type entry struct {
	service *Service // given with Drains applied
	health  map[CheckKey]Health
	plan    *Plan // nil until every check has had its first result
	given   *Service
}

// NewEngine returns an Engine that starts from what the datapath already holds.
func NewEngine(o EngineOptions) (*Engine, error) {
	held, err := o.Datapath.Held()
	if err != nil {
		return nil, fmt.Errorf("read the frontends in the kernel: %w", err)
	}
	if o.Observe == nil {
		o.Observe = func(string, time.Duration, error) {}
	}
	log := cmp.Or(o.Log, slog.New(slog.DiscardHandler))
	o.Log = log.With("component", "engine")
	e := &Engine{
		o: o, checks: log.With("component", "health"), mail: mailbox{wake: make(chan struct{}, 1)},
		services: map[string]*entry{}, stale: map[string]time.Time{}, refused: map[string]refusal{},
		awaited: map[string]struct{}{}, settled: make(chan struct{}),
	}
	for _, s := range o.Sources {
		e.awaited[s] = struct{}{}
	}
	vips := &vipTable{byAddr: map[vipKey]*vip{}, latency: latency{observe: o.InEffect}}
	e.progress.lacking, e.progress.refused = map[string]int{}, map[string]bool{}
	e.datapath = newDatapathState(vips, held, o.Retry, e.progress.count)
	e.routes = newRoutes(vips, o.Retry, log.With("component", "routes"))
	if o.Grace != nil {
		e.routes.leaving.grace = o.Grace
	}
	if o.RouteChanged != nil {
		e.routes.observe = func(r RouteStatus) {
			one := []RouteStatus{r}
			e.markIntended(one)
			o.RouteChanged(one[0])
		}
	}
	return e, nil
}

// Put implements Sink.
func (e *Engine) Put(s *Service) {
	at := time.Now()
	e.mail.post(func() { e.put(s, at) })
}

// Delete implements Sink.
func (e *Engine) Delete(name string) {
	at := time.Now()
	e.mail.post(func() { e.delete(name, at) })
}

// Complete implements Sink.
func (e *Engine) Complete(source string) { e.mail.post(func() { delete(e.awaited, source) }) }

// Health records a check result. The Prober calls it.
func (e *Engine) Health(h Health) {
	at := time.Now()
	e.mail.post(func() { e.healthChanged(h, at) })
}

// Faults records for each VIP why the datapath does not deliver its packets although it has the frontends, or "" if it
// does. A VIP with a fault is not announced.
func (e *Engine) Faults(changed map[netip.Addr]string) {
	at := time.Now()
	e.mail.post(func() {
		e.changeAt(at)
		e.routes.faultsChanged(changed)
	})
}

// Settled returns a channel that is closed once every source is complete and every service has had a plan. From then on
// Status is complete, and frontends from a previous run that belong to no service are removed.
func (e *Engine) Settled() <-chan struct{} { return e.settled }

// isSettled reports whether Settled is closed.
func (e *Engine) isSettled() bool {
	select {
	case <-e.settled:
		return true
	default:
		return false
	}
}

// Behind returns when the datapath began to lack a wanted frontend or an update of one, or zero if it lacks none. Its
// cost is constant. It fails only if ctx ends before the engine's goroutine has handled the query.
func (e *Engine) Behind(ctx context.Context) (time.Time, error) {
	return query(ctx, e, func() time.Time { return e.datapath.behind })
}

// query runs f in the engine's goroutine.
func query[T any](ctx context.Context, e *Engine, f func() T) (T, error) {
	result := make(chan T, 1)
	e.mail.post(func() { result <- f() })
	select {
	case v := <-result:
		return v, nil
	case <-ctx.Done():
		var zero T
		return zero, fmt.Errorf("query the engine: %w", ctx.Err())
	}
}

// Run runs until ctx ends, then announces every route with a lower preference for Grace and withdraws it. It returns
// nil or the error of the withdrawal.
func (e *Engine) Run(ctx context.Context) error {
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	var calls sync.WaitGroup
	end := ctx.Done()
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	finish := func() error {
		cancel()
		calls.Wait()
		return e.withdraw(context.WithoutCancel(ctx))
	}
	for {
		for _, f := range e.mail.take() {
			f()
		}
		now := time.Now()
		e.replan()
		e.logRefusals(now)
		e.serve(ctx, &calls, now)
		e.announce(ctx, &calls, now)
		e.progress.round(e.datapath.behind, e.isSettled() && e.datapath.idle(now))
		timer.Reset(e.nextWake(now))
		e.mail.done()
		if e.routes.left(now) {
			return finish()
		}
		select {
		case <-end:
			if end = nil; !e.routes.leave(time.Now()) {
				return finish()
			}
		case <-e.mail.wake:
		case <-timer.C:
		}
	}
}

// markStale records that a service needs a new plan because of a change that was reported at this time.
func (e *Engine) markStale(name string, at time.Time) {
	if e.stale[name].IsZero() {
		e.stale[name] = at
	}
}

// changeAt sets when the change now being handled was reported.
func (e *Engine) changeAt(at time.Time) { e.datapath.vips.latency.at = at }

func (e *Engine) put(s *Service, at time.Time) {
	en, ok := e.services[s.Name]
	if ok && en.service.Source != s.Source {
		e.o.Log.Error("service refused", "service", s.Name, "reason", "its name is taken",
			"source", s.Source, "taken_by", en.service.Source)
		return
	}
	if !ok {
		en = &entry{health: map[CheckKey]Health{}}
	}
	checks, health, fine := e.checksOf(s, en)
	switch {
	case !fine && ok:
		return // the service stays as it was
	case !fine:
		s = s.Freeze()
	}
	e.services[s.Name] = en
	en.given, en.service, en.health = s, e.drains.applied(s), health
	e.o.Prober.Put(s.Name, checks)
	e.markStale(s.Name, at)
}

func (e *Engine) delete(name string, at time.Time) {
	en, ok := e.services[name]
	if !ok {
		return
	}
	delete(e.services, name)
	delete(e.stale, name)
	e.o.Prober.Put(name, nil)
	if en.plan != nil {
		e.changeAt(at)
		e.adopt(en, nil)
	}
}

func (e *Engine) healthChanged(h Health, at time.Time) {
	en, ok := e.services[h.Key.Service]
	if !ok {
		return
	}
	before, known := en.health[h.Key]
	en.health[h.Key] = h
	if !known || before.State != h.State || before.Weight != h.Weight {
		e.markStale(h.Key.Service, at) // the plan does not depend on the reason, which may change with every probe
	}
	if before.State != h.State {
		log := e.checks
		if (h.Key.Port != Port{}) {
			log = log.With("port", h.Key.Port.Name())
		}
		say := log.Info
		if h.State == StateUnhealthy {
			say = log.Warn
		}
		say("backend "+h.State.String(), "service", h.Key.Service, "backend", h.Key.BackendName(),
			"reason", h.Reason)
	}
}

// adopt replaces the plan of a service. plan may be nil.
func (e *Engine) adopt(en *entry, plan *Plan) {
	old, name := en.plan, en.service.Name
	en.plan = plan
	var refused []Frontend
	if plan != nil {
		refused = e.datapath.want(plan)
		e.progress.planned(name, len(refused) > 0)
	}
	e.refuse(name, refused)
	if old != nil && e.datapath.drop(old, plan) {
		for other := range e.refused { // it may get the frontend now
			e.mail.post(func() { e.markStale(other, time.Now()) })
		}
	}
	if plan == nil {
		e.progress.forget(name)
		e.o.Boundary.Report(PartPlan, name, "")
		e.o.Boundary.Report(PartRoom, name, "")
	}
	e.routes.adopt(old, plan)
}

// serve starts a call to the datapath if there is a delta and no call is in flight.
func (e *Engine) serve(ctx context.Context, calls *sync.WaitGroup, now time.Time) {
	delta, ok := e.datapath.next(now, e.isSettled())
	if !ok {
		return
	}
	calls.Go(func() {
		start := time.Now()
		failed := e.o.Datapath.Apply(ctx, delta)
		e.o.Observe("datapath", time.Since(start), firstError(failed))
		e.mail.post(func() {
			for f, err := range failed {
				if !errors.Is(err, ErrRefused) {
					e.o.Log.Error("frontend not active", "frontend", f, "err", err)
				}
			}
			e.datapath.complete(delta, failed, time.Now())
			e.reportRoom(delta)
		})
	})
}

// announce starts a call to the announcers if the set has changed and no call is in flight. The first call waits until
// the engine has settled and the datapath has tried every frontend: with graceful restart, a router drops the routes
// that are missing from the first set after a restart (RFC 4724).
func (e *Engine) announce(ctx context.Context, calls *sync.WaitGroup, now time.Time) {
	if !e.routes.started && !(e.isSettled() && e.datapath.idle(now)) {
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
		e.mail.post(func() { e.routes.complete(err, time.Now()) })
	})
}

// nextWake returns how long Run may sleep if no mail arrives.
func (e *Engine) nextWake(now time.Time) time.Duration {
	wake := now.Add(time.Hour)
	for _, t := range []time.Time{
		e.datapath.retryAt(), e.routes.retryAt, e.settleBy, e.routes.leaving.next(), e.nextRefusal(),
	} {
		if t.After(now) && t.Before(wake) {
			wake = t
		}
	}
	return wake.Sub(now) + time.Millisecond
}

func firstError(failed map[Frontend]error) error {
	for _, err := range failed {
		return err
	}
	return nil
}
