package kube

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// programming says how far the rules that the Source has passed on follow the cluster. Its methods may be called from
// any goroutine.
type programming struct {
	metrics *RuleMetrics
	started time.Time

	mu      sync.Mutex // guards the following
	inForce bool       // the rules of all Services have been applied once
	pending time.Time  // when the oldest change that is not in force came, at the earliest; zero if all are
	// triggers are when the changes happened that EndpointSlices report, by Service, until take.
	triggers map[string][]time.Time
}

// changed notes a change of the cluster. Before the first rules are in force, a slow API server is no fault.
func (p *programming) changed() {
	p.metrics.changed.SetToCurrentTime()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.inForce && p.pending.IsZero() {
		p.pending = time.Now()
	}
}

// triggered notes when the change happened that an EndpointSlice reports, if that was after the start. old is nil for a
// new slice.
func (p *programming) triggered(old, now any) {
	x, ok := now.(*endpointSlice)
	was, had := old.(*endpointSlice)
	if !ok || !x.changed.After(p.started) || had && was.changed.Equal(x.changed) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.triggers == nil {
		p.triggers = map[string][]time.Time{}
	}
	p.triggers[x.service] = append(p.triggers[x.service], x.changed)
}

// take returns and forgets the triggers of a Service.
func (p *programming) take(service string) []time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer delete(p.triggers, service)
	return p.triggers[service]
}

// takeAll returns and forgets all triggers.
func (p *programming) takeAll() []time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer clear(p.triggers)
	return slices.Concat(slices.Collect(maps.Values(p.triggers))...)
}

// failed notes that rules were not applied.
func (p *programming) failed() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pending.IsZero() {
		p.pending = time.Now()
	}
}

// applied notes that no rule waits to be applied again. With more, other changes wait, of which none is older than the
// queue's last turn.
func (p *programming) applied(more bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.inForce, p.pending = true, (time.Time{}); more {
		p.pending = time.Now()
	}
}

// noteRules notes whether the rules that follow from the changes so far are in force.
func (s *Source) noteRules() {
	if len(s.passed.failed) == 0 {
		s.programming.applied(s.queue.Len() > 0)
	}
}

// RulesInForce reports whether the rules of all Services have been applied once since the start.
func (s *Source) RulesInForce() bool {
	s.programming.mu.Lock()
	defer s.programming.mu.Unlock()
	return s.programming.inForce
}

// RulesBehind returns since when the kernel has lacked rules, or zero if it lacks none.
func (s *Source) RulesBehind() time.Time {
	s.programming.mu.Lock()
	defer s.programming.mu.Unlock()
	return s.programming.pending
}
