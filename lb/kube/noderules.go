package kube

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube/proxy"
)

// NodeRules is what serves Services to this node and its pods, and node ports to other machines. Services are named
// "namespace/name".
type NodeRules interface {
	// Apply replaces the rules of the Services in changed and removes those of a Service without rules. If all is true,
	// it also removes the rules of all other Services. After an error the Source calls it again.
	Apply(changed map[string][]lb.NodeRule, all bool) error
}

// Delays before rules are passed on again after an error.
const rulesDelay, rulesDelayMax = 100 * time.Millisecond, 30 * time.Second

// passedRules is what the Source needs to know about the rules that it has passed to Options.NodeRules: which Services
// to consider again when one changes, because they claim the same destinations.
type passedRules struct {
	claimed map[proxy.Destination][]string // by which Services
	of      map[string][]proxy.Destination // claimed by a Service
	zone    string                         // of this node, for which the rules are …
	own     []netip.Addr                   // … and its addresses
	atNode  map[string]bool                // Services with rules for these
	all     bool                           // the last call with all Services has succeeded
	failed  map[string]bool                // Services whose last call has failed
	tries   int                            // consecutive failures to repair that
	// triggers are when the changes of EndpointSlices happened that are not in force yet.
	triggers []time.Time
}

// passAll passes on the rules of all Services.
func (s *Source) passAll() {
	if s.o.NodeRules == nil {
		return
	}
	start := time.Now()
	s.passed = passedRules{
		claimed: map[proxy.Destination][]string{}, of: map[string][]proxy.Destination{},
		zone: s.top.zone, failed: map[string]bool{}, tries: s.passed.tries,
		triggers: append(s.passed.triggers, s.programming.takeAll()...),
		own:      ownAddresses(s.own), atNode: map[string]bool{},
	}
	all, keys := map[string][]nodeRule{}, s.services.ListKeys()
	for _, name := range keys {
		if !s.unreadable(name) {
			s.consider(name, all)
		}
	}
	s.pass(start, all, len(all) == len(keys)) // the others keep the rules that they have
	s.noteRules()
}

// unreadable reports whether only the name of one of a Service's EndpointSlices is known.
func (s *Source) unreadable(name string) bool {
	return slices.ContainsFunc(s.slicesIn(name), func(x *endpointSlice) bool { return x.unreadable })
}

// passChanged passes on the rules of Services that have changed, and of those that claim the same destinations, before
// or now. One call replaces the rules of all of them, so that at no time two Services have the same destination.
func (s *Source) passChanged(names ...string) {
	if s.o.NodeRules == nil || len(names) == 0 {
		return
	}
	start, changed := time.Now(), map[string][]nodeRule{}
	for len(names) > 0 {
		name := names[0]
		names = names[1:]
		if _, done := changed[name]; !done && !s.unreadable(name) {
			names = append(names, s.consider(name, changed)...)
		}
	}
	if len(changed) > 0 {
		s.pass(start, changed, false)
	}
}

// passFailed passes on again what was not applied.
func (s *Source) passFailed() {
	if s.passed.tries++; !s.passed.all {
		s.passAll()
		return
	}
	s.passChanged(slices.Collect(maps.Keys(s.passed.failed))...)
}

// consider adds the rules that a Service claims to all, and returns the other Services that claim the same
// destinations. A Service that causes a panic is left out.
func (s *Source) consider(name string, all map[string][]nodeRule) (others []string) {
	p := &s.passed
	var rules []nodeRule
	if !s.o.Boundary.Do(lb.PartObject, name, func() { rules = s.rulesOf(name) }) {
		return nil
	}
	all[name] = rules
	s.tellUsed(name, rules)
	for _, to := range p.of[name] {
		p.claimed[to] = slices.DeleteFunc(p.claimed[to], func(by string) bool { return by == name })
		if others = append(others, p.claimed[to]...); len(p.claimed[to]) == 0 {
			delete(p.claimed, to)
		}
	}
	delete(p.of, name)
	if len(rules) == 0 {
		return others
	}
	claims := make([]proxy.Destination, len(rules))
	for i := range rules {
		to := rules[i].to()
		others = append(others, p.claimed[to]...)
		p.claimed[to] = append(p.claimed[to], name)
		claims[i] = to
	}
	p.of[name] = claims
	return others
}

// pass passes on the rules of Services, computed since start, for those destinations for which they have precedence.
func (s *Source) pass(start time.Time, rules map[string][]nodeRule, all bool) {
	changed, first := make(map[string][]lb.NodeRule, len(rules)), firstClaims(rules)
	for name, claimed := range rules {
		changed[name] = nil
		for i := range claimed {
			r := &claimed[i]
			if first[r.to()] != r {
				continue
			}
			rule := r.NodeRule
			if r.kind == ruleVIP {
				rule.Outside = nil // an lb.Service has it
			}
			changed[name] = append(changed[name], rule)
		}
	}
	p, err := &s.passed, s.o.NodeRules.Apply(changed, all)
	s.programming.metrics.observe(start, err, p.triggers)
	if err == nil {
		p.triggers = nil
	}
	p.all = err == nil && all || p.all && !all
	for name := range changed {
		if delete(p.failed, name); err != nil {
			p.failed[name] = true
		}
	}
	switch {
	case err != nil:
		s.programming.failed()
		s.queue.AddAfter(failedRules, min(rulesDelay<<min(p.tries, 10), rulesDelayMax))
		s.o.RulesProblem(err)
	case p.all && len(p.failed) == 0:
		p.tries = 0
		s.o.RulesProblem(nil)
	}
}
