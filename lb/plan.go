package lb

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

// Plan is how one Service is to be carried out, given the health of its backends. It is immutable.
type Plan struct {
	Service   *Service
	Frontends []*FrontendPlan
	// VIPs has an entry for each of Service.VIPs, in their order.
	VIPs []VIPPlan
}

// VIPPlan says whether a VIP has what it takes to be announced, for one service.
type VIPPlan struct {
	VIP     netip.Addr
	Healthy int // backends that may receive new flows
	// Reason is why the VIP is not to be announced; "": it is.
	Reason string
}

// FrontendPlan is what the datapath does with packets to one Frontend. It is immutable.
type FrontendPlan struct {
	Frontend
	Service   string
	Method    Method
	Encap     Encap
	Algorithm Algorithm
	Affinity  time.Duration
	Allow     []netip.Prefix
	// DropWhenEmpty drops new flows when there are no Targets; else they are refused.
	DropWhenEmpty bool
	// Targets are the backends that get new flows, sorted by address. With none, new flows are refused.
	Targets []Target
	// Table maps a hash to an index of Targets: target = Targets[Table[hash mod len(Table)]]. Empty without Targets.
	Table []uint16
	// Chained says that the targets are machines that all do as this one does: who is asked for a flow that it does not know
	// asks those that had it before. Nodes are those that may have flows, targets or not; AnyNode says that it takes no
	// change of the targets for a flow to be with any of them.
	Chained bool
	AnyNode bool
	Nodes   []Node
	// Down are the backends whose flows are to be ended: they are known not to answer. A backend that is neither
	// here nor in Targets keeps the flows it has.
	Down []netip.AddrPort
}

// Target is where packets of a flow are sent.
type Target struct {
	Addr   netip.AddrPort
	Weight int // ≥ 1
	Local  bool
}

// Build returns the plan for s. States holds what is known of its backends by Backend.ID; a missing one is unknown, and
// an unknown backend gets no traffic. It never fails, is deterministic, and does not keep states.
func Build(s *Service, states map[netip.AddrPort]Health) *Plan {
	p := &Plan{Service: s, VIPs: make([]VIPPlan, 0, len(s.VIPs))}
	for _, vip := range s.VIPs {
		healthy := 0
		for i, port := range s.Ports {
			usable, dead := usableFor(s, s.backendsOf(i), vip, states)
			if s.Spread {
				p.Frontends = append(p.Frontends, inside(s, vip, port, usable, dead), spread(s, vip, port, s.Nodes[i], usable))
			} else {
				p.Frontends = append(p.Frontends, buildFrontend(s, vip, port, usable, dead))
			}
			healthy = max(healthy, len(usable))
		}
		p.VIPs = append(p.VIPs, VIPPlan{VIP: vip, Healthy: healthy, Reason: notAnnounced(s, vip, healthy)})
	}
	return p
}

// usableFor sorts the backends of vip's family into those that may receive new flows and those known to be dead.
func usableFor(s *Service, backends []Backend, vip netip.Addr, states map[netip.AddrPort]Health) (usable, dead []Backend) {
	for _, b := range backends {
		if !s.serves(vip, b) {
			continue
		}
		if b.Deleted {
			dead = append(dead, b)
			continue
		}
		h := states[b.ID()]
		switch StateOf(s, b, h) {
		case StateHealthy:
			if h.Weight >= 0 && s.Check.Type == CheckNodePort {
				b.Weight = h.Weight
			}
			if b.Weight > 0 {
				usable = append(usable, b)
			}
		case StateUnhealthy:
			dead = append(dead, b)
		}
	}
	return usable, dead
}

// StateOf returns the state of backend b of s, given what its check last found.
func StateOf(s *Service, b Backend, h Health) State {
	state := h.State
	if b.Deleted {
		return StateUnhealthy
	}
	if s.Check.Type == CheckNone {
		state = StateHealthy
	}
	if state == StateHealthy && b.Drain {
		return StateDraining
	}
	return state
}

func notAnnounced(s *Service, vip netip.Addr, healthy int) string {
	if s.WithholdReason != "" {
		return s.WithholdReason
	}
	if healthy >= max(1, s.MinHealthy) {
		return ""
	}
	of := 0
	for _, b := range s.all() {
		if s.serves(vip, b) && !b.Deleted {
			of++
		}
	}
	return countReason(healthy, of, max(1, s.MinHealthy))
}

func buildFrontend(s *Service, vip netip.Addr, port Port, usable, dead []Backend) *FrontendPlan {
	f := &FrontendPlan{
		Frontend: Frontend{VIP: vip, Port: port.Port, Last: port.Last, Protocol: port.Protocol},
		Service:  s.Name, Method: s.Method, Encap: s.Encap, Algorithm: s.Algorithm,
		Affinity: s.Affinity, Allow: s.Allow, DropWhenEmpty: s.DropWhenEmpty,
	}
	if slices.Contains(s.UnrestrictedVIPs, vip) {
		f.Allow = nil
	}
	for _, b := range usable {
		f.Targets = append(f.Targets, Target{Addr: b.On(port), Weight: b.Weight, Local: b.Local})
	}
	slices.SortFunc(f.Targets, func(a, b Target) int { return a.Addr.Compare(b.Addr) })
	for _, b := range dead {
		f.Down = append(f.Down, b.On(port))
	}
	slices.SortFunc(f.Down, netip.AddrPort.Compare)
	f.Table = tableFor(s.Algorithm, f.Targets, f.Method == MethodNAT)
	return f
}

// inside is what this machine does with flows that it, or another one, has chosen it for.
func inside(s *Service, vip netip.Addr, port Port, usable, dead []Backend) *FrontendPlan {
	here := slices.DeleteFunc(slices.Clone(usable), func(b Backend) bool { return !b.Local })
	f := buildFrontend(s, vip, port, here, dead)
	f.Decap, f.Allow, f.DropWhenEmpty = true, nil, true // who chose has looked at the source
	return f
}

// spread chooses a machine for each flow, the same on every machine: without state, and so without affinity to a backend.
func spread(s *Service, vip netip.Addr, port Port, machines []Node, usable []Backend) *FrontendPlan {
	weights, here := map[netip.Addr]int{}, map[netip.Addr]bool{}
	for _, b := range usable {
		weights[b.Node] += b.Weight
		here[b.Node] = b.Local
	}
	f := buildFrontend(s, vip, port, nil, nil)
	f.Method, f.Encap, f.Algorithm, f.Affinity = MethodTunnel, EncapGUE, AlgorithmMaglev, 0
	f.Chained, f.Nodes = true, machines
	f.AnyNode = s.AnyNode && port.Protocol != UDP // the first datagram of every flow would have to go to all of them
	if s.Affinity != 0 {
		f.Algorithm = AlgorithmSourceHash // a client stays with a machine
	}
	for node, w := range weights {
		f.Targets = append(f.Targets, Target{Addr: netip.AddrPortFrom(node, 0), Weight: w, Local: here[node]})
	}
	slices.SortFunc(f.Targets, func(a, b Target) int { return a.Addr.Compare(b.Addr) })
	f.Table = tableFor(f.Algorithm, f.Targets, false)
	return f
}

// Equal reports whether f and g ask the same of the datapath.
func (f *FrontendPlan) Equal(g *FrontendPlan) bool {
	return f.Frontend == g.Frontend && f.Service == g.Service && f.Method == g.Method && f.Encap == g.Encap &&
		f.Algorithm == g.Algorithm && f.Affinity == g.Affinity && f.DropWhenEmpty == g.DropWhenEmpty && slices.Equal(f.Allow, g.Allow) &&
		f.Chained == g.Chained &&
		f.AnyNode == g.AnyNode && slices.Equal(f.Targets, g.Targets) && slices.Equal(f.Nodes, g.Nodes) && slices.Equal(f.Down, g.Down)
}

// CompareFrontends orders frontends by address, port and protocol.
func CompareFrontends(a, b Frontend) int {
	return cmp.Or(a.VIP.Compare(b.VIP), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Last, b.Last), cmp.Compare(a.Protocol, b.Protocol),
		compareBool(a.Decap, b.Decap))
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}
