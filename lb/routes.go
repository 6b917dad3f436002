package lb

import (
	"log/slog"
	"maps"
	"slices"
	"time"
)

// routes keeps what the announcers are to announce and what they announce, per VIP, and says what to tell them next.
type routes struct {
	vips    *vipTable
	retry   time.Duration
	log     *slog.Logger
	claims  map[vipKey]map[string]claim // who wants which VIP, by service
	since   map[vipKey]time.Time        // when a VIP was announced or withdrawn
	started bool                        // a first set is on its way, or was
	dirty   bool                        // what is announced and what is to be may differ
	flight  map[vipKey]Announcement     // what the call under way announces; nil: none is
	last    map[vipKey]Announcement     // what the last call announced
	tries   int
	retryAt time.Time
	err     error
}

// claim is what one service says of a VIP.
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

// adopt replaces what the service of one plan says by what the next one says; either may be nil.
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

// kernelChanged says that the datapath may hold other VIPs than before.
func (r *routes) kernelChanged() { r.dirty = true }

// next returns the whole set to announce now; false when it is what is announced, or a call is under way.
func (r *routes) next(now time.Time) ([]Announcement, bool) {
	if r.flight != nil || !r.dirty || r.retryAt.After(now) {
		return nil, false
	}
	r.dirty = false
	set := r.wanted()
	if r.started && r.err == nil && maps.EqualFunc(set, r.last, Announcement.equal) {
		return nil, false
	}
	r.started = true
	r.flight = set
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

// wanted returns what is to be announced, given what the datapath surely serves.
func (r *routes) wanted() map[vipKey]Announcement {
	set := map[vipKey]Announcement{}
	for addr, services := range r.claims {
		v := r.vips.get(addr)
		a := Announcement{VIP: addr, Weight: 0}
		everyone := false
		for _, c := range services {
			if !Announce(v.wanted > 0, c.plan.Reason == "", v.datapath) {
				continue
			}
			a.Weight += c.plan.Healthy
			a.By = append(a.By, c.by...)
			everyone = everyone || len(c.by) == 0
		}
		if a.Weight == 0 {
			continue
		}
		if everyone {
			a.By = nil
		}
		slices.Sort(a.By)
		a.By = slices.Compact(a.By)
		set[addr] = a
	}
	return set
}

// announced notes the outcome of the call under way.
func (r *routes) announced(err error, now time.Time) {
	set, first := r.flight, r.last == nil
	r.flight, r.err = nil, err
	if err != nil {
		r.log.Error("routes not as wanted", "err", err)
		r.retryAt = now.Add(r.retry << min(r.tries, 5))
		r.tries++
	} else {
		r.last, r.tries, r.retryAt = set, 0, time.Time{}
	}
	r.dirty = true // something may have changed while the call was under way
	for _, v := range r.vips.byAddr {
		if !v.announce.Busy {
			continue
		}
		was, goal := v.announce.Done, v.announce.Goal
		// After a failure the VIP may be announced as before or as asked: it counts as announced if either is.
		v.announce = Known{Done: goal || (err != nil && was)}
		if err == nil && (was != goal || (first && goal)) {
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

// status returns what is known of addr.
func (r *routes) status(addr vipKey) RouteStatus {
	s := RouteStatus{Address: addr, Services: slices.Sorted(maps.Keys(r.claims[addr])), Since: r.since[addr]}
	if a, ok := r.last[addr]; ok {
		s.Announced, s.By = true, a.By
		return s
	}
	if s.Reason = r.reason(addr); s.Reason == "" {
		s.Reason = "not yet"
		if r.err != nil {
			s.Reason = r.err.Error()
		}
	}
	return s
}

// reason returns why no service has addr announced; "" when nothing speaks against it.
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
