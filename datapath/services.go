package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// Limits of the maps (bpf/maps.h).
const (
	maxFrontends = 16384
	maxBackends  = 65536
)

// services keeps frontends, their tables, backends and VIPs in the kernel.
type services struct {
	objects *syObjects
	log     *slog.Logger

	mu        sync.Mutex // guards all below
	frontends map[lb.Frontend]*frontend
	vips      map[netip.Addr]map[uint32]*frontend // by frontend id
	free      []uint32                            // frontend ids
	backends  map[netip.AddrPort]*backend
	byID      map[uint32]*backend
	next      uint32   // backend ids from here on were never used …
	spare     []uint32 // … and these no longer are
}

// frontend is one Frontend in the kernel. An earlier agent's has neither service nor backends.
type frontend struct {
	id       uint32
	service  string
	up       bool
	backends []uint32         // in its table
	dead     []netip.AddrPort // whose flows were ended
}

// backend is one backend in the kernel. It stays as long as a table or a flow has its id.
type backend struct {
	id     uint32
	at     netip.AddrPort
	source netip.Addr // our address towards it; zero: no route
	tables int        // that have it
}

// openServices reads back what an earlier agent left.
func openServices(o *syObjects, log *slog.Logger) (*services, error) {
	s := &services{
		objects: o, log: log, frontends: map[lb.Frontend]*frontend{}, vips: map[netip.Addr]map[uint32]*frontend{},
		backends: map[netip.AddrPort]*backend{}, byID: map[uint32]*backend{},
	}
	used := map[uint32]bool{}
	var key syFrontendKey
	var value syFrontend
	entries := o.Frontends.Iterate()
	for entries.Next(&key, &value) {
		f := fromFrontendKey(key)
		s.frontends[f] = &frontend{id: value.Id, up: true}
		s.ofVIP(f.VIP)[value.Id] = s.frontends[f]
		used[value.Id] = true
	}
	if err := entries.Err(); err != nil {
		return nil, fmt.Errorf("read the frontends: %w", err)
	}
	for id := uint32(maxFrontends); id > 0; id-- {
		if !used[id-1] {
			s.free = append(s.free, id-1)
		}
	}
	return s, s.readBackends()
}

func (s *services) readBackends() error {
	keys, values := make([]uint32, maxBackends), make([]syBackend, maxBackends)
	var cursor ebpf.MapBatchCursor
	n, err := s.objects.Backends.BatchLookup(&cursor, keys, values, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("read the backends: %w", err)
	}
	for i := range n {
		if values[i] == (syBackend{}) {
			continue
		}
		b := &backend{id: keys[i], at: fromBackend(values[i]), source: fromAddr(values[i].Snat)}
		s.backends[b.at], s.byID[b.id] = b, b
		s.next = max(s.next, b.id+1)
	}
	for id := range s.next {
		if s.byID[id] == nil {
			s.spare = append(s.spare, id)
		}
	}
	return nil
}

func (s *services) held() []lb.Frontend {
	s.mu.Lock()
	defer s.mu.Unlock()
	held := make([]lb.Frontend, 0, len(s.frontends))
	for f := range s.frontends {
		held = append(held, f)
	}
	return held
}

// landing is a plan on its way into the kernel.
type landing struct {
	plan   *lb.FrontendPlan
	f      *frontend
	isNew  bool
	spread sySpread
	ids    []uint32
	table  *ebpf.Map
	dead   []uint32 // ids of backends that are newly dead
	err    error
}

// put makes plans true, and returns what became of each. The order is backends, table, frontend, VIP: nothing points to
// what is not there. Tables are swapped in one call: the kernel waits for a grace period in each, which is some 20 ms.
func (s *services) put(plans []*lb.FrontendPlan) []*landing {
	s.mu.Lock()
	defer s.mu.Unlock()
	landings := make([]*landing, len(plans))
	for i, p := range plans {
		landings[i] = s.prepare(p)
	}
	s.swapTables(landings)
	for _, l := range landings {
		if l.err == nil {
			l.err = s.objects.Frontends.Put(toFrontendKey(l.plan.Frontend),
				syFrontend{Id: l.f.id, Method: uint8(syMethodMETHOD_NAT), Spread: uint8(l.spread)})
		}
		s.settle(l)
	}
	return landings
}

// prepare makes everything for p that no packet sees yet.
func (s *services) prepare(p *lb.FrontendPlan) *landing {
	l := &landing{plan: p}
	if l.spread, l.err = supported(p); l.err != nil {
		return l
	}
	if l.f, l.isNew, l.err = s.frontend(p.Frontend); l.err != nil {
		return l
	}
	if l.ids, l.err = s.resolve(p); l.err == nil {
		l.table, l.err = newTable(p, l.ids)
	}
	return l
}

// swapTables puts all new tables in force at once.
func (s *services) swapTables(landings []*landing) {
	var ids, tables []uint32
	for _, l := range landings {
		if l.err == nil {
			ids, tables = append(ids, l.f.id), append(tables, uint32(l.table.FD()))
		}
	}
	if len(ids) == 0 {
		return
	}
	_, err := s.objects.Tables.BatchUpdate(ids, tables, nil)
	for _, l := range landings {
		if l.table == nil {
			continue
		}
		if err != nil && l.err == nil { // a kernel without batches of maps
			l.err = s.objects.Tables.Put(l.f.id, l.table)
		}
		l.table.Close()
	}
}

// settle takes note of what was put, or gives back what it took when it was not.
func (s *services) settle(l *landing) {
	if l.err != nil {
		s.use(l.ids, -1)
		if l.isNew {
			s.free = append(s.free, l.f.id)
		}
		return
	}
	f := l.f
	s.use(f.backends, -1)
	f.service, f.backends, f.up = l.plan.Service, l.ids, len(l.ids) > 0
	s.frontends[l.plan.Frontend] = f
	for _, at := range l.plan.Dead {
		if b := s.backends[at]; b != nil && !slices.Contains(f.dead, at) {
			l.dead = append(l.dead, b.id)
		}
	}
	f.dead = l.plan.Dead
	s.ofVIP(l.plan.VIP)[f.id] = f
	l.err = s.setVIP(l.plan.VIP)
}

// supported returns how new flows of p choose a slot, or why this datapath cannot do what p asks.
func supported(p *lb.FrontendPlan) (sySpread, error) {
	switch {
	case p.Method != lb.MethodNAT:
		return 0, fmt.Errorf("forward = %q is not there yet", p.Method)
	case p.Protocol != lb.TCP && p.Protocol != lb.UDP:
		return 0, fmt.Errorf("protocol %s is not there yet", p.Protocol)
	case p.Affinity != 0:
		return 0, errors.New("affinity is not there yet")
	case len(p.Allow) > 0:
		return 0, errors.New("allow is not there yet")
	}
	switch p.Algorithm {
	case lb.AlgorithmMaglev:
		return sySpreadSPREAD_FLOW, nil
	case lb.AlgorithmSourceHash:
		return sySpreadSPREAD_SOURCE, nil
	case lb.AlgorithmRandom:
		return sySpreadSPREAD_RANDOM, nil
	case lb.AlgorithmRoundRobin:
		return sySpreadSPREAD_TURNS, nil
	}
	return 0, fmt.Errorf("algorithm %q is not there yet", p.Algorithm)
}

func (s *services) frontend(f lb.Frontend) (_ *frontend, isNew bool, err error) {
	if known, ok := s.frontends[f]; ok {
		return known, false, nil
	}
	if len(s.free) == 0 {
		return nil, false, fmt.Errorf("there are %d frontends, and no room for more", maxFrontends)
	}
	id := s.free[len(s.free)-1]
	if err := forgetCounts(s.objects.ByFrontend, id); err != nil {
		return nil, false, err
	}
	s.free = s.free[:len(s.free)-1]
	return &frontend{id: id}, true, nil
}

// resolve returns the ids of p's targets, in their order, and counts them as used. Whatever it returns must be given
// back with use(ids, -1), also after an error.
func (s *services) resolve(p *lb.FrontendPlan) (ids []uint32, err error) {
	for _, t := range p.Targets {
		b, err := s.backend(t.Addr)
		if err != nil {
			return ids, err
		}
		b.tables++
		ids = append(ids, b.id)
	}
	return ids, nil
}

func (s *services) use(ids []uint32, n int) {
	for _, id := range ids {
		s.byID[id].tables += n
	}
}

func (s *services) backend(at netip.AddrPort) (*backend, error) {
	if b, ok := s.backends[at]; ok {
		return b, nil
	}
	id := s.next
	if n := len(s.spare); n > 0 {
		id = s.spare[n-1]
	} else if id == maxBackends {
		return nil, fmt.Errorf("there are %d backends, and no room for more", maxBackends)
	}
	b := &backend{id: id, at: at, source: s.sourceTowards(at.Addr())}
	if err := forgetCounts(s.objects.ByBackend, id); err != nil {
		return nil, err
	}
	if err := s.objects.Backends.Put(id, toBackend(at, b.source)); err != nil {
		return nil, fmt.Errorf("put backend %s: %w", at, err)
	}
	if n := len(s.spare); n > 0 {
		s.spare = s.spare[:n-1]
	} else {
		s.next++
	}
	s.backends[at], s.byID[id] = b, b
	return b, nil
}

// newTable makes the table of a plan (bpf/maps.h).
func newTable(p *lb.FrontendPlan, ids []uint32) (*ebpf.Map, error) {
	keys, values := make([]uint32, len(p.Table)+1), make([]uint32, len(p.Table)+1)
	values[0] = uint32(len(p.Table))
	for i, target := range p.Table {
		keys[i+1], values[i+1] = uint32(i+1), ids[target]
	}
	table, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "table", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: uint32(len(keys)), Flags: unix.BPF_F_INNER_MAP,
	})
	if err != nil {
		return nil, fmt.Errorf("make a table: %w", err)
	}
	if _, err := table.BatchUpdate(keys, values, nil); err != nil {
		table.Close()
		return nil, fmt.Errorf("fill a table: %w", err)
	}
	return table, nil
}

// setVIP makes the VIP known while it has a frontend, and up while one of them has a backend.
func (s *services) setVIP(addr netip.Addr) error {
	var vip syVip
	for _, f := range s.vips[addr] {
		if f.up {
			vip.Up = 1
		}
	}
	if len(s.vips[addr]) > 0 {
		return s.objects.Vips.Put(toAddr(addr), vip)
	}
	delete(s.vips, addr)
	return ignoreMissing(s.objects.Vips.Delete(toAddr(addr)))
}

// ofVIP returns the frontends of a VIP, by id.
func (s *services) ofVIP(addr netip.Addr) map[uint32]*frontend {
	if s.vips[addr] == nil {
		s.vips[addr] = map[uint32]*frontend{}
	}
	return s.vips[addr]
}

// remove removes a frontend and returns its id, whose flows are to be ended; the id is free when they are.
func (s *services) remove(f lb.Frontend) (id uint32, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	state, ok := s.frontends[f]
	if !ok {
		return 0, nil
	}
	if err := ignoreMissing(s.objects.Frontends.Delete(toFrontendKey(f))); err != nil {
		return 0, err
	}
	delete(s.frontends, f)
	delete(s.ofVIP(f.VIP), state.id)
	s.use(state.backends, -1)
	if err := ignoreMissing(s.objects.Tables.Delete(state.id)); err != nil {
		s.log.Warn("table not removed", "frontend", f, "err", err)
	}
	return state.id, s.setVIP(f.VIP)
}

func ignoreMissing(err error) error {
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return nil
	}
	return err
}

// release gives ids back: those of frontends that are gone, and of backends that neither a table nor a flow has.
func (s *services) release(frontends []uint32, unused func(backend uint32) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, frontends...)
	for at, b := range s.backends {
		if b.tables > 0 || !unused(b.id) {
			continue
		}
		if err := s.objects.Backends.Put(b.id, syBackend{}); err != nil {
			s.log.Warn("backend not removed", "backend", at, "err", err)
			continue
		}
		delete(s.backends, at)
		delete(s.byID, b.id)
		s.spare = append(s.spare, b.id)
	}
}

// sourceTowards returns our address towards a backend: what the kernel would use.
func (s *services) sourceTowards(to netip.Addr) netip.Addr {
	routes, err := netlink.RouteGet(to.AsSlice())
	if err != nil || len(routes) == 0 {
		s.log.Warn("no route to backend", "backend", to, "err", err)
		return netip.Addr{}
	}
	src, _ := netip.AddrFromSlice(routes[0].Src)
	return src.Unmap()
}

// refreshSources asks the kernel again for our addresses towards backends. Flows keep the one they have.
func (s *services) refreshSources() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for at, b := range s.backends {
		if b.tables == 0 {
			continue
		}
		src := s.sourceTowards(at.Addr())
		if src == b.source {
			continue
		}
		if err := s.objects.Backends.Put(b.id, toBackend(at, src)); err != nil {
			s.log.Error("source address towards backend not changed", "backend", at, "err", err)
			continue
		}
		s.log.Info("source address towards backend changed", "backend", at, "from", b.source, "to", src)
		b.source = src
	}
}

// names returns the service of each frontend id and the address of each backend id.
func (s *services) names() (frontends map[uint32]lb.Frontend, service map[uint32]string, backends map[uint32]netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	frontends, service, backends = map[uint32]lb.Frontend{}, map[uint32]string{}, map[uint32]netip.AddrPort{}
	for f, state := range s.frontends {
		frontends[state.id], service[state.id] = f, state.service
	}
	for at, b := range s.backends {
		backends[b.id] = at
	}
	return frontends, service, backends
}
