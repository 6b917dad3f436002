package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// Limits of the maps (bpf/maps.h).
const (
	maxFrontends = 65536
	maxBackends  = 131072
)

// services maintains frontends, their tables, backends and VIPs in the kernel.
type services struct {
	objects  *bpf.Objects
	counters *chunked // traffic of frontends
	slots    *slotStore
	filter   *addrFilter
	log      *slog.Logger

	mu        sync.Mutex // guards all below
	frontends map[lb.Frontend]*frontend
	changes   uint64 // of frontends
	named     named
	vips      map[netip.Addr]map[uint32]*frontend // by frontend id
	ended     map[target]endedFlows
	free      []uint32 // frontend ids
	backends  *backends
	entries   *frontendEntries
}

// frontend is one Frontend in the kernel. One that an earlier agent installed has neither service nor backends here.
type frontend struct {
	id       uint32
	is       lb.Frontend
	value    bpf.Frontend // in the kernel
	service  string
	up       bool
	backends []uint32           // that it refers to
	down     []netip.AddrPort   // whose flows were ended
	plan     *lb.FrontendPlan   // in force
	former   []*lb.FrontendPlan // of earlier times, to whose backends the frontend may still have flows; see gone
	changed  time.Time          // by nat: when a slot got another backend; zero: no slot lists an earlier one
}

// openServices reads the maps of an earlier agent.
func openServices(o *bpf.Objects, chunks *chunks, filter *addrFilter, log *slog.Logger) (*services, error) {
	s := &services{
		objects: o, counters: chunks.frontendCounters, filter: filter, log: log,
		frontends: map[lb.Frontend]*frontend{}, vips: map[netip.Addr]map[uint32]*frontend{},
		ended: map[target]endedFlows{},
	}
	used, err := s.readFrontends()
	if err != nil {
		return nil, fmt.Errorf("read the frontends: %w", err)
	}
	var values []bpf.Frontend
	for _, f := range s.frontends {
		values = append(values, f.value)
	}
	s.slots = openSlotStore(chunks.slots, values, log)
	for id := uint32(maxFrontends); id > 0; id-- {
		if !used[id-1] {
			s.free = append(s.free, id-1)
		}
	}
	if s.backends, err = openBackends(o, chunks, filter, log); err != nil {
		return nil, err
	}
	if s.entries, err = openFrontendEntries(o); err != nil {
		return nil, err
	}
	return s, s.openEnded()
}

func (s *services) readFrontends() (used map[uint32]bool, err error) {
	byID := map[uint32]*frontend{}
	note := func(part lb.Frontend, value bpf.Frontend) {
		f, ok := byID[value.Id]
		if !ok {
			f = &frontend{id: value.Id, is: part, value: value, up: true}
			byID[value.Id] = f
		}
		f.is.Port, f.is.Last = min(f.is.Port, part.Port), max(f.is.Last, part.Last)
	}
	var key bpf.FrontendKey
	var prefix bpf.RangeKey
	var value bpf.Frontend
	single := s.objects.SyFrontends.Iterate()
	for single.Next(&key, &value) {
		note(fromFrontendKey(key), value)
	}
	ranges := s.objects.SyPortRanges.Iterate()
	for ranges.Next(&prefix, &value) {
		note(fromRangeKey(prefix), value)
	}
	used = map[uint32]bool{}
	err = errors.Join(single.Err(), ranges.Err())
	for id, f := range byID {
		used[id] = true
		s.frontends[f.is] = f
		if len(s.vips[f.is.VIP]) == 0 {
			err = errors.Join(err, s.filter.add(f.is.VIP, bpf.AddrVIP))
		}
		s.ofVIP(f.is.VIP)[id] = f
	}
	return used, err
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

// frontendUpdate is the change of one frontend to a plan, while put applies it.
type frontendUpdate struct {
	plan  *lb.FrontendPlan
	f     *frontend
	isNew bool
	value bpf.Frontend
	table []uint16 // of its targets
	ids   []uint32 // of its targets
	older []uint32 // of earlier backends that its table lists beside them
	// anyNode are the ids of nodes that may have any flow.
	anyNode       []uint32
	ended         int              // backends that this plan is the first to list as down
	methodChanged bool             // flows by the old method end
	settled       bool             // no half-open flow refers to an earlier backend
	gone          []netip.AddrPort // backends whose flows end although the plan does not list them as down
	first         bool             // the frontend had no plan of this agent, or no backend, before
	err           error
}

// put applies plans, and returns the result of each. The order is backends, table, frontend, VIP, so that no entry
// refers to a missing one. About later more targets follow with other calls.
func (s *services) put(plans []*lb.FrontendPlan, later int, tables tables) []*frontendUpdate {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.putLocked(plans, later, false, tables)
}

func (s *services) putLocked(plans []*lb.FrontendPlan, later int, settled bool, tables tables) []*frontendUpdate {
	if len(plans) > 1 || later > 0 {
		s.reserve(plans, later)
	}
	updates, room := make([]*frontendUpdate, len(plans)), &room{tables: s.shared(), count: s.places}
	for i, p := range plans {
		updates[i] = s.prepare(&frontendUpdate{plan: p, settled: settled, table: tables.of(p)}, room)
	}
	for _, u := range updates {
		if u.err == nil {
			u.err = s.putFrontend(u.plan.Frontend, u.value)
		}
		s.complete(u)
	}
	s.slots.wake()
	return updates
}

// prepare writes everything for p that no packet reads yet.
func (s *services) prepare(u *frontendUpdate, room *room) *frontendUpdate {
	p := u.plan
	if u.err = room.admit(p, s.frontends[p.Frontend]); u.err != nil {
		return u
	}
	if u.f, u.isNew, u.err = s.frontend(p.Frontend); u.err != nil {
		return u
	}
	if u.value, u.err = encodeFrontend(p, u.f.id); u.err != nil {
		return u
	}
	u.methodChanged = !u.isNew && u.f.value.Method != u.value.Method
	if u.ids, u.err = s.backends.use(p); u.err != nil {
		return u
	}
	if u.anyNode, u.err = s.backends.anyNode(p); u.err != nil {
		return u
	}
	if u.err = s.entries.add(u.f.id, p, u.ids); u.err != nil {
		return u
	}
	u.err = s.writeTable(u)
	return u
}

// writeTable writes the table of a plan. Its slots list their earlier backends, to which flows may still belong: with
// nat those that were half-open when the slot got another backend.
func (s *services) writeTable(u *frontendUpdate) error {
	var was table
	if !u.isNew && !u.methodChanged && !u.settled {
		var err error
		if was, err = s.slots.read(u.f.value); err != nil {
			s.log.Warn("table of an earlier plan not read; flows in slots that get another backend may break",
				"frontend", u.plan.Frontend, "err", err)
		}
	}
	u.gone = s.gone(u, was)
	rehashed := len(was.slots) > 0 && selection(u.f.value) != selection(u.value)
	next := newSlots(u.plan, u.table, u.ids, was, rehashed, u.anyNode, s.withoutFlows(u))
	switch {
	case rehashed:
		u.value.OlderAlgorithm = u.f.value.Algorithm
	case len(was.slots) == len(next.slots):
		u.value.OlderAlgorithm = u.f.value.OlderAlgorithm
	}
	u.value.Changed = u.f.value.Changed
	if !slices.EqualFunc(was.slots, next.slots, func(a, b slot) bool { return a.backend == b.backend }) || rehashed {
		u.value.Changed = tableClock(bpf.Uptime())
	}
	u.older = next.earlierIDs()
	s.backends.keep(u.older)
	return s.slots.write(next, &u.value)
}

// withoutFlows returns a function that reports whether a backend has no flows that continue after an update.
func (s *services) withoutFlows(u *frontendUpdate) func(id uint32) bool {
	p, known := u.plan, map[uint32]bool{}
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
	note(u.gone)
	return func(id uint32) bool { return known[id] || s.backends.byID[id] == nil }
}

// putFrontend makes packets find a frontend.
func (s *services) putFrontend(f lb.Frontend, value bpf.Frontend) error {
	if err := s.objects.SyFrontendVips.Put(value.Id, bpf.ToAddr(f.VIP)); err != nil {
		return err
	}
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

// complete records the result of an update; after an error, it releases the ids that the update took.
func (s *services) complete(u *frontendUpdate) {
	if u.err != nil {
		if u.plan.Last == 0 { // some prefixes of a range may refer to the new table
			s.slots.retire(u.value)
		}
		s.backends.unuse(u.ids)
		s.backends.unuse(u.older)
		if u.isNew && u.f != nil {
			s.free = append(s.free, u.f.id)
		}
		return
	}
	f := u.f
	u.first = f.plan == nil || !f.up
	if f.plan != nil && f.plan.Service != u.plan.Service {
		f.former = append(f.former, f.plan)
	}
	s.backends.unuse(f.backends)
	f.service, f.backends = u.plan.Service, slices.Concat(u.ids, u.older)
	if !u.isNew {
		s.slots.retire(f.value)
	}
	f.value, f.up = u.value, len(u.ids) > 0
	f.plan, f.changed = u.plan, time.Time{}
	if len(u.older) > 0 && settles(u.plan) {
		f.changed = time.Now()
	}
	s.frontends[u.plan.Frontend] = f
	s.changes++
	if u.ended, u.err = s.endDown(f, slices.Concat(u.plan.Down, u.gone)); u.err == nil {
		f.former = nil
	}
	if len(s.vips[u.plan.VIP]) == 0 {
		u.err = errors.Join(u.err, s.filter.add(u.plan.VIP, bpf.AddrVIP))
	}
	s.ofVIP(u.plan.VIP)[f.id] = f
	u.err = errors.Join(u.err, s.entries.trim(f.id, u.plan, u.ids), s.setVIP(u.plan.VIP))
}

func (s *services) frontend(f lb.Frontend) (_ *frontend, isNew bool, err error) {
	if known, ok := s.frontends[f]; ok {
		return known, false, nil
	}
	if len(s.free) == 0 {
		return nil, false, fmt.Errorf("%w: frontend map full (%d entries)", lb.ErrRefused, maxFrontends)
	}
	id := s.free[len(s.free)-1]
	if err := resetCounts(s.counters, id); err != nil {
		return nil, false, err
	}
	s.free = s.free[:len(s.free)-1]
	return &frontend{id: id, is: f}, true, nil
}

// setVIP keeps the entry of a VIP while it has a frontend; it is up while one of them has a backend.
func (s *services) setVIP(addr netip.Addr) error {
	var vip bpf.VIP
	for _, f := range s.vips[addr] {
		if f.up {
			vip.Up = 1
		}
		if f.is.Last != 0 {
			vip.Ranges = 1
		}
	}
	if len(s.vips[addr]) > 0 {
		return s.objects.SyVips.Put(bpf.ToAddr(addr), vip)
	}
	delete(s.vips, addr)
	return errors.Join(ignoreMissing(s.objects.SyVips.Delete(bpf.ToAddr(addr))), s.filter.remove(addr, bpf.AddrVIP))
}

// ofVIP returns the frontends of a VIP, by id.
func (s *services) ofVIP(addr netip.Addr) map[uint32]*frontend {
	if s.vips[addr] == nil {
		s.vips[addr] = map[uint32]*frontend{}
	}
	return s.vips[addr]
}

// remove removes a frontend and returns its id. The caller ends its flows, and then releases the id.
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
	s.changes++
	if outer := s.frontends[withoutDecap(f)]; outer != nil && state.plan != nil {
		outer.former = append(outer.former, state.plan) // its flows have the id of the outer one
	}
	delete(s.ofVIP(f.VIP), state.id)
	s.backends.unuse(state.backends)
	s.slots.retire(state.value)
	return state.id, errors.Join(s.entries.trim(state.id, nil, nil), s.setVIP(f.VIP))
}

// release frees the ids of removed frontends, and of backends that neither a table nor a flow uses.
func (s *services) release(frontends []uint32, unused func(backend uint32) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, frontends...)
	ended := s.mayHaveEnded()
	s.backends.release(func(id uint32) bool { return unused(id) && !ended(id) })
}

// tableClock is table_clock of bpf/frontend.h at this uptime.
func tableClock(uptime time.Duration) uint16 { return uint16(uptime >> 29) }
