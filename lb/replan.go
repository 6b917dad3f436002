package lb

import (
	"slices"
	"time"
)

// checksOf returns the checks of s and their last known health. It changes nothing.
func (e *Engine) checksOf(s *Service, en *entry) (checks []Check, health map[CheckKey]Health, ok bool) {
	health = map[CheckKey]Health{}
	ok = e.o.Boundary.Do(PartPlan, s.Name, func() {
		checks = Checks(s)
		earlier := Earlier(en.health, checks)
		for _, c := range checks {
			h, ok := en.health[c.Key]
			if k, changed := earlier[c.Key]; changed {
				h, ok = en.health[k], true
				h.Key = c.Key
			}
			if !ok && c.Presumed {
				h, ok = Health{Key: c.Key, State: StateHealthy, Weight: -1}, true
			}
			if ok {
				health[c.Key] = h
			}
		}
	})
	if !ok {
		return nil, map[CheckKey]Health{}, false
	}
	return checks, health, true
}

// replan builds plans for services that changed, or whose health or drain changed.
func (e *Engine) replan() {
	for name, at := range e.stale {
		en, ok := e.services[name]
		if !ok {
			delete(e.stale, name)
			continue
		}
		plan, wait := e.build(en)
		if wait {
			e.stale[name] = time.Time{}
			continue // frontends of a previous run stay in the kernel until there is a health state
		}
		delete(e.stale, name)
		if plan != en.plan {
			e.changeAt(at)
			e.adopt(en, plan)
		}
	}
	if len(e.awaited) == 0 && len(e.stale) == 0 && !e.isSettled() {
		close(e.settled)
	}
}

// build returns the next plan of an entry, or reports that it must wait for results. It changes nothing. If planning
// panics, the service stays in the kernel as it is.
func (e *Engine) build(en *entry) (plan *Plan, wait bool) {
	ok := e.o.Boundary.Do(PartPlan, en.service.Name, func() {
		if wait = en.plan == nil && !hasResults(en) && !e.settleTimeout(); !wait {
			plan = Build(en.service, en.health, e.drains).reuse(en.plan)
		}
	})
	switch {
	case ok:
		return plan, wait
	case en.plan != nil:
		return en.plan, false
	}
	return frozenPlan(en.service, e.drains), false
}

// hasResults reports whether every check of the service has had a result. A check that has failed fewer than Fall times
// is undecided; the engine waits for it only if the addresses cannot be announced without that backend.
func hasResults(en *entry) bool {
	undecided := false
	for _, h := range en.health {
		undecided = undecided || h.State == StateUnknown
	}
	if len(en.health) != len(Checks(en.service)) {
		return false
	}
	return !undecided || !slices.ContainsFunc(Build(en.service, en.health, Drains{}).VIPs, func(v VIPPlan) bool {
		return v.Reason != ""
	})
}

// settleTimeout reports whether the wait for first results is over.
func (e *Engine) settleTimeout() bool {
	if len(e.awaited) == 0 && e.settleBy.IsZero() {
		e.settleBy = time.Now().Add(e.o.Settle)
	}
	return !e.settleBy.IsZero() && time.Now().After(e.settleBy)
}
