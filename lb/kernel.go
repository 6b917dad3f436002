package lb

import (
	"slices"
	"time"
)

// kernel keeps what the datapath is to hold and what it holds, per Frontend, and says what to tell it next.
type kernel struct {
	vips   *vipTable
	retry  time.Duration
	slots  map[Frontend]*slot
	dirty  map[Frontend]struct{} // slots in which wanted and held may differ
	flying bool                  // a call to Apply is under way
	behind time.Time             // since when the datapath lacks something that is wanted; zero: it has all
}

// slot is one Frontend.
type slot struct {
	want  *FrontendPlan // nil: not wanted
	held  bool          // the datapath holds this frontend …
	plan  *FrontendPlan // … as this; nil when an earlier run left it there
	tries int           // failures in a row
	again time.Time     // not before
	err   error         // why the last try failed
}

// serves reports whether the datapath has a backend for this frontend. What an earlier run left is taken to have one.
func (s *slot) serves() bool { return s.held && (s.plan == nil || len(s.plan.Targets) > 0) }

// newKernel starts from what the datapath holds. It counts as announced, too: routers may still send what an earlier
// run attracted, so it stays until the announcers have confirmed their first set.
func newKernel(vips *vipTable, held []Frontend, retry time.Duration) *kernel {
	k := &kernel{vips: vips, retry: retry, slots: map[Frontend]*slot{}, dirty: map[Frontend]struct{}{}}
	for _, f := range held {
		k.slots[f] = &slot{held: true}
		k.dirty[f] = struct{}{}
		v := vips.get(f.VIP)
		v.held++
		v.serving++
		v.datapath.Done = true
		v.announce.Done = true
	}
	return k
}

// want makes the frontends of p wanted. It returns those that another service has.
func (k *kernel) want(p *Plan) (refused []Frontend) {
	for _, f := range p.Frontends {
		s, ok := k.slots[f.Frontend]
		if !ok {
			s = &slot{}
			k.slots[f.Frontend] = s
		}
		if s.want != nil && s.want.Service != f.Service {
			refused = append(refused, f.Frontend)
			continue
		}
		if s.want == nil {
			k.vips.get(f.VIP).wanted++
		}
		s.want, s.tries, s.again = f, 0, time.Time{}
		k.dirty[f.Frontend] = struct{}{}
	}
	return refused
}

// drop makes the frontends of old that are not in plan unwanted, and reports whether there were any; plan may be nil.
func (k *kernel) drop(old, plan *Plan) (dropped bool) {
	stays := map[Frontend]bool{}
	if plan != nil {
		for _, f := range plan.Frontends {
			stays[f.Frontend] = true
		}
	}
	for _, f := range old.Frontends {
		s, ok := k.slots[f.Frontend]
		if !ok || stays[f.Frontend] || s.want == nil || s.want.Service != old.Service.Name {
			continue
		}
		s.want = nil
		k.vips.get(f.VIP).wanted--
		k.dirty[f.Frontend] = struct{}{}
		dropped = true
	}
	return dropped
}

// next returns what to tell the datapath now; false when there is nothing, or a call is under way. Until the engine has
// settled nothing is removed: a source may be about to want it.
func (k *kernel) next(now time.Time, settled bool) (Delta, bool) {
	if k.flying {
		return Delta{}, false
	}
	var d Delta
	leaving, late := map[*vip]int{}, false
	for f := range k.dirty {
		s, v := k.slots[f], k.vips.get(f.VIP)
		switch {
		case s.again.After(now):
			late = late || s.want != nil
		case s.want != nil && s.held && s.plan != nil && s.plan.Equal(s.want):
			s.plan = s.want
			delete(k.dirty, f)
		case s.want != nil:
			d.Put = append(d.Put, s.want)
		case !s.held:
			delete(k.dirty, f)
			delete(k.slots, f)
			k.vips.forget(v)
		case settled && (v.held-leaving[v] > 1 || !Serve(v.wanted > 0, v.announce)):
			leaving[v]++ // the last one of a VIP that must be served stays until another one is in force
			d.Delete = append(d.Delete, f)
		}
	}
	switch late = late || len(d.Put) > 0; {
	case !late:
		k.behind = time.Time{}
	case k.behind.IsZero():
		k.behind = now
	}
	if len(d.Put) == 0 && len(d.Delete) == 0 {
		return Delta{}, false
	}
	slices.SortFunc(d.Put, func(a, b *FrontendPlan) int { return CompareFrontends(a.Frontend, b.Frontend) })
	slices.SortFunc(d.Delete, CompareFrontends)
	k.takeOff(d)
	return d, true
}

// takeOff notes what the call under way may change: a VIP surely serves if a frontend of it does that is not touched, or
// is replaced by one that does too, whatever fails.
func (k *kernel) takeOff(d Delta) {
	k.flying = true
	unsure := map[*vip]int{}
	for _, f := range d.Put {
		if k.slots[f.Frontend].serves() && len(f.Targets) == 0 {
			unsure[k.vips.get(f.VIP)]++
		}
	}
	for _, f := range d.Delete {
		if k.slots[f].serves() {
			unsure[k.vips.get(f.VIP)]++
		}
	}
	for _, f := range d.touched() {
		v := k.vips.get(f.VIP)
		v.datapath.Busy, v.datapath.Goal = true, v.serving > unsure[v]
	}
}

// applied notes the outcome of the call under way.
func (k *kernel) applied(d Delta, failed map[Frontend]error, now time.Time) {
	k.flying = false
	for _, f := range d.Put {
		k.landed(f.Frontend, f, failed[f.Frontend], now)
	}
	for _, f := range d.Delete {
		k.landed(f, nil, failed[f], now)
	}
	for _, f := range d.touched() {
		v := k.vips.get(f.VIP)
		v.datapath = Known{Done: v.serving > 0}
	}
}

// landed notes that f is as plan has it, or gone when plan is nil, or as before when err is not.
func (k *kernel) landed(f Frontend, plan *FrontendPlan, err error, now time.Time) {
	s, v := k.slots[f], k.vips.get(f.VIP)
	if k.failed(s, err, now) {
		return
	}
	v.held -= count(s.held)
	v.serving -= count(s.serves())
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

func (k *kernel) failed(s *slot, err error, now time.Time) bool {
	s.err = err
	if err == nil {
		s.tries, s.again = 0, time.Time{}
		return false
	}
	s.again = now.Add(k.retry << min(s.tries, 5))
	s.tries++
	return true
}

// quiet reports whether nothing is under way and everything that can be put now has been tried.
func (k *kernel) quiet(now time.Time) bool {
	if k.flying {
		return false
	}
	for f := range k.dirty {
		if s := k.slots[f]; s.want != nil && !s.again.After(now) {
			return false
		}
	}
	return true
}

// retryAt returns when the next failed frontend is due; zero when there is none.
func (k *kernel) retryAt() (at time.Time) {
	for f := range k.dirty {
		if s := k.slots[f]; !s.again.IsZero() && (at.IsZero() || s.again.Before(at)) {
			at = s.again
		}
	}
	return at
}

// touched returns every frontend in d.
func (d Delta) touched() []Frontend {
	all := slices.Clone(d.Delete)
	for _, p := range d.Put {
		all = append(all, p.Frontend)
	}
	return all
}

// reason returns why f is not in force as wanted; "" when it is, or is about to be.
func (k *kernel) reason(f Frontend) string {
	if s, ok := k.slots[f]; ok && s.err != nil {
		return s.err.Error()
	}
	return ""
}
