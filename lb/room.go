package lb

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"time"
)

// ErrRefused marks the error of a frontend that the datapath rejects because of its service, for example because a
// table is full. It does not make this node count as behind, and retries are rare.
var ErrRefused = errors.New("refused")

// Places is the number of entries that a service needs in each table that all services share.
type Places struct{ Frontends, Backends, Slots, Sources, Weights int }

// written is the number of entries written by a change of all of a service's frontends.
func (n Places) written() int { return n.Backends + n.Sources }

// places returns what p needs. Addresses in the same family have the same backends.
func (p *Plan) places() (n Places) {
	n.Frontends = len(p.Frontends)
	counted := map[Family]VIPPlan{}
	for _, v := range p.VIPs {
		if _, ok := counted[FamilyOf(v.VIP)]; !ok {
			counted[FamilyOf(v.VIP)] = v
		}
	}
	for _, f := range p.Frontends {
		n.Slots += f.TableLen()
		n.Sources += len(f.Allow)
		if f.HasWeights() {
			n.Weights += len(f.Targets)
		}
		if !f.NodeForwarding.Enabled && counted[FamilyOf(f.VIP)].VIP == f.VIP {
			n.Backends += len(f.Targets)
		}
	}
	return n
}

// sliceTargets bounds the targets in one call to the datapath, unless a single frontend has more. A call takes some
// milliseconds, and changes made in the meantime are part of the next one.
const sliceTargets = 2048

// cost is the cost of putting f, in targets.
func (f *FrontendPlan) cost() int { return 1 + len(f.Targets) + len(f.Allow) }

// slice returns the plans for the next call, and the total cost of the others. Updates come first, because a server may
// have failed, and small services come before large ones.
func (d *datapathState) slice(all []*FrontendPlan) (now []*FrontendPlan, later int) {
	for _, f := range all {
		later += f.cost()
	}
	if later <= sliceTargets {
		return all, 0
	}
	isNew := func(f *FrontendPlan) int { return count(d.frontends[f.Frontend].plan == nil) }
	first := smallest(all, sliceTargets+1, func(a, b *FrontendPlan) int {
		return cmp.Or(cmp.Compare(isNew(a), isNew(b)), cmp.Compare(a.Needs.written(), b.Needs.written()),
			cmp.Compare(a.Service, b.Service), cmp.Compare(len(a.Targets), len(b.Targets)),
			CompareFrontends(a.Frontend, b.Frontend))
	})
	left := sliceTargets
	for i, f := range first {
		if i > 0 && f.cost() > left {
			return first[:i], later
		}
		left, later = left-f.cost(), later-f.cost()
	}
	return first, later
}

// smallest returns the n smallest elements, sorted. It compares most elements only once, because a Service may have
// 100,000 frontends and each call to the datapath puts only a few of them.
func smallest[E any](all []E, n int, compare func(a, b E) int) (first []E) {
	for _, x := range all {
		if len(first) >= n && compare(x, first[n-1]) >= 0 {
			continue
		}
		if first = append(first, x); len(first) == n || len(first) == 2*n {
			slices.SortFunc(first, compare)
			first = first[:n]
		}
	}
	slices.SortFunc(first, compare)
	return first[:min(n, len(first))]
}

// refusedFactor is how many times longer a refused frontend waits for a retry than a failed one.
const refusedFactor = 8

// retryDelay returns the delay before a retry after an error that followed n others.
func (d *datapathState) retryDelay(err error, n int) time.Duration {
	if errors.Is(err, ErrRefused) {
		return refusedFactor * backoff(d.retry, n)
	}
	return backoff(d.retry, n)
}

// fitting returns the wanted plan reduced to the targets that the datapath already has, if it has refused the whole
// plan. A failed server is thus still removed. It returns nil if there is nothing to change.
func (s *frontendState) fitting() *FrontendPlan {
	if !errors.Is(s.err, ErrRefused) || s.plan == nil || s.want == nil {
		return nil
	}
	part := *s.want
	has := map[netip.AddrPort]bool{}
	for _, t := range s.plan.Targets {
		has[t.Addr] = true
	}
	part.Targets = slices.DeleteFunc(slices.Clone(part.Targets), func(t Target) bool { return !has[t.Addr] })
	if n, had := part.Needs, s.plan.Needs; n.Sources > had.Sources || n.Weights > had.Weights {
		part.Allow, part.Affinity, part.Algorithm = s.plan.Allow, s.plan.Affinity, s.plan.Algorithm
	}
	part.Needs = s.plan.Needs
	if part.Equal(s.plan) {
		return nil
	}
	return &part
}

// reportRoom reports which services of a delta the datapath has refused.
func (e *Engine) reportRoom(delta Delta) {
	reasons := map[string]string{}
	for _, f := range delta.Put {
		if s := e.datapath.frontends[f.Frontend]; s == nil || !errors.Is(s.err, ErrRefused) {
			reasons[f.Service] = cmp.Or(reasons[f.Service], "")
		} else {
			reasons[f.Service] = s.err.Error()
		}
	}
	for name, reason := range reasons {
		if en := e.services[name]; reason == "" && en != nil && en.plan != nil {
			for _, f := range en.plan.Frontends {
				if s := e.datapath.frontends[f.Frontend]; s != nil && errors.Is(s.err, ErrRefused) {
					reason = s.err.Error()
				}
			}
		}
		e.o.Boundary.Report(PartRoom, name, reason)
	}
}
