package lb

import (
	"log/slog"
	"maps"
	"slices"
	"time"
)

// routes is the wanted and the announced state of each VIP. It computes the next set of announcements.
type routes struct {
	vips     *vipTable
	retry    time.Duration
	log      *slog.Logger
	claims   map[vipKey]map[string]claim // the services that use a VIP, by name
	since    map[vipKey]time.Time        // when a VIP was announced or withdrawn
	started  bool                        // a first set was passed to the announcers
	dirty    bool                        // the wanted and the announced set may differ
	inFlight map[vipKey]Announcement     // the set of the running call to Set; nil: no call is running
	tried    map[vipKey]Announcement     // the set of the last call
	last     map[vipKey]Announcement     // what is announced for sure
	tries    int                         // consecutive failures
	retryAt  time.Time
	err      error // of the last call
}

// claim is the plan of one service for a VIP.
type claim struct {
	plan VIPPlan
	by   []AnnouncerKind
}

func newRoutes(vips *vipTable, retry time.Duration, log *slog.Logger) *routes {
	return &routes{
		vips: vips, retry: retry, log: log, dirty: true,
		claims: map[vipKey]map[string]claim{}, since: map[vipKey]time.Time{},
	}
}

// adopt replaces the claims of a service's old plan by those of its next plan; either may be nil.
func (r *routes) adopt(old, plan *Plan) {
	r.dirty = true
	if old != nil {
		for _, v := range old.VIPs {
			delete(r.claims[v.VIP], old.Service.Name)
			if len(r.claims[v.VIP]) == 0 {
				delete(r.claims, v.VIP)
			}
		}
	}
	if plan == nil {
		return
	}
	for _, v := range plan.VIPs {
		if r.claims[v.VIP] == nil {
			r.claims[v.VIP] = map[string]claim{}
		}
		r.claims[v.VIP][plan.Service.Name] = claim{plan: v, by: plan.Service.Announce}
	}
}

// datapathChanged records that the set of VIPs that the datapath serves may have changed.
func (r *routes) datapathChanged() { r.dirty = true }

// next returns the complete set to announce now; false when it is announced already, or a call is in flight.
func (r *routes) next(now time.Time) ([]Announcement, bool) {
	retry := r.err != nil && !r.retryAt.After(now)
	if r.inFlight != nil || !r.dirty && !retry {
		return nil, false
	}
	r.dirty = false
	set := r.wanted()
	if r.err != nil && !retry && maps.EqualFunc(set, r.tried, Announcement.equal) {
		return nil, false // a change, such as a withdrawal, does not wait for the retry
	}
	if r.started && r.err == nil && maps.EqualFunc(set, r.last, Announcement.equal) {
		return nil, false
	}
	r.started = true
	r.inFlight = set
	for addr := range set {
		v := r.vips.get(addr)
		v.announce.Busy, v.announce.Goal = true, true
	}
	for _, v := range r.vips.byAddr {
		if _, ok := set[v.addr]; !ok && v.announce.Done {
			v.announce.Busy, v.announce.Goal = true, false
		}
	}
	list := slices.Collect(maps.Values(set))
	slices.SortFunc(list, func(a, b Announcement) int { return a.VIP.Compare(b.VIP) })
	return list, true
}

// wanted returns the set to announce, given what the datapath surely serves.
func (r *routes) wanted() map[vipKey]Announcement {
	set := map[vipKey]Announcement{}
	for addr, services := range r.claims {
		v := r.vips.get(addr)
		a := Announcement{VIP: addr}
		byAll := false
		for _, c := range services {
			if !Announce(v.wanted > 0, c.plan.Reason == "", v.datapath) {
				continue
			}
			a.Weight += c.plan.Healthy
			a.By = append(a.By, c.by...)
			byAll = byAll || len(c.by) == 0
		}
		if a.Weight == 0 {
			continue
		}
		if byAll {
			a.By = nil
		}
		slices.Sort(a.By)
		a.By = slices.Compact(a.By)
		set[addr] = a
	}
	return set
}

// complete records the outcome of the call in flight.
func (r *routes) complete(err error, now time.Time) {
	set, first := r.inFlight, r.last == nil
	r.inFlight, r.tried, r.err = nil, set, err
	each, ok := err.(VIPErrors)
	failed := func(addr vipKey) bool { return err != nil && (!ok || each[addr] != nil) }
	if err != nil {
		r.log.Error("routes not as wanted", "err", err)
		r.retryAt = now.Add(backoff(r.retry, r.tries))
		r.tries++
	} else {
		r.tries, r.retryAt = 0, time.Time{}
	}
	if err == nil || ok {
		last := maps.Clone(set)
		for addr := range each {
			delete(last, addr)
			if a, announced := r.last[addr]; announced {
				last[addr] = a
			}
		}
		r.last = last
	}
	r.dirty = true // claims may have changed while the call was running
	for _, v := range r.vips.byAddr {
		if !v.announce.Busy {
			continue
		}
		was, goal := v.announce.Done, v.announce.Goal
		// After a failure the VIP may be announced as before or as requested: it counts as announced if either is.
		v.announce = Known{Done: goal || (failed(v.addr) && was)}
		if !failed(v.addr) && (was != goal || (first && goal)) {
			r.changed(v.addr, goal, now)
		}
		if !v.announce.Done {
			r.vips.forget(v)
		}
	}
}

func (r *routes) changed(addr vipKey, announced bool, now time.Time) {
	r.since[addr] = now
	if announced {
		r.log.Info("route announced", "vip", addr)
		return
	}
	r.log.Info("route withdrawn", "vip", addr, "reason", r.reason(addr))
	if r.claims[addr] == nil {
		delete(r.since, addr)
	}
}

// status returns the state of addr.
func (r *routes) status(addr vipKey) RouteStatus {
	s := RouteStatus{Address: addr, Services: slices.Sorted(maps.Keys(r.claims[addr])), Since: r.since[addr]}
	if a, ok := r.last[addr]; ok {
		s.Announced, s.By = true, a.By
		return s
	}
	if s.Reason = r.reason(addr); s.Reason == "" {
		s.Reason = "not yet"
		if each, ok := r.err.(VIPErrors); ok && each[addr] != nil {
			s.Reason = each[addr].Error()
		} else if r.err != nil && !ok {
			s.Reason = r.err.Error()
		}
	}
	return s
}

// reason returns why addr must not be announced; "": it may be.
func (r *routes) reason(addr vipKey) string {
	if len(r.claims[addr]) == 0 {
		return "no service has it"
	}
	for _, name := range slices.Sorted(maps.Keys(r.claims[addr])) {
		if reason := r.claims[addr][name].plan.Reason; reason != "" {
			return reason
		}
	}
	if v, ok := r.vips.byAddr[addr]; !ok || !v.datapath.Surely() {
		return "no backend in the datapath yet"
	}
	return ""
}

func (a Announcement) equal(b Announcement) bool {
	return a.VIP == b.VIP && a.Weight == b.Weight && slices.Equal(a.By, b.By)
}
