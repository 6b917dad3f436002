package table

import (
	"fmt"

	"github.com/steelyard-lb/steelyard/lb"
)

// sharedTable describes a kernel table that all services share.
type sharedTable struct {
	what       string
	size, used int
	of         func(lb.Places) int
}

// shared returns the tables that all services share. The caller holds s.Mu.
func (s *Services) shared() []sharedTable {
	slots := s.Slots
	slots.Mu.Lock()
	defer slots.Mu.Unlock()
	return []sharedTable{
		{"frontends", MaxFrontends, MaxFrontends - len(s.Free), func(n lb.Places) int { return n.Frontends }},
		{"backends", maxBackends, len(s.Backends.ByID), func(n lb.Places) int { return n.Backends }},
		{"allowed sources", int(s.objects.SySrcAllow.MaxEntries()), s.entries.allowed.n,
			func(n lb.Places) int { return n.Sources }},
		{"weights", int(s.objects.SyWeights.MaxEntries()), s.entries.members.n,
			func(n lb.Places) int { return n.Weights }},
		{"slots", int(slots.Space.size), int(slots.Space.used()), func(n lb.Places) int { return n.Slots }},
	}
}

// room decides which services may have more entries. The last tenth of each table is reserved for services with fewer
// entries than the average, so no service can use up the table.
type room struct {
	tables []sharedTable
	has    map[string]lb.Places // by service, or nil if not known yet
	count  func() map[string]lb.Places
}

// admit returns an error if p's service may not have the entries that it needs. It changes nothing. f is the frontend
// that p changes. A previous agent's frontend already has its entries.
func (r *room) admit(p *lb.FrontendPlan, f *frontend) error {
	if f != nil && f.Plan == nil {
		return nil
	}
	for _, t := range r.tables {
		if t.used+t.of(p.Needs) <= t.size-t.size/10 {
			continue // fits even if the service has none yet
		}
		if r.has == nil {
			r.has = r.count()
		}
		n, has := t.of(p.Needs), t.of(r.has[p.Service])
		grows, average := n-has, 0
		if len(r.has) > 0 {
			average = t.used / len(r.has)
		}
		switch {
		case grows <= 0, t.used+grows <= t.size-t.size/10, t.used+grows <= t.size && n < average:
		default:
			return fmt.Errorf("%w: not enough space: %d of %d %s are in use, the last tenth is reserved for services "+
				"with fewer than %d, and this one needs %d", lb.ErrRefused, t.used, t.size, t.what, average, n)
		}
	}
	return nil
}

// places returns the number of entries that each service has. The caller holds s.Mu.
func (s *Services) places() map[string]lb.Places {
	all := map[string]lb.Places{}
	for _, f := range s.Frontends {
		if f.Plan != nil {
			has, n := all[f.service], f.Plan.Needs
			all[f.service] = lb.Places{
				Frontends: max(has.Frontends, n.Frontends), Backends: max(has.Backends, n.Backends),
				Slots: max(has.Slots, n.Slots), Sources: max(has.Sources, n.Sources),
				Weights: max(has.Weights, n.Weights),
			}
		}
	}
	return all
}
