package datapath

import (
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// This file has what flows need of services.

// gone returns the backends whose flows end because they are not of the frontend any longer, although the plan does not
// list them as down: with the first plan of this agent those in the table of an earlier one that do not exist, and when
// the frontend goes to another service those of the service that had it.
func (s *services) gone(u *frontendUpdate, was table) (gone []netip.AddrPort) {
	if u.isNew || u.plan.NodeForwarding.Enabled { // the flows are those of the frontend that decapsulates
		return nil
	}
	var had []netip.AddrPort
	if u.f.plan == nil && u.plan.Kept != nil {
		for _, id := range was.ids() {
			if b := s.backends.byID[id]; b != nil {
				had = append(had, b.at)
			}
		}
	}
	for _, p := range s.formerPlans(u) {
		for _, t := range p.Targets {
			had = append(had, t.Addr)
		}
		had = append(had, p.Kept...)
	}
	if len(had) == 0 {
		return nil
	}
	known := map[netip.AddrPort]bool{}
	for _, t := range u.plan.Targets {
		known[t.Addr] = true
	}
	for _, at := range slices.Concat(u.plan.Kept, u.plan.Down) {
		known[at] = true
	}
	for _, at := range had {
		if !known[at] {
			known[at] = true
			gone = append(gone, at)
		}
	}
	return gone
}

// formerPlans returns the plans of other services of which the flows of a frontend may be.
func (s *services) formerPlans(u *frontendUpdate) []*lb.FrontendPlan {
	decap := u.plan.Frontend
	decap.Decap = true
	all := append(slices.Clone(u.f.former), u.f.plan)
	if x := s.frontends[decap]; x != nil { // with the id of this frontend in the keys of its flows
		all = append(all, x.plan)
	}
	return slices.DeleteFunc(all, func(p *lb.FrontendPlan) bool { return p == nil || p.Service == u.plan.Service })
}

// settles reports whether the slots of a plan forget their earlier backends after a time. Those with affinity do not:
// clients that connect again and again stay at their node for as long.
func settles(p *lb.FrontendPlan) bool {
	if p.NodeForwarding.Enabled {
		return p.Protocol == lb.UDP && len(p.Targets) > 0 && p.Affinity == 0
	}
	return p.Method == lb.MethodNAT
}

// settle removes the earlier backends from the tables of frontends: by nat after a time in which all flows that were
// half-open when their slot changed are confirmed or forgotten, and the earlier nodes of flows of datagrams after a
// time in which all live ones were relayed once, so that sy_relays has them.
func (s *services) settle(limits Timeouts) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var plans []*lb.FrontendPlan
	for _, f := range s.frontends {
		after := limits.HalfOpen
		if f.plan != nil && f.plan.NodeForwarding.Enabled {
			after = limits.UDP
		}
		if f.plan != nil && !f.changed.IsZero() && time.Since(f.changed) > after {
			plans = append(plans, f.plan)
		}
	}
	for _, u := range s.putLocked(plans, 0, true, nil) {
		if u.err != nil {
			s.log.Warn("earlier backends not removed", "frontend", u.plan.Frontend, "err", u.err)
		}
	}
}

// flowFrontend returns the id of a frontend in the keys of its flows. Flows of decapsulated packets have that of the
// frontend for packets outside tunnels, so that both kinds of packets find them.
func (s *services) flowFrontend(f lb.Frontend, id uint32) uint32 {
	if outer := s.frontends[withoutDecap(f)]; outer != nil {
		return outer.id
	}
	return id
}

// withoutDecap returns the frontend for packets outside tunnels.
func withoutDecap(f lb.Frontend) lb.Frontend {
	f.Decap = false
	return f
}

// setUDPFlows writes the number of UDP flows of each frontend, and of all.
func (s *services) setUDPFlows(flows map[uint32]uint32) error {
	return setShares(s, s.objects.SyUdpShare, flows, func(_ lb.Frontend, id uint32) uint32 { return id })
}

// setRelays writes the number of relayed flows of each frontend, and of all.
func (s *services) setRelays(flows map[lb.Frontend]uint32) error {
	return setShares(s, s.objects.SyRelayShare, flows, func(f lb.Frontend, _ uint32) lb.Frontend { return f })
}

// setShares writes the numbers of entries of each frontend of UDP, and of all. key is what n has of a frontend.
func setShares[K comparable](s *services, m *ebpf.Map, n map[K]uint32, key func(f lb.Frontend, id uint32) K) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := uint32(0)
	for _, entries := range n {
		all += entries
	}
	if err := m.Put(uint32(maxFrontends), all); err != nil {
		return err
	}
	for f, state := range s.frontends {
		if f.Protocol != lb.UDP {
			continue
		}
		if err := m.Put(state.id, n[key(f, state.id)]); err != nil {
			return err
		}
	}
	return nil
}

// frontendVIPs returns a function that returns the address of a frontend id, also of a removed one.
func (s *services) frontendVIPs() func(id uint32) netip.Addr {
	known := map[uint32]netip.Addr{}
	return func(id uint32) netip.Addr {
		if a, ok := known[id]; ok {
			return a
		}
		var addr bpf.Addr
		if err := s.objects.SyFrontendVips.Lookup(id, &addr); err != nil {
			s.log.Warn("address of a frontend not read", "err", err)
		}
		known[id] = bpf.FromAddr(addr)
		return known[id]
	}
}

// nodes returns the nodes that may have flows of each frontend; nil until it has a plan.
func (s *services) nodes() map[lb.Frontend]map[bpf.Addr]bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[lb.Frontend]map[bpf.Addr]bool{}
	for f, state := range s.frontends {
		all[f] = nil
		if state.plan == nil {
			continue
		}
		all[f] = map[bpf.Addr]bool{}
		for _, n := range state.plan.Nodes {
			all[f][bpf.ToAddr(n.Addr)] = true
		}
	}
	return all
}

// setLoads writes the number of open flows of each backend that is selected by it.
func (s *services) setLoads(open map[uint32]uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, f := range s.frontends {
		if f.plan == nil || f.plan.Algorithm != lb.AlgorithmLeastConnections {
			continue
		}
		for _, id := range f.backends {
			if err := s.objects.SyBackendLoad.Put(id, open[id]); err != nil {
				return err
			}
		}
	}
	return nil
}
