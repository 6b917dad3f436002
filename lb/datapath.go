package lb

import (
	"errors"
	"net/netip"
	"slices"
	"time"
)

// datapathState tracks the wanted and the current plan of each Frontend in the datapath. It computes the next Delta.
type datapathState struct {
	vips      *vipTable
	retry     time.Duration
	frontends map[Frontend]*frontendState
	frozen    map[netip.Addr]int    // number of services that freeze a VIP and so keep what a previous run installed
	dirty     map[Frontend]struct{} // frontends whose wanted and held plan may differ
	inFlight  bool                  // a call to Apply is running
	// behind is when the datapath began to lack a wanted frontend that it has not refused, or zero. As long as nothing
	// has failed, each call that puts something restarts the time, because one tenant's large Services may take
	// minutes.
	behind time.Time
	put    time.Time // when a call last put something
	// lacks adds n to the number of frontends that a service wants but no call has put yet.
	lacks func(service string, n int)
}

// frontendState is the state of one Frontend.
type frontendState struct {
	want   *FrontendPlan // nil if not wanted
	held   bool          // the datapath holds the frontend …
	plan   *FrontendPlan // … with this plan; nil if a previous run installed it
	tries  int           // consecutive failures
	retry  time.Time     // do not try again before this time
	err    error         // of the last try
	part   *FrontendPlan // want without refused targets; put instead of want until the next try
	change waiting       // for a call
}

// serves reports whether the datapath has a target for this frontend. A frontend from a previous run counts as having
// one.
func (s *frontendState) serves() bool { return s.held && (s.plan == nil || len(s.plan.Targets) > 0) }

// newDatapathState starts from the frontends that the datapath holds. Their VIPs count as announced, because routers
// may still follow routes from a previous run. The frontends therefore stay until the announcers have confirmed their
// first set.
func newDatapathState(
	vips *vipTable, held []Frontend, retry time.Duration, lacks func(service string, n int),
) *datapathState {
	d := &datapathState{
		vips: vips, retry: retry, lacks: lacks,
		frontends: map[Frontend]*frontendState{}, dirty: map[Frontend]struct{}{}, frozen: map[netip.Addr]int{},
	}
	for _, f := range held {
		d.frontends[f] = &frontendState{held: true}
		d.mark(f)
		v := vips.get(f.VIP)
		v.held++
		v.serving++
		v.datapath.Done = true
		v.announce.Done = true
	}
	return d
}

// want adds the frontends of p to the wanted state. It returns those that belong to another service.
func (d *datapathState) want(p *Plan) (refused []Frontend) {
	d.freeze(p, 1)
	for _, f := range p.Frontends {
		s, ok := d.frontends[f.Frontend]
		if !ok {
			s = &frontendState{}
			d.frontends[f.Frontend] = s
		}
		if s.want != nil && s.want.Service != f.Service {
			refused = append(refused, f.Frontend)
			continue
		}
		if s.want == nil {
			d.vips.get(f.VIP).wanted++
			d.countLack(s, f, 1)
		}
		if s.want == f && s.err == nil {
			continue // nothing changed
		}
		s.want, s.part, s.tries, s.retry = f, nil, 0, time.Time{}
		s.change.changed(d.vips.latency.at)
		d.mark(f.Frontend)
	}
	return refused
}

// freeze adds n to the number of services that freeze each VIP of p, if p is frozen.
func (d *datapathState) freeze(p *Plan, n int) {
	for _, v := range p.VIPs {
		if p.Frozen {
			d.frozen[v.VIP] += n
			d.vips.get(v.VIP).wanted += n
		}
	}
}

// drop removes the frontends of old that are not in plan from the wanted state, and reports whether there were any.
// plan may be nil.
func (d *datapathState) drop(old, plan *Plan) (dropped bool) {
	d.freeze(old, -1)
	stays := map[Frontend]bool{}
	if plan != nil {
		for _, f := range plan.Frontends {
			stays[f.Frontend] = true
		}
	}
	for _, f := range old.Frontends {
		s, ok := d.frontends[f.Frontend]
		if !ok || stays[f.Frontend] || s.want == nil || s.want.Service != old.Service.Name {
			continue
		}
		d.countLack(s, s.want, -1)
		s.want = nil
		d.vips.get(f.VIP).wanted--
		d.mark(f.Frontend)
		dropped = true
	}
	return dropped
}

// mark records that the wanted and the held plan of f may differ.
func (d *datapathState) mark(f Frontend) {
	if _, ok := d.dirty[f]; !ok {
		d.dirty[f] = struct{}{}
		d.vips.get(f.VIP).dirty++
	}
}

// clean records that f is as wanted.
func (d *datapathState) clean(f Frontend) {
	delete(d.dirty, f)
	d.vips.get(f.VIP).dirty--
}

// countLack adds n to what f's service lacks, unless a call has put the frontend.
func (d *datapathState) countLack(s *frontendState, f *FrontendPlan, n int) {
	if s.plan == nil {
		d.lacks(f.Service, n)
	}
}

// next returns the delta to apply now, or false if there is none or a call is in flight. It deletes nothing before the
// engine has settled, because a source may still want it.
func (d *datapathState) next(now time.Time, settled bool) (Delta, bool) {
	if d.inFlight {
		return Delta{}, false
	}
	var delta Delta
	leaving, lacking, failing := map[*vip]int{}, false, false
	for f := range d.dirty {
		s, v := d.frontends[f], d.vips.get(f.VIP)
		switch {
		case s.retry.After(now) && s.part != nil:
			delta.Put = append(delta.Put, s.part)
		case s.retry.After(now):
			failing = failing || s.want != nil && !errors.Is(s.err, ErrRefused)
		case s.want != nil && s.held && s.plan != nil && (s.plan == s.want || s.plan.Equal(s.want)):
			s.plan, s.change = s.want, waiting{}
			d.clean(f)
		case s.want != nil:
			delta.Put = append(delta.Put, s.want)
			lacking = lacking || s.err == nil
			failing = failing || s.err != nil && !errors.Is(s.err, ErrRefused)
		case !s.held:
			d.clean(f)
			delete(d.frontends, f)
			d.vips.forget(v)
		case d.frozen[f.VIP] > 0:
		case settled && (v.held-leaving[v] > 1 || !Serve(v.wanted > 0, v.announce)):
			leaving[v]++ // a VIP to be served keeps its last frontend until another one is held
			delta.Delete = append(delta.Delete, f)
		}
	}
	switch {
	case !lacking && !failing:
		d.behind = time.Time{}
	case d.behind.IsZero():
		d.behind = now
	case !failing && d.put.After(d.behind):
		d.behind = d.put
	}
	if len(delta.Put) == 0 && len(delta.Delete) == 0 {
		return Delta{}, false
	}
	delta.Put, delta.Later = d.slice(delta.Put)
	slices.SortFunc(delta.Put, func(a, b *FrontendPlan) int { return CompareFrontends(a.Frontend, b.Frontend) })
	slices.SortFunc(delta.Delete, CompareFrontends)
	d.begin(delta)
	return delta, true
}

// begin records what the call in flight may change. A VIP is surely served, whatever fails, if one of its frontends
// with targets is unchanged or replaced by a plan with targets.
func (d *datapathState) begin(delta Delta) {
	d.inFlight = true
	unsure := map[*vip]int{}
	for _, f := range delta.Put {
		if d.frontends[f.Frontend].serves() && len(f.Targets) == 0 {
			unsure[d.vips.get(f.VIP)]++
		}
	}
	for _, f := range delta.Delete {
		if d.frontends[f].serves() {
			unsure[d.vips.get(f.VIP)]++
		}
	}
	for _, f := range delta.frontends() {
		d.frontends[f].change.begin()
		v := d.vips.get(f.VIP)
		v.datapath.Busy, v.datapath.Goal = true, v.serving > unsure[v]
		d.vips.touch(f.VIP)
	}
}

// complete records the outcome of the call in flight.
func (d *datapathState) complete(delta Delta, failed map[Frontend]error, now time.Time) {
	d.inFlight = false
	for _, f := range delta.Put {
		d.completeOne(f.Frontend, f, failed[f.Frontend], now)
		if failed[f.Frontend] == nil {
			d.put = now
		}
	}
	for _, f := range delta.Delete {
		d.completeOne(f, nil, failed[f], now)
	}
	for _, f := range delta.frontends() {
		v := d.vips.get(f.VIP)
		v.datapath = Known{Done: v.serving > 0}
		d.vips.touch(f.VIP)
	}
}

// completeOne records that the datapath holds f with plan, or not at all if plan is nil. On error f is unchanged.
func (d *datapathState) completeOne(f Frontend, plan *FrontendPlan, err error, now time.Time) {
	s, v := d.frontends[f], d.vips.get(f.VIP)
	since, isPart := s.change.done(), plan != nil && plan == s.part
	if s.part = nil; !isPart {
		s.err = err
	}
	if err != nil {
		s.retry = now.Add(d.retryDelay(err, s.tries))
		s.tries++
		s.change.failed(since)
		if !isPart {
			s.part = s.fitting()
		}
		return
	}
	if plan != nil {
		d.vips.latency.took(EffectDatapath, since, now)
	}
	if !isPart {
		s.tries, s.retry = 0, time.Time{}
	}
	v.held -= count(s.held)
	v.serving -= count(s.serves())
	if s.want != nil {
		d.lacks(s.want.Service, count(plan == nil)-count(s.plan == nil))
	}
	s.held, s.plan = plan != nil, plan
	v.held += count(s.held)
	v.serving += count(s.serves())
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

// backoff returns the delay after a failure that follows n others: first, doubled n times, at most 32 × first.
func backoff(first time.Duration, n int) time.Duration { return first << min(n, 5) }

// idle reports, after next, whether no call is in flight and every wanted frontend that can be put now has been tried.
func (d *datapathState) idle(now time.Time) bool {
	if d.inFlight {
		return false
	}
	for f := range d.dirty {
		if s := d.frontends[f]; s.want != nil && !s.retry.After(now) {
			return false
		}
	}
	return true
}

// retryAt returns the time of the earliest retry, or zero if none is pending or a call is in flight. The end of a call
// triggers the next one.
func (d *datapathState) retryAt() (at time.Time) {
	if d.inFlight {
		return time.Time{}
	}
	for f := range d.dirty {
		if s := d.frontends[f]; !s.retry.IsZero() && (at.IsZero() || s.retry.Before(at)) {
			at = s.retry
		}
	}
	return at
}

// frontends returns every frontend in d.
func (d Delta) frontends() []Frontend {
	all := slices.Clone(d.Delete)
	for _, p := range d.Put {
		all = append(all, p.Frontend)
	}
	return all
}

// reason returns the error of the last try for f, or "" if there was none.
func (d *datapathState) reason(f Frontend) string {
	if s, ok := d.frontends[f]; ok && s.err != nil {
		return s.err.Error()
	}
	return ""
}
