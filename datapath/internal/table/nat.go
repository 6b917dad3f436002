package table

import (
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// gone returns the backends whose flows end because they no longer belong to the frontend, although the plan does not
// list them as down. With this agent's first plan, these are the backends that a previous agent's table has and the
// plan does not. When the frontend moves to another service, they are the former service's backends.
func (s *Services) gone(u *Update, was Table) (gone []netip.AddrPort) {
	if u.isNew || u.Plan.NodeForwarding.Enabled { // the decapsulating frontend has the flows
		return nil
	}
	var had []netip.AddrPort
	if u.Frontend.Plan == nil && u.Plan.Kept != nil {
		for _, id := range was.ids(true) {
			if b := s.Backends.ByID[id]; b != nil {
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
	for _, t := range u.Plan.Targets {
		known[t.Addr] = true
	}
	for _, at := range slices.Concat(u.Plan.Kept, u.Plan.Down) {
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

// formerPlans returns plans of other services that may have flows of the frontend.
func (s *Services) formerPlans(u *Update) []*lb.FrontendPlan {
	decap := u.Plan.Frontend
	decap.Decap = true
	all := append(slices.Clone(u.Frontend.former), u.Frontend.Plan)
	if x := s.Frontends[decap]; x != nil { // the keys of its flows contain this frontend's id
		all = append(all, x.Plan)
	}
	return slices.DeleteFunc(all, func(p *lb.FrontendPlan) bool { return p == nil || p.Service == u.Plan.Service })
}

// settles reports whether a plan's slots forget their previous backends after a time. Slots with affinity do not,
// because a client that keeps connecting stays with its node.
func settles(p *lb.FrontendPlan) bool {
	if p.NodeForwarding.Enabled {
		return p.Protocol == lb.UDP && len(p.Targets) > 0 && p.Affinity == 0
	}
	return p.Method == lb.MethodNAT
}

// Settle removes previous backends from frontends' tables. With nat it does so after halfOpen, when all flows that were
// half-open when their slot changed are confirmed or removed. It removes the previous nodes of UDP flows after
// datagrams, when every live flow has been relayed once and is in sy_relays.
func (s *Services) Settle(halfOpen, datagrams time.Duration) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	var updates []*Update
	for _, f := range s.Frontends {
		after := halfOpen
		if f.Plan != nil && f.Plan.NodeForwarding.Enabled {
			after = datagrams
		}
		if f.Plan != nil && !f.changed.IsZero() && time.Since(f.changed) > after {
			updates = append(updates, &Update{Plan: f.Plan, Table: f.Plan.Table(), settled: true})
		}
	}
	s.putLocked(updates, 0)
	for _, u := range updates {
		if u.Err != nil {
			s.log.Warn("previous backends not removed", "frontend", u.Plan.Frontend, "err", u.Err)
		}
	}
}

// flowFrontend returns the frontend id in the keys of a frontend's flows. Flows of decapsulated packets have the id of
// the frontend for packets outside tunnels, so that both kinds of packets find them.
func (s *Services) flowFrontend(f lb.Frontend, id uint32) uint32 {
	if outer := s.Frontends[withoutDecap(f)]; outer != nil {
		return outer.ID
	}
	return id
}

func withoutDecap(f lb.Frontend) lb.Frontend {
	f.Decap = false
	return f
}

// SetShares writes the number of UDP or relayed flows of each UDP frontend, by id, and the total.
func (s *Services) SetShares(m *ebpf.Map, n map[uint32]uint32) error {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	all := uint32(0)
	for _, entries := range n {
		all += entries
	}
	if err := m.Put(uint32(MaxFrontends), all); err != nil {
		return err
	}
	for f, state := range s.Frontends {
		if f.Protocol != lb.UDP {
			continue
		}
		if err := m.Put(state.ID, n[state.ID]); err != nil {
			return err
		}
	}
	return nil
}

// FrontendVIPs returns a function that returns the VIP of a frontend id, even if the frontend was removed.
func (s *Services) FrontendVIPs() func(id uint32) netip.Addr {
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

// Nodes holds the nodes that may have the flows of the frontend with this id, or nil if it has no plan yet.
type Nodes struct {
	ID  uint32
	Has map[bpf.Addr]bool
}

// Nodes returns the nodes of each frontend.
func (s *Services) Nodes() map[lb.Frontend]Nodes {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	all := map[lb.Frontend]Nodes{}
	for f, state := range s.Frontends {
		x := Nodes{ID: state.ID}
		if state.Plan != nil {
			x.Has = map[bpf.Addr]bool{}
			for _, n := range state.Plan.Nodes {
				x.Has[bpf.ToAddr(n.Addr)] = true
			}
		}
		all[f] = x
	}
	return all
}

// SetLoads writes the number of open flows of each backend of frontends with least connections.
func (s *Services) SetLoads(open map[uint32]uint32) error {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for _, f := range s.Frontends {
		if f.Plan == nil || f.Plan.Algorithm != lb.AlgorithmLeastConnections {
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
