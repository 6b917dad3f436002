package table

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/lb"
)

// backends maintains the backends in the kernel, and their ids.
type backends struct {
	objects  *bpf.Objects
	entries  *Chunked
	counters *Chunked // traffic of backends
	times    *Chunked // handshake times of backends
	filter   *Filter
	log      *slog.Logger
	// members is Options.TunnelSources. Servers with these addresses also run this datapath.
	members []netip.Prefix
	// servesSelf delivers packets for an address of this machine to its stack.
	servesSelf bool
	ByAddr     map[netip.AddrPort]*backend
	changes    uint64 // counts changes of ByAddr
	ByID       map[uint32]*backend
	hosts      map[netip.Addr]int // number of backends by address
	servers    *serverIDs
	finder     *route.SourceFinder
	free       []uint32 // unused ids
}

// backend is one backend in the kernel. It exists while a table or a flow refers to its id.
type backend struct {
	ID        uint32
	at        netip.AddrPort
	local     bool         // it is on this node
	keyed     bool         // GUE packets to it carry a token
	ours      []netip.Addr // our source addresses towards it, the preferred one first; empty if there is no route
	route.Hop              // current next hop towards it
	certain   route.Hop    // last next hop known to reach it
	tables    int          // number of tables that refer to it
	// generation changes when the agent ends the flows to the backend.
	generation uint32
}

// openBackends reads a previous agent's backends.
func openBackends(o *bpf.Objects, c *Chunks, filter *Filter, log *slog.Logger) (*backends, error) {
	servers, err := openServerIDs(o.SyServers)
	if err != nil {
		return nil, err
	}
	s := &backends{objects: o, entries: c.Backends, counters: c.BackendCounters, times: c.Handshakes,
		filter: filter, log: log, ByAddr: map[netip.AddrPort]*backend{}, ByID: map[uint32]*backend{},
		hosts: map[netip.Addr]int{}, servers: servers, finder: &route.SourceFinder{}}
	for id := range c.Backends.Len() {
		var value bpf.Backend
		if err := c.Backends.lookup(id, &value); err != nil {
			return nil, fmt.Errorf("read the backends: %w", err)
		}
		if value == (bpf.Backend{}) {
			continue
		}
		b := &backend{ID: id, local: value.Local == 1, keyed: value.Keyed == 1, generation: value.Generation}
		b.at, b.ours = fromBackend(value)
		b.Hop = s.finder.Find(b.at.Addr()).Hop
		b.certain = b.Hop
		s.ByAddr[b.at], s.ByID[b.ID] = b, b
		s.hosts[b.at.Addr()]++
		if !isNode(b.at) {
			if err := filter.Add(b.at.Addr(), bpf.AddrBackend); err != nil {
				return nil, err
			}
		}
	}
	s.free = freeIDs(maxBackends, s.ByID)
	return s, nil
}

// isNode reports whether a target is a node that packets are forwarded to (lb.NodeForwarding) rather than a server. A
// node's packets are not NAT replies, so its address is not in the filter. Otherwise the programs would look up every
// packet from it.
func isNode(at netip.AddrPort) bool { return at.Port() == 0 }

// use returns the ids of p's targets in order, and counts a reference to each. The caller must drop the references with
// unuse, even after an error.
func (s *backends) use(p *lb.FrontendPlan) (ids []uint32, err error) {
	for _, t := range p.Targets {
		b, err := s.get(t.Addr, t.Local)
		if err != nil {
			return ids, err
		}
		b.tables++
		ids = append(ids, b.ID)
		if p.Method == lb.MethodTunnel {
			if err := s.measure(t.Addr.Addr()); err != nil {
				return ids, err
			}
		}
	}
	return ids, nil
}

// anyNode returns the ids of the nodes that may have any of p's flows, or none if p has no such nodes.
func (s *backends) anyNode(p *lb.FrontendPlan) (ids []uint32, err error) {
	if !p.NodeForwarding.AnyNode {
		return nil, nil
	}
	for _, m := range p.Nodes {
		b, err := s.get(netip.AddrPortFrom(m.Addr, 0), m.Local)
		if err != nil {
			return nil, err
		}
		ids = append(ids, b.ID)
	}
	return ids, nil
}

// keep counts another reference to each of these backends, which must exist.
func (s *backends) keep(ids []uint32) {
	for _, id := range ids {
		s.ByID[id].tables++
	}
}

func (s *backends) unuse(ids []uint32) {
	for _, id := range ids {
		s.ByID[id].tables--
	}
}

func (s *backends) get(at netip.AddrPort, local bool) (*backend, error) {
	keyed := route.Contains(s.members, at.Addr())
	if b, ok := s.ByAddr[at]; ok {
		if b.tables == 0 { // unused until now, so nothing was verified
			b.certain = b.Hop
		}
		if b.local == local && b.keyed == keyed {
			return b, nil
		}
		b.local, b.keyed = local, keyed
		return b, s.write(b)
	}
	last := len(s.free) - 1
	if last < 0 {
		return nil, fmt.Errorf("%w: backend map full (%d entries)", lb.ErrRefused, maxBackends)
	}
	id := s.free[last]
	b := &backend{ID: id, at: at, local: local, keyed: keyed}
	ours := s.finder.Find(at.Addr())
	b.ours, b.Hop, b.certain = ours.Addrs, ours.Hop, ours.Hop
	if len(b.ours) == 0 {
		s.log.Warn("no route to backend", "backend", at.Addr())
	}
	err := errors.Join(resetCounts(s.counters, id, noTraffic()), resetCounts(s.times, id, bpf.Handshakes{}))
	if err != nil {
		return nil, err
	}
	if err := s.objects.SyBackendLoad.Put(id, uint32(0)); err != nil {
		return nil, fmt.Errorf("reset the load of backend %s: %w", at, err)
	}
	if !isNode(at) {
		if err := s.filter.Add(at.Addr(), bpf.AddrBackend); err != nil {
			return nil, err
		}
	}
	if err := s.write(b); err != nil {
		return nil, err
	}
	s.free, s.ByAddr[at], s.ByID[id] = s.free[:last], b, b
	s.changes++
	s.hosts[at.Addr()]++
	return b, nil
}

func (s *backends) write(b *backend) error {
	server, err := s.servers.get(b.at.Addr())
	if err == nil {
		err = s.entries.grow(b.ID + 1)
	}
	if err == nil {
		value := toBackend(b, server)
		if s.servesSelf && b.NIC == route.LoopbackIndex { // an address of this machine
			value.Local = 1
		}
		err = s.entries.put(b.ID, value)
	}
	if err != nil {
		return fmt.Errorf("put backend %s: %w", b.at, err)
	}
	return nil
}

// measure makes the programs record the path MTU towards the remote end of a tunnel.
func (s *backends) measure(far netip.Addr) error {
	err := s.objects.SyPmtu.Update(bpf.ToAddr(far), bpf.PMTU{}, ebpf.UpdateNoExist)
	if err != nil && !errors.Is(err, ebpf.ErrKeyExist) {
		return fmt.Errorf("add the path MTU entry of %s: %w", far, err)
	}
	return nil
}

// release frees the ids that no table or flow uses.
func (s *backends) release(unused func(id uint32) bool) {
	for at, b := range s.ByAddr {
		if b.tables > 0 || !unused(b.ID) {
			continue
		}
		if err := s.entries.put(b.ID, bpf.Backend{}); err != nil {
			s.log.Warn("backend not removed", "backend", at, "err", err)
			continue
		}
		delete(s.ByAddr, at)
		s.changes++
		delete(s.ByID, b.ID)
		s.free = append(s.free, b.ID)
		if !isNode(at) {
			if err := s.filter.Remove(at.Addr(), bpf.AddrBackend); err != nil {
				s.log.Warn("address of a backend not removed from the filter", "backend", at, "err", err)
			}
		}
		if s.hosts[at.Addr()]--; s.hosts[at.Addr()] == 0 {
			delete(s.hosts, at.Addr())
			if err := IgnoreMissing(s.objects.SyPmtu.Delete(bpf.ToAddr(at.Addr()))); err != nil {
				s.log.Warn("path MTU entry of a backend not removed", "backend", at, "err", err)
			}
			if err := s.servers.release(at.Addr()); err != nil {
				s.log.Warn("id of a server not released", "err", err)
			}
		}
	}
}

// refresh replaces our source addresses towards backends with found. Existing flows keep their source address.
func (s *backends) refresh(finder *route.SourceFinder, found map[netip.Addr]route.Sources) {
	s.finder = finder
	said := map[netip.Addr]bool{} // log once per host, which may have many ports
	for at, b := range s.ByAddr {
		now, known := found[at.Addr()]
		if !known {
			continue
		}
		b.follow(now.Hop)
		if slices.Equal(now.Addrs, b.ours) {
			continue
		}
		was := b.ours
		b.ours = now.Addrs
		if err := s.write(b); err != nil {
			s.log.Error("source addresses towards backend not changed", "backend", at.Addr(), "err", err)
			b.ours = was
			continue
		}
		if !said[at.Addr()] {
			said[at.Addr()] = true
			s.log.Info("source addresses towards backend changed", "backend", at.Addr(), "from", was, "to", b.ours)
		}
	}
}
