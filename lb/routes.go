package lb

import (
	"cmp"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// routes holds the wanted and the announced state of each VIP. It computes the next set of announcements.
type routes struct {
	vips         *vipTable
	retry        time.Duration
	log          *slog.Logger
	observe      func(RouteStatus)       // EngineOptions.RouteChanged
	claims       map[vipKey][]claim      // of the services that use a VIP, sorted by service name; no list is empty
	since        map[vipKey]time.Time    // when a VIP was announced or withdrawn
	faults       map[vipKey]string       // why the datapath does not deliver a VIP's packets
	started      bool                    // a first set was passed to the announcers …
	succeeded    bool                    // … and a call succeeded, at least for some VIPs
	changedSince bool                    // want changed since the last call
	dirty        bool                    // any VIP's wanted state may have changed; otherwise only vips.touched
	want         map[vipKey]Announcement // the wanted set …
	list         []Announcement          // … sorted by address, never modified
	differs      map[vipKey]bool         // the VIPs for which want differs from last, or a call failed
	inFlight     map[vipKey]Announcement // changes of the running call, zero for a withdrawal; nil if none is running
	last         map[vipKey]Announcement // what is announced for certain
	tries        int                     // consecutive failures
	retryAt      time.Time
	err          error // of the last call
	leaving      leaving
}

// claim is one service's plan for a VIP.
type claim struct {
	service string
	plan    VIPPlan
	by      []AnnouncerKind
	apart   []netip.Addr // Announcement.Apart
	moves   bool         // Announcement.Movable
}

// find returns the index at which a service's claim is or would be in a list sorted by name.
func find(claims []claim, service string) (i int, found bool) {
	return slices.BinarySearchFunc(claims, service, func(c claim, s string) int { return cmp.Compare(c.service, s) })
}

// users returns the services that use a VIP.
func (r *routes) users(addr vipKey) []string {
	names := make([]string, 0, 1)
	for _, c := range r.claims[addr] {
		names = append(names, c.service)
	}
	return names
}

func newRoutes(vips *vipTable, retry time.Duration, log *slog.Logger) *routes {
	return &routes{
		vips: vips, retry: retry, log: log, dirty: true,
		claims: map[vipKey][]claim{}, since: map[vipKey]time.Time{}, faults: map[vipKey]string{},
		want: map[vipKey]Announcement{}, last: map[vipKey]Announcement{}, differs: map[vipKey]bool{},
		leaving: leaving{ends: map[vipKey]time.Time{}, grace: func([]AnnouncerKind) time.Duration { return 0 }},
	}
}

// adopt replaces the claims of a service's old plan with its next plan's. Either may be nil.
func (r *routes) adopt(old, plan *Plan) {
	if old != nil {
		for _, v := range old.VIPs {
			r.vips.changed(v.VIP)
			claims := r.claims[v.VIP]
			if i, found := find(claims, old.Service.Name); found {
				claims = slices.Delete(claims, i, i+1)
			}
			if r.claims[v.VIP] = claims; len(claims) == 0 {
				delete(r.claims, v.VIP)
			}
		}
	}
	if plan == nil {
		return
	}
	for _, v := range plan.VIPs {
		r.vips.changed(v.VIP)
		c := claim{
			service: plan.Service.Name, plan: v, by: plan.Service.announcers(v.VIP), apart: plan.Service.apart(v.VIP),
			moves: plan.Service.NodeForwarding.Enabled || plan.Service.Method != MethodNAT,
		}
		claims := r.claims[v.VIP]
		if i, found := find(claims, c.service); found {
			claims[i] = c
		} else {
			r.claims[v.VIP] = slices.Insert(claims, i, c)
		}
	}
}

// faultsChanged records what is wrong with the delivery to VIPs, or "" if nothing is.
func (r *routes) faultsChanged(changed map[vipKey]string) {
	for addr, fault := range changed {
		r.vips.changed(addr)
		if fault == "" {
			delete(r.faults, addr)
		} else {
			r.faults[addr] = fault
		}
	}
}

// next returns the complete set to announce now, or false if it is already announced or a call is in flight. Apart from
// copying the list, its cost depends only on the number of changes.
func (r *routes) next(now time.Time) ([]Announcement, bool) {
	if r.inFlight != nil {
		return nil, false
	}
	r.expire(now)
	r.update(now)
	switch retry := !r.retryAt.After(now); {
	case r.err != nil && !retry && !r.changedSince:
		return nil, false // a change, such as a withdrawal, does not wait for the retry
	case r.started && r.err == nil && len(r.differs) == 0:
		return nil, false
	}
	if !r.started { // a previous run may have announced any VIP
		for addr, v := range r.vips.byAddr {
			if v.announce.Done {
				r.differs[addr] = true
			}
		}
	}
	r.started, r.changedSince = true, false
	r.inFlight = make(map[vipKey]Announcement, len(r.differs))
	for addr := range r.differs {
		a, wanted := r.want[addr]
		r.inFlight[addr] = a
		v := r.vips.get(addr)
		if v.change.begin(); wanted || v.announce.Done {
			v.announce.Busy, v.announce.Goal = true, wanted
		}
	}
	return r.list, true
}

// update brings want, list and differs up to date.
func (r *routes) update(now time.Time) {
	touched := r.vips.touched
	if r.vips.touched = nil; r.dirty {
		touched = map[vipKey]bool{}
		for addr := range r.claims {
			touched[addr] = true
		}
		for addr := range r.want {
			touched[addr] = true
		}
		r.dirty = false
	}
	changed := map[vipKey]bool{}
	for addr := range touched {
		a, wanted := r.wanted(addr, now)
		if was, had := r.want[addr]; had == wanted && was.equal(a) {
			r.settle(addr)
			continue
		}
		changed[addr], r.differs[addr] = true, true
		if wanted {
			r.want[addr] = a
		} else {
			delete(r.want, addr)
		}
		if last, announced := r.last[addr]; r.err == nil && r.started && announced == wanted && last.equal(a) {
			delete(r.differs, addr)
			r.settle(addr)
		}
	}
	if len(changed) == 0 {
		return
	}
	r.changedSince = true
	list, rest := make([]Announcement, 0, len(r.want)), r.list
	for _, addr := range slices.SortedFunc(maps.Keys(changed), netip.Addr.Compare) {
		i, found := slices.BinarySearchFunc(rest, addr, func(a Announcement, b vipKey) int { return a.VIP.Compare(b) })
		list = append(list, rest[:i]...)
		if a, wanted := r.want[addr]; wanted {
			list = append(list, a)
		}
		rest = rest[i+count(found):]
	}
	r.list = append(list, rest...)
}

// settle stops measuring the latency of a VIP's changes if they need no call.
func (r *routes) settle(addr vipKey) {
	if v, ok := r.vips.byAddr[addr]; ok && v.dirty == 0 && !v.datapath.Busy && !r.differs[addr] {
		v.change.next = time.Time{}
	}
}

// wanted returns a VIP's announcement, given what the datapath surely serves, or false if it must not be announced.
func (r *routes) wanted(addr vipKey, now time.Time) (a Announcement, ok bool) {
	if a, ok = r.announcement(addr, ""); ok {
		delete(r.leaving.ends, addr)
		if ends := !r.leaving.all.IsZero(); ends {
			_, ok = r.last[addr] // do not announce it for the first time
			a.LowerPreference = true
		}
		return a, ok
	}
	if a, ok = r.announcement(addr, drained); !ok {
		delete(r.leaving.ends, addr)
		return a, false
	}
	if !r.remains(addr, now) {
		return Announcement{}, false
	}
	a.LowerPreference = true
	return a, true
}

// announcement returns what the services whose plan has this reason announce, or false if there are none.
func (r *routes) announcement(addr vipKey, reason string) (a Announcement, ok bool) {
	services := r.claims[addr]
	if len(services) == 0 || r.faults[addr] != "" {
		return a, false
	}
	v := r.vips.get(addr)
	a.VIP, a.LowerPreference, a.Movable = addr, true, true
	byAll := false
	for _, c := range services {
		a.Apart = append(a.Apart, c.apart...)
		a.Movable = a.Movable && c.moves
		if !Announce(v.wanted > 0, c.plan.Reason == reason, v.datapath) {
			continue
		}
		a.Weight += c.plan.Healthy
		a.LowerPreference = a.LowerPreference && c.plan.LowerPreference != ""
		a.Local = a.Local || c.plan.Local
		a.By = append(a.By, c.by...)
		byAll = byAll || len(c.by) == 0
	}
	if a.Weight == 0 {
		return Announcement{}, false
	}
	if byAll {
		a.By = nil
	}
	slices.Sort(a.By)
	a.By = slices.Compact(a.By)
	slices.SortFunc(a.Apart, netip.Addr.Compare)
	a.Apart = slices.Compact(a.Apart)
	return a, true
}

// complete records the outcome of the call in flight. After a failure a VIP may be announced as before or as requested:
// it counts as announced if either is, and is part of the next call.
func (r *routes) complete(err error, now time.Time) {
	flight, first := r.inFlight, !r.succeeded
	r.inFlight, r.err = nil, err
	each, ok := err.(VIPErrors)
	r.succeeded = r.succeeded || err == nil || ok
	if err != nil {
		r.log.Error("could not update all routes", "err", err)
		r.retryAt = now.Add(backoff(r.retry, r.tries))
		r.tries++
	} else {
		r.tries, r.retryAt = 0, time.Time{}
	}
	for addr, a := range flight {
		r.completeOne(addr, a, err != nil && (!ok || each[addr] != nil), first, now)
	}
}

// completeOne records the outcome of a call for one VIP. first means that no call has succeeded before.
func (r *routes) completeOne(addr vipKey, a Announcement, failed, first bool, now time.Time) {
	before, v := r.last[addr], r.vips.get(addr)
	since := v.change.done()
	if failed {
		v.change.failed(since)
	} else {
		r.announced(addr, a)
	}
	if v.announce.Busy {
		was, goal := v.announce.Done, v.announce.Goal
		v.announce = Known{Done: goal || (failed && was)}
		switch {
		case failed:
		case was != goal || first && goal:
			r.changed(addr, goal, now)
			if !first {
				r.vips.latency.took(effect(goal), since, now)
			}
		case goal && a.LowerPreference != before.LowerPreference:
			r.notify(addr, r.log.Info, "preference changed", "reason", r.status(addr).Reason)
		}
	}
	if !v.announce.Done {
		r.vips.forget(v)
	}
}

// announced records that a call has set the announcement of a VIP, or withdrawn it if a is zero.
func (r *routes) announced(addr vipKey, a Announcement) {
	if a.VIP.IsValid() {
		r.last[addr] = a
	} else {
		delete(r.last, addr)
	}
	now, wanted := r.want[addr]
	if wanted == a.VIP.IsValid() && now.equal(a) {
		delete(r.differs, addr)
	}
}

func effect(announced bool) Effect {
	if announced {
		return EffectAnnounced
	}
	return EffectWithdrawn
}

func (r *routes) changed(addr vipKey, announced bool, now time.Time) {
	r.since[addr] = now
	if announced {
		r.notify(addr, r.log.Info, "route announced")
		return
	}
	r.notify(addr, r.log.Warn, "route withdrawn", "reason", r.reason(addr))
	if r.claims[addr] == nil {
		delete(r.since, addr)
	}
}

// notify logs a route change and passes it to the observer.
func (r *routes) notify(addr vipKey, log func(string, ...any), what string, args ...any) {
	log(what, append([]any{"vip", addr, "services", strings.Join(r.users(addr), " ")}, args...)...)
	if r.observe != nil {
		r.observe(r.status(addr))
	}
}

// status returns the state of addr.
func (r *routes) status(addr vipKey) RouteStatus {
	s := RouteStatus{Address: addr, Services: r.users(addr), Since: r.since[addr]}
	if a, ok := r.last[addr]; ok {
		s.State, s.Announced, s.By = RouteAnnounced, true, a.By
		if a.LowerPreference {
			s.Reason = "with a lower preference: " + r.lowerPreference(addr)
		}
		return s
	}
	s.State = RouteWithheld
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

// lowerPreference says why routers should prefer other nodes.
func (r *routes) lowerPreference(addr vipKey) string {
	if !r.leaving.all.IsZero() {
		return "the agent stops"
	}
	for _, c := range r.claims[addr] {
		if reason := c.plan.LowerPreference; reason != "" {
			return reason
		}
		if c.plan.Reason == drained {
			return drained
		}
	}
	return "it already had one when it was announced"
}

// reason says why addr must not be announced, or returns "" if it may.
func (r *routes) reason(addr vipKey) string {
	if len(r.claims[addr]) == 0 {
		return "no service has it"
	}
	for _, c := range r.claims[addr] {
		if c.plan.Reason != "" {
			return c.plan.Reason
		}
	}
	if v, ok := r.vips.byAddr[addr]; !ok || !v.datapath.Surely() {
		return "no backend in the datapath yet"
	}
	return r.faults[addr]
}

func (a Announcement) equal(b Announcement) bool {
	return a.VIP == b.VIP && a.Weight == b.Weight && a.LowerPreference == b.LowerPreference && a.Local == b.Local &&
		slices.Equal(a.By, b.By) && slices.Equal(a.Apart, b.Apart) && a.Movable == b.Movable
}
