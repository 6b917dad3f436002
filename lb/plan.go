package lb

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// Plan is what the consumers receive for one Service, computed from its backends' health and the drains. It is
// immutable.
type Plan struct {
	Service   *Service
	Frontends []*FrontendPlan
	// VIPs has an entry for each Service.VIPs, in the same order.
	VIPs []VIPPlan
	// Frozen means that the datapath keeps a previous run's frontends for the VIPs unchanged.
	Frozen bool
}

// VIPPlan is the part of a Plan for one VIP: whether the service permits its announcement.
type VIPPlan struct {
	VIP     netip.Addr
	Healthy int  // backends that may receive new flows, on the port with most
	Local   bool // a backend on this node may receive new flows
	// Reason is why the VIP must not be announced, or "".
	Reason string
	// LowerPreference is why routers should prefer other nodes, or "".
	LowerPreference string
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
	// KeepSource means that packets keep their source. Only with MethodNAT.
	KeepSource bool
	// LocalClients balances connections that this machine opens. Only TCP with MethodNAT.
	LocalClients bool
	// DropWhenEmpty drops new flows when there are no Targets. Otherwise they are refused.
	DropWhenEmpty bool
	// Targets receive new flows, sorted by address: backends, or nodes with NodeForwarding.
	Targets []Target
	// With NodeForwarding.Enabled, the Targets are nodes that serve the same service. A node without an entry for a
	// flow forwards it to the flow's previous targets. With AnyNode, any node may have a flow even if the targets did
	// not change.
	NodeForwarding NodeForwarding
	// Nodes are the nodes that may have flows, whether or not they are targets. Only with NodeForwarding.
	Nodes []Node
	// Down lists the backends whose flows end because the backends are unhealthy or deleted. A backend in neither Down
	// nor Targets keeps its flows.
	Down []netip.AddrPort
	// Kept lists the other backends that exist, or is nil if unknown. If known, flows to any unlisted backend end when
	// the datapath receives this agent's first plan for the Frontend.
	Kept []netip.AddrPort
	// Needs is the table space that the whole service's plan needs. Equal ignores it.
	Needs Places
}

// Target is a destination for a flow's packets.
type Target struct {
	Addr   netip.AddrPort
	Weight int // ≥ 1
	Local  bool
}

// Build returns the plan for s. If each port is checked, the first one decides whether the VIPs are announced, because
// another port that responds earlier would attract connections that the first one refuses. states has the last result
// of each check of s; a backend without one is unknown and receives no new flows. Build never fails, is deterministic,
// and retains none of its arguments except s.
func Build(s *Service, states map[CheckKey]Health, drains Drains) *Plan {
	if s.Frozen {
		return frozenPlan(s, drains)
	}
	p := &Plan{Service: s, VIPs: make([]VIPPlan, 0, len(s.VIPs))}
	states = s.bounded(states)
	for _, vip := range s.VIPs {
		healthy, idle, local, served := 0, 0, false, false
		keep := s.KeepAllDown || s.KeepUnanswered
		for i, port := range s.Ports {
			usable, unused, draining, down := usableFor(s, port, vip, states)
			if i == 0 || s.Check.Type == CheckNone && len(usable) > healthy {
				healthy, idle = len(usable), unused
			}
			local = local || slices.ContainsFunc(usable, func(b Backend) bool { return b.Local })
			if keep = keep && (s.KeepAllDown || len(draining) == 0); keep {
				usable, down = keepAllDown(usable, draining, down)
				served = served || len(usable) > 0
			}
			if s.NodeForwarding.Enabled {
				p.Frontends = append(p.Frontends,
					decapFrontend(s, vip, port, usable, down), nodeFrontend(s, vip, port, usable))
			} else {
				p.Frontends = append(p.Frontends, backendFrontend(s, vip, port, usable, down))
			}
		}
		lower := s.LowerPreference
		if keep && served {
			lower = cmp.Or(lower, s.tooFew(s.Ports, vip, healthy, idle))
			healthy = max(healthy, s.MinHealthy, 1)
		}
		reason := cmp.Or(withholdReason(s, vip, healthy, idle), drains.reason(s.Name))
		p.VIPs = append(p.VIPs, VIPPlan{
			VIP: vip, Healthy: healthy, Local: local, Reason: reason, LowerPreference: lower,
		})
	}
	needs := p.places()
	for _, f := range p.Frontends {
		f.Needs = needs
	}
	return p
}

// frozenPlan returns the plan of a service of which only the VIPs are known.
func frozenPlan(s *Service, drains Drains) *Plan {
	p := &Plan{Service: s, Frozen: true}
	for _, vip := range s.VIPs {
		reason := cmp.Or(s.WithholdReason, s.PerVIP[vip].WithholdReason, drains.reason(s.Name))
		p.VIPs = append(p.VIPs, VIPPlan{VIP: vip, Healthy: 1, Reason: reason, LowerPreference: s.LowerPreference})
	}
	return p
}

// usableFor returns the backends of a port that serve vip: those that may receive new flows, the number of healthy ones
// with weight 0, those that report that they are draining, and those that are down.
func usableFor(
	s *Service, port ServicePort, vip netip.Addr, states map[CheckKey]Health,
) (usable []Backend, idle int, draining, down []Backend) {
	for _, b := range port.Backends {
		if !s.serves(vip, b) {
			continue
		}
		h := states[keyOf(s, b, port.Port)]
		switch StateOf(s, b, h) {
		case StateHealthy:
			if b.Weight = s.weight(b, h); b.Weight > 0 {
				usable = append(usable, b)
			} else {
				idle++
			}
		case StateDraining:
			if !b.Drain {
				draining = append(draining, b)
			}
		case StateUnhealthy:
			down = append(down, b)
		}
	}
	return usable, idle, draining, down
}

// keepAllDown returns the backends to use and those that are down. If none is usable, it uses those that report that
// they are draining or, without any, all that exist, have a weight and are not drained.
func keepAllDown(usable, draining, down []Backend) (use, end []Backend) {
	if len(usable) > 0 {
		return usable, down
	}
	if len(draining) > 0 {
		return draining, down
	}
	for _, b := range down {
		if b.Deleted || b.Drain || b.Weight == 0 {
			end = append(end, b)
		} else {
			use = append(use, b)
		}
	}
	return use, end
}

// StateOf returns the state of backend b of s, given the last result of its check.
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

// withholdReason says why vip must not be announced for the service, or returns "" if it may.
func withholdReason(s *Service, vip netip.Addr, healthy, idle int) string {
	if reason := cmp.Or(s.WithholdReason, s.PerVIP[vip].WithholdReason); reason != "" {
		return reason
	}
	return s.tooFew(s.Ports, vip, healthy, idle)
}

// tooFew says why vip has too few backends for new flows to be announced, or returns "". idle is the number of healthy
// backends with weight 0.
func (s *Service) tooFew(ports []ServicePort, vip netip.Addr, usable, idle int) string {
	need := max(1, s.MinHealthy)
	if usable >= need {
		return ""
	}
	total := map[netip.AddrPort]bool{}
	for _, p := range ports {
		for _, b := range p.Backends {
			if s.serves(vip, b) && !b.Deleted {
				total[b.ID()] = true
			}
		}
	}
	weightless := ""
	if idle > 0 {
		weightless = fmt.Sprintf(", %d of them with weight 0", idle)
	}
	return fmt.Sprintf("%d of %d backends healthy%s, min_healthy is %d", usable+idle, len(total), weightless, need)
}

// backendFrontend sends the flows of a port to its usable backends.
func backendFrontend(s *Service, vip netip.Addr, port ServicePort, usable, down []Backend) *FrontendPlan {
	f := newFrontend(s, vip, port)
	f.Targets = slices.Grow(f.Targets, len(usable))
	for _, b := range usable {
		f.Targets = append(f.Targets, Target{Addr: b.On(port.Port), Weight: b.Weight, Local: b.Local})
	}
	f.Kept = port.Kept
	for _, b := range down {
		switch at := b.On(port.Port); {
		case !s.KeepDown || b.Deleted:
			f.Down = append(f.Down, at)
		case f.Kept != nil:
			f.Kept = append(slices.Clip(f.Kept), at)
		}
	}
	slices.SortFunc(f.Down, netip.AddrPort.Compare)
	f.sortTargets()
	return f
}

// decapFrontend delivers flows that this node or another one has forwarded here. It checks the allowed sources again,
// because the forwarding node may have an older list, and no node has checked a forged packet.
func decapFrontend(s *Service, vip netip.Addr, port ServicePort, usable, down []Backend) *FrontendPlan {
	local := slices.DeleteFunc(slices.Clone(usable), func(b Backend) bool { return !b.Local })
	f := backendFrontend(s, vip, port, local, down)
	f.Decap, f.DropWhenEmpty = true, true
	return f
}

// nodeFrontend selects a node for each flow, and every node selects the same one. It keeps no state. With affinity it
// selects by the client's address, and a client stays on its previous node as long as that node has a backend for it.
func nodeFrontend(s *Service, vip netip.Addr, port ServicePort, usable []Backend) *FrontendPlan {
	weights, local := map[netip.Addr]int{}, map[netip.Addr]bool{}
	for _, b := range usable {
		weights[b.Node] += b.Weight
		local[b.Node] = b.Local
	}
	f := newFrontend(s, vip, port)
	f.Method, f.Encap, f.Algorithm = MethodTunnel, EncapGUE, AlgorithmMaglev
	// Not for UDP: the first datagram of every flow would have to go to every node.
	f.NodeForwarding = NodeForwarding{Enabled: true, AnyNode: s.NodeForwarding.AnyNode && port.Protocol != UDP}
	f.Nodes = port.Nodes
	if s.Affinity != 0 || s.Algorithm == AlgorithmSourceHash {
		f.Algorithm = AlgorithmSourceHash // a client address keeps its node
	}
	f.Targets = slices.Grow(f.Targets, len(weights))
	for node, w := range weights {
		f.Targets = append(f.Targets, Target{Addr: netip.AddrPortFrom(node, 0), Weight: w, Local: local[node]})
	}
	f.sortTargets()
	return f
}

// newFrontend returns a frontend with its service's properties, without targets.
func newFrontend(s *Service, vip netip.Addr, port ServicePort) *FrontendPlan {
	f := &FrontendPlan{
		Frontend: port.On(vip), Service: s.Name, Method: s.Method, Encap: s.Encap, Algorithm: s.Algorithm,
		Affinity: s.Affinity, Allow: s.Allow, KeepSource: s.KeepSource, LocalClients: s.LocalClients,
		DropWhenEmpty: slices.Contains(port.DropWhenEmpty, FamilyOf(vip)),
	}
	if slices.Contains(s.UnrestrictedVIPs, vip) {
		f.Allow = nil
	}
	return f
}

func (f *FrontendPlan) sortTargets() {
	slices.SortFunc(f.Targets, func(a, b Target) int { return a.Addr.Compare(b.Addr) })
}

// Table maps a 32-bit hash to an index of Targets: target = Targets[Table[hash·len(Table)/2³²]]. It is empty without
// Targets. It is computed on each call, because the datapath needs it only once.
func (f *FrontendPlan) Table() []uint16 {
	return tableFor(f.Algorithm, f.Targets, f.Method == MethodNAT)
}

// TableLen returns the length of Table.
func (f *FrontendPlan) TableLen() int { return tableLen(len(f.Targets), f.Method == MethodNAT) }

// HasWeights reports whether the datapath looks up the weight of each target.
func (f *FrontendPlan) HasWeights() bool {
	return f.Affinity != 0 || f.Algorithm == AlgorithmLeastConnections
}

// Equal reports whether f and g have the same effect in the datapath. Kept matters only in the first plan.
func (f *FrontendPlan) Equal(g *FrontendPlan) bool {
	return f.Frontend == g.Frontend && f.Service == g.Service && f.Method == g.Method && f.Encap == g.Encap &&
		f.Algorithm == g.Algorithm && f.Affinity == g.Affinity && f.DropWhenEmpty == g.DropWhenEmpty &&
		f.KeepSource == g.KeepSource && f.LocalClients == g.LocalClients &&
		f.NodeForwarding == g.NodeForwarding && slices.Equal(f.Allow, g.Allow) && slices.Equal(f.Targets, g.Targets) &&
		slices.Equal(f.Nodes, g.Nodes) && slices.Equal(f.Down, g.Down)
}

// reuse replaces frontends of a new plan with equal ones of before, which may be nil. They are then stored only once,
// and a comparison of pointers recognises them.
func (p *Plan) reuse(before *Plan) *Plan {
	if before == nil {
		return p
	}
	for i, f := range p.Frontends {
		if i < len(before.Frontends) && f.Equal(before.Frontends[i]) {
			p.Frontends[i] = before.Frontends[i]
		}
	}
	return p
}

// CompareFrontends orders frontends by address, port and protocol.
func CompareFrontends(a, b Frontend) int {
	return cmp.Or(a.VIP.Compare(b.VIP), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Last, b.Last),
		cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(count(a.Decap), count(b.Decap)))
}
