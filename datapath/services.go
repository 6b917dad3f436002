package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/lb"
)

// Limits of the maps (bpf/maps.h).
const (
	maxFrontends = 65536
	maxBackends  = 131072
)

// services keeps frontends, their tables, backends and VIPs in the kernel.
type services struct {
	objects *syObjects
	pins    *pins
	log     *slog.Logger

	mu        sync.Mutex // guards all below
	frontends map[lb.Frontend]*frontend
	vips      map[netip.Addr]map[uint32]*frontend // by frontend id
	free      []uint32                            // frontend ids
	backends  *backends
	sets      *frontendSets
}

// frontend is one Frontend in the kernel. An earlier agent's has neither service nor backends.
type frontend struct {
	id       uint32
	is       lb.Frontend
	method   uint8
	service  string
	up       bool
	backends []uint32         // that it refers to
	dead     []netip.AddrPort // whose flows were ended
}

// openServices reads back what an earlier agent left.
func openServices(o *syObjects, pins *pins, log *slog.Logger) (*services, error) {
	s := &services{objects: o, pins: pins, log: log, frontends: map[lb.Frontend]*frontend{}, vips: map[netip.Addr]map[uint32]*frontend{}}
	used, err := s.readFrontends()
	if err != nil {
		return nil, fmt.Errorf("read the frontends: %w", err)
	}
	for id := uint32(maxFrontends); id > 0; id-- {
		if !used[id-1] {
			s.free = append(s.free, id-1)
		}
	}
	if s.backends, err = openBackends(o, log); err != nil {
		return nil, err
	}
	s.sets, err = openSets(o)
	return s, err
}

func (s *services) readFrontends() (used map[uint32]bool, err error) {
	byID := map[uint32]*frontend{}
	note := func(part lb.Frontend, value syFrontend) {
		f, ok := byID[value.Id]
		if !ok {
			f = &frontend{id: value.Id, is: part, method: value.Method, up: true}
			byID[value.Id] = f
		}
		f.is.Port, f.is.Last = min(f.is.Port, part.Port), max(f.is.Last, part.Last)
	}
	var key syFrontendKey
	var prefix syRangeKey
	var value syFrontend
	single := s.objects.SyFrontends.Iterate()
	for single.Next(&key, &value) {
		note(fromFrontendKey(key), value)
	}
	ranges := s.objects.SyPortRanges.Iterate()
	for ranges.Next(&prefix, &value) {
		note(fromRangeKey(prefix), value)
	}
	used = map[uint32]bool{}
	for id, f := range byID {
		used[id] = true
		s.frontends[f.is] = f
		s.ofVIP(f.is.VIP)[id] = f
	}
	return used, errors.Join(single.Err(), ranges.Err())
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
	plan  *lb.FrontendPlan
	f     *frontend
	isNew bool
	value syFrontend
	ids   []uint32 // of its targets
	older []uint32 // of what its table remembers beyond them
	// anywhere are the ids of machines that may have any flow.
	anywhere []uint32
	table    *ebpf.Map
	dead     []uint32 // ids of backends that are newly dead
	turn     bool     // the method is another one: flows by the old one are over
	err      error
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
			l.err = s.putFrontend(l.plan.Frontend, l.value)
		}
		s.settle(l)
	}
	return landings
}

// prepare makes everything for p that no packet sees yet.
func (s *services) prepare(p *lb.FrontendPlan) *landing {
	l := &landing{plan: p}
	if l.f, l.isNew, l.err = s.frontend(p.Frontend); l.err != nil {
		return l
	}
	if l.value, l.err = describe(p, l.f.id); l.err != nil {
		return l
	}
	l.turn = !l.isNew && l.f.method != l.value.Method
	if l.ids, l.err = s.backends.use(p); l.err != nil {
		return l
	}
	if l.anywhere, l.err = s.backends.anywhere(p); l.err != nil {
		return l
	}
	if l.err = s.sets.add(l.f.id, p, l.ids); l.err != nil {
		return l
	}
	l.table, l.err = s.newTable(l)
	return l
}

// newTable makes the table of a plan. Flows by nat find their backend in the flow table; others must know what their slot had.
func (s *services) newTable(l *landing) (*ebpf.Map, error) {
	oneWay := l.plan.Method != lb.MethodNAT
	path := s.pins.table(l.f.id)
	var was table
	if oneWay && !l.isNew && !l.turn {
		var err error
		if was, err = readTable(path); err != nil {
			s.log.Warn("table of an earlier plan not read; flows in slots that change hands may break", "frontend", l.plan.Frontend, "err", err)
		}
	}
	next := newSlots(l.plan, l.ids, was, l.anywhere, s.done(l.plan))
	if oneWay {
		l.older = next.remembered()
		s.backends.keep(l.older)
	}
	table, err := newTable(next)
	if err != nil {
		return nil, err
	}
	if oneWay {
		err = pinTable(path, table)
	}
	return table, err
}

// done returns what reports whether a backend has no flows any more that a plan would have go on.
func (s *services) done(p *lb.FrontendPlan) func(id uint32) bool {
	known := map[uint32]bool{}
	note := func(list []netip.AddrPort) {
		for _, at := range list {
			if b := s.backends.byAddr[at]; b != nil {
				known[b.id] = true
			}
		}
	}
	if p.NodeForwarding.Enabled {
		for _, m := range p.Nodes {
			note([]netip.AddrPort{netip.AddrPortFrom(m.Addr, 0)})
		}
		return func(id uint32) bool { return !known[id] }
	}
	note(p.Down)
	return func(id uint32) bool { return known[id] || s.backends.byID[id] == nil }
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
	_, err := s.objects.SyTables.BatchUpdate(ids, tables, nil)
	for _, l := range landings {
		if l.table == nil {
			continue
		}
		if err != nil && l.err == nil { // a kernel without batches of maps
			l.err = s.objects.SyTables.Put(l.f.id, l.table)
		}
		l.table.Close()
	}
}

// putFrontend makes packets find a frontend.
func (s *services) putFrontend(f lb.Frontend, value syFrontend) error {
	if f.Last == 0 {
		return s.objects.SyFrontends.Put(toFrontendKey(f), value)
	}
	for _, k := range toRangeKeys(f) {
		if err := s.objects.SyPortRanges.Put(k, value); err != nil {
			return err
		}
	}
	return nil
}

func (s *services) deleteFrontend(f lb.Frontend) error {
	if f.Last == 0 {
		return ignoreMissing(s.objects.SyFrontends.Delete(toFrontendKey(f)))
	}
	for _, k := range toRangeKeys(f) {
		if err := ignoreMissing(s.objects.SyPortRanges.Delete(k)); err != nil {
			return err
		}
	}
	return nil
}

// settle takes note of what was put, or gives back what it took when it was not.
func (s *services) settle(l *landing) {
	if l.err != nil {
		s.backends.unuse(l.ids)
		s.backends.unuse(l.older)
		if l.isNew && l.f != nil {
			s.free = append(s.free, l.f.id)
		}
		return
	}
	f := l.f
	s.backends.unuse(f.backends)
	f.service, f.backends, f.method, f.up = l.plan.Service, slices.Concat(l.ids, l.older), l.value.Method, len(l.ids) > 0
	s.frontends[l.plan.Frontend] = f
	for _, at := range l.plan.Down {
		if b := s.backends.byAddr[at]; b != nil && !slices.Contains(f.dead, at) {
			l.dead = append(l.dead, b.id)
		}
	}
	f.dead = l.plan.Down
	s.ofVIP(l.plan.VIP)[f.id] = f
	l.err = errors.Join(s.sets.trim(f.id, l.plan, l.ids), s.setVIP(l.plan.VIP))
}

func (s *services) frontend(f lb.Frontend) (_ *frontend, isNew bool, err error) {
	if known, ok := s.frontends[f]; ok {
		return known, false, nil
	}
	if len(s.free) == 0 {
		return nil, false, fmt.Errorf("there are %d frontends, and no room for more", maxFrontends)
	}
	id := s.free[len(s.free)-1]
	if err := forgetCounts(s.objects.SyFeCounters, id); err != nil {
		return nil, false, err
	}
	s.free = s.free[:len(s.free)-1]
	return &frontend{id: id, is: f}, true, nil
}

// setVIP makes the VIP known while it has a frontend, and up while one of them has a backend.
func (s *services) setVIP(addr netip.Addr) error {
	var vip syVip
	for _, f := range s.vips[addr] {
		if f.up {
			vip.Up = 1
		}
		if f.is.Last != 0 {
			vip.Ranges = 1
		}
	}
	if len(s.vips[addr]) > 0 {
		return s.objects.SyVips.Put(toAddr(addr), vip)
	}
	delete(s.vips, addr)
	return ignoreMissing(s.objects.SyVips.Delete(toAddr(addr)))
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
	if err := s.deleteFrontend(f); err != nil {
		return 0, err
	}
	delete(s.frontends, f)
	delete(s.ofVIP(f.VIP), state.id)
	s.backends.unuse(state.backends)
	if err := ignoreMissing(s.objects.SyTables.Delete(state.id)); err != nil {
		s.log.Warn("table not removed", "frontend", f, "err", err)
	}
	if err := os.Remove(s.pins.table(state.id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("table not unpinned", "frontend", f, "err", err)
	}
	return state.id, errors.Join(s.sets.trim(state.id, nil, nil), s.setVIP(f.VIP))
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
	s.backends.release(unused)
}

// setLoads corrects the number of open flows of each backend.
func (s *services) setLoads(open map[uint32]uint32) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id := range s.backends.byID {
		if err := s.objects.SyBackendLoad.Put(id, open[id]); err != nil {
			return err
		}
	}
	return nil
}

// refreshSources asks the kernel again for our addresses towards backends.
func (s *services) refreshSources() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.backends.refresh()
}

// names returns the service of each frontend id and the address of each backend id.
func (s *services) names() (frontends map[uint32]lb.Frontend, service map[uint32]string, backends map[uint32]netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	frontends, service, backends = map[uint32]lb.Frontend{}, map[uint32]string{}, map[uint32]netip.AddrPort{}
	for f, state := range s.frontends {
		frontends[state.id], service[state.id] = f, state.service
	}
	for at, b := range s.backends.byAddr {
		backends[b.id] = at
	}
	return frontends, service, backends
}
