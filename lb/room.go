package lb

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"
	"time"
)

// ErrRefused marks the error of a frontend that the datapath does not take because of its service, as one for which it
// has no room. Nothing of this node is behind because of it, and the frontend is retried seldom.
var ErrRefused = errors.New("refused")

// Places is what a service needs of the tables that all services share.
type Places struct{ Frontends, Backends, Slots int }

// places returns what p needs. Addresses of one family have the same backends.
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
		if !f.NodeForwarding.Enabled && counted[FamilyOf(f.VIP)].VIP == f.VIP {
			n.Backends += len(f.Targets)
		}
	}
	return n
}

// sliceTargets bounds what one call to the datapath puts, but for a frontend with more targets: a call takes some
// milliseconds, and between two of them goes what has changed meanwhile.
const sliceTargets = 2048

// cost is how long it takes to put f, in targets.
func (f *FrontendPlan) cost() int { return 1 + len(f.Targets) }

// slice returns the plans to put with the next call, and the targets of all others: updates first, because a server may
// have failed, then the services that need few places.
func (d *datapathState) slice(all []*FrontendPlan) (now []*FrontendPlan, later int) {
	for _, f := range all {
		later += f.cost()
	}
	if later <= sliceTargets {
		return all, 0
	}
	isNew := func(f *FrontendPlan) int { return count(d.frontends[f.Frontend].plan == nil) }
	slices.SortFunc(all, func(a, b *FrontendPlan) int {
		return cmp.Or(cmp.Compare(isNew(a), isNew(b)), cmp.Compare(a.Needs.Backends, b.Needs.Backends),
			cmp.Compare(a.Service, b.Service), cmp.Compare(len(a.Targets), len(b.Targets)),
			CompareFrontends(a.Frontend, b.Frontend))
	})
	left := sliceTargets
	for i, f := range all {
		if i > 0 && f.cost() > left {
			return all[:i], later
		}
		left, later = left-f.cost(), later-f.cost()
	}
	return all, 0
}

// refusedFactor is how much longer a frontend that was refused waits for the next try than one that failed.
const refusedFactor = 8

// retryDelay returns the time to the next try after an error that followed n others.
func (d *datapathState) retryDelay(err error, n int) time.Duration {
	if errors.Is(err, ErrRefused) {
		return refusedFactor * backoff(d.retry, n)
	}
	return backoff(d.retry, n)
}

// fitting returns the wanted plan with only the targets that the datapath has, when it has refused others: a server
// that has failed is taken out nevertheless. Nil: there is nothing to change.
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
