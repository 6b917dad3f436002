package table

import (
	"maps"
	"net/netip"
	"slices"

	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/lb"
)

// Usable reports whether the frontend has backends now, and had none in this agent before.
func (u *Update) Usable() bool {
	return u.Err == nil && u.First && len(u.ids) > 0 && !u.Plan.Decap
}

// Way is a backend's address and its next hop: the current one, and the last one that certainly reached the backend.
type Way struct {
	At           netip.AddrPort
	Hop, Certain route.Hop
}

// Way returns the address and next hop of a backend, or zero if the backend no longer exists.
func (s *Services) Way(id uint32) (w Way) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if b := s.Backends.ByID[id]; b != nil {
		w = Way{b.at, b.Hop, b.certain}
	}
	return w
}

// inbound describes how this node delivers a frontend's packets from other nodes.
type inbound struct {
	Here    Subject
	Self    netip.Addr // this node's address that other nodes send to
	Senders []lb.Node
}

// Inbound returns what this node should do with a frontend's decapsulated packets, or false if it should receive none.
func (s *Services) Inbound(f lb.Frontend) (in inbound, ok bool) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	here := s.Frontends[f]
	f.Decap = false
	from := s.Frontends[f]
	if here == nil || here.Plan == nil || !here.up || from == nil || from.Plan == nil {
		return in, false
	}
	i := slices.IndexFunc(from.Plan.Targets, func(t lb.Target) bool { return t.Local })
	if i < 0 {
		return in, false
	}
	in.Self = from.Plan.Targets[i].Addr.Addr()
	in.Here, in.Senders = Subject{here.Plan, here.backends}, from.Plan.Nodes
	return in, true
}

// Subject is what the verdict on a synthetic packet is compared with.
type Subject struct {
	Plan     *lb.FrontendPlan
	Backends []uint32 // ids of backends that packets may be sent to
}

// Subject returns what the kernel should do for a frontend, or false if it has no backend or no plan from this agent.
func (s *Services) Subject(f lb.Frontend) (Subject, bool) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	state := s.Frontends[f]
	if state == nil || state.Plan == nil || !state.up || f.Decap {
		return Subject{}, false
	}
	backends := state.backends
	f.Decap = true
	if here := s.Frontends[f]; state.Plan.NodeForwarding.Enabled && here != nil { // this node also has backends
		backends = slices.Concat(backends, here.backends)
	}
	return Subject{state.Plan, backends}, true
}

// Interfaces returns the indexes of the interfaces towards the updates' backends on other nodes, or towards all
// backends on other nodes if of is nil.
func (s *Services) Interfaces(of []*Update) (indexes []int) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	seen := map[int]bool{0: true, route.LoopbackIndex: true}
	note := func(b *backend) {
		if b != nil && !b.local && !seen[b.NIC] {
			seen[b.NIC] = true
			indexes = append(indexes, b.NIC)
		}
	}
	for _, u := range of {
		for _, id := range u.ids {
			note(s.Backends.ByID[id])
		}
	}
	if of == nil {
		for _, b := range s.Backends.ByAddr {
			note(b)
		}
	}
	slices.Sort(indexes)
	return indexes
}

// Has reports whether a VIP has a frontend.
func (s *Services) Has(vip netip.Addr) bool {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return len(s.vips[vip]) > 0
}

// Addresses returns this node's addresses. Callers must not change the map.
func (t *Tunnels) Addresses() map[netip.Addr]bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.own
}

// Direct reports whether packets keep their source address on the way to the backend.
func (s Subject) Direct() bool { return s.Plan.Method == lb.MethodDSR || s.Plan.KeepSource }

// Reroute is a change of next hop after which packets may no longer reach the backends.
type Reroute struct{ From, To route.Hop }

// follow records the current next hop towards a backend.
func (b *backend) follow(now route.Hop) {
	if now != b.Hop && now != b.certain && now.NIC != 0 && !uncertain(b.at.Addr(), b.certain, now) {
		b.certain = now
	}
	b.Hop = now
}

// uncertain reports whether a new next hop may not lead to the backend: a router instead of the link, or the default
// route.
func uncertain(to netip.Addr, from, now route.Hop) bool {
	if from.NIC == 0 {
		return false
	}
	if now.Gateway.IsValid() && !from.Gateway.IsValid() {
		return true
	}
	bits, ok := new(route.Cache).Bits(to)
	return ok && bits == 0
}

// Reroutes returns the backends whose next hop is uncertain. It omits nodes that run this datapath, which have no port
// to probe.
func (s *Services) Reroutes() map[netip.AddrPort]Reroute {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	all := map[netip.AddrPort]Reroute{}
	for at, b := range s.Backends.ByAddr {
		if b.Hop != b.certain && b.NIC != 0 && !b.local && b.tables > 0 && at.Port() != 0 {
			all[at] = Reroute{b.certain, b.Hop}
		}
	}
	return all
}

// Accept records that the new next hop of a reroute reaches its backends.
func (s *Services) Accept(x Reroute) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for _, b := range s.Backends.ByAddr {
		if x == (Reroute{b.certain, b.Hop}) {
			b.certain = b.Hop
		}
	}
}

// Find returns the frontend of a packet, or false if there is none.
func (s *Services) Find(q lb.Question) (lb.Frontend, bool) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for _, state := range s.vips[q.To.Addr()] {
		f := state.is
		if f.Protocol == q.Protocol && !f.Decap && q.To.Port() >= f.Port && q.To.Port() <= max(f.Port, f.Last) {
			return f, true
		}
	}
	return lb.Frontend{}, false
}

// RefreshSources rereads our source addresses towards backends from the kernel. It does not hold the lock while it asks
// the kernel. A change that it misses causes another refresh.
func (s *Services) RefreshSources() {
	s.Mu.Lock()
	hosts := maps.Clone(s.Backends.hosts) // with backends that no table refers to, which may come back
	s.Mu.Unlock()
	finder, found := &route.SourceFinder{}, map[netip.Addr]route.Sources{}
	for a := range hosts {
		found[a] = finder.Find(a)
	}
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.Backends.refresh(finder, found)
}

// Routers returns the next hops towards backends. With equal-cost paths it returns the one that the kernel selects.
func (s *Services) Routers() (all []route.Router) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	seen := map[route.Router]bool{}
	for at, b := range s.Backends.ByAddr {
		x := route.Router{NIC: b.NIC, Addr: b.Gateway}
		if x.Server = !x.Addr.IsValid(); x.Server {
			x.Addr = at.Addr()
		}
		if !b.local && b.NIC != 0 && !seen[x] {
			seen[x] = true
			all = append(all, x)
		}
	}
	return all
}
