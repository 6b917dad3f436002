package table

import (
	"context"
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

// MaxFrontends and maxBackends are map sizes (bpf/maps.h).
const (
	MaxFrontends = 65536
	maxBackends  = 131072
)

// Services maintains frontends, their tables, backends and VIPs in the kernel.
type Services struct {
	objects  *bpf.Objects
	counters *Chunked // traffic of frontends
	rules    sourceRules
	prefixes int // entries of sy_port_ranges that the frontends need
	Slots    *slotStore
	Filter   *Filter
	log      *slog.Logger

	Mu        sync.Mutex // guards all below
	Frontends map[lb.Frontend]*frontend
	changes   uint64 // counts changes of Frontends
	named     named
	vips      map[netip.Addr]map[uint32]*frontend // inner maps by frontend id
	Ended     map[Target]EndedFlows
	Free      []uint32 // unused frontend ids
	Backends  *backends
	entries   *frontendEntries
}

// frontend is one frontend in the kernel. If a previous agent installed it, its service and backends are empty.
type frontend struct {
	ID       uint32
	is       lb.Frontend
	Value    bpf.Frontend // in the kernel
	service  string
	up       bool
	backends []uint32           // that its tables refer to
	down     []netip.AddrPort   // whose flows have ended
	Plan     *lb.FrontendPlan   // active plan; nil if it is a previous agent's
	former   []*lb.FrontendPlan // previous plans whose backends may have flows; see gone
	changed  time.Time          // when a slot last got another backend, or zero if there is nothing to Settle
}

// Open reads a previous agent's maps.
func Open(o *bpf.Objects, chunks *Chunks, filter *Filter, log *slog.Logger) (*Services, error) {
	s := &Services{
		objects: o, counters: chunks.FrontendCounters, Filter: filter, log: log,
		Frontends: map[lb.Frontend]*frontend{}, vips: map[netip.Addr]map[uint32]*frontend{},
		Ended: map[Target]EndedFlows{}, rules: sourceRules{problem: "not read"},
	}
	byID, err := s.readFrontends()
	if err != nil {
		return nil, fmt.Errorf("read the frontends: %w", err)
	}
	s.Slots, s.Free = openSlotStore(chunks.Slots, byID, log), freeIDs(MaxFrontends, byID)
	if s.Backends, err = openBackends(o, chunks, filter, log); err != nil {
		return nil, err
	}
	if s.entries, err = openFrontendEntries(o); err != nil {
		return nil, err
	}
	return s, s.openEnded()
}

func (s *Services) readFrontends() (byID map[uint32]*frontend, err error) {
	byID = map[uint32]*frontend{}
	note := func(part lb.Frontend, value bpf.Frontend) {
		f, ok := byID[value.Id]
		if !ok {
			f = &frontend{ID: value.Id, is: part, Value: value, up: true}
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
	err = errors.Join(single.Err(), ranges.Err())
	for id, f := range byID {
		s.Frontends[f.is] = f
		s.prefixes += prefixesOf(f.is)
		if len(s.vips[f.is.VIP]) == 0 {
			err = errors.Join(err, s.Filter.Add(f.is.VIP, bpf.AddrVIP))
		}
		s.ofVIP(f.is.VIP)[id] = f
	}
	return byID, err
}

// Held returns the frontends in the kernel.
func (s *Services) Held() []lb.Frontend {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	held := make([]lb.Frontend, 0, len(s.Frontends))
	for f := range s.Frontends {
		held = append(held, f)
	}
	return held
}

// Update is the change of one frontend to a plan. Put fills in all but Plan and Table.
type Update struct {
	Plan     *lb.FrontendPlan
	Table    []uint16 // result of Plan.Table: target index of each slot
	Frontend *frontend
	isNew    bool
	Value    bpf.Frontend
	ids      []uint32 // of its targets
	older    []uint32 // of previous backends that its table also lists
	// anyNode holds the ids of nodes that may have any of the flows.
	anyNode       []uint32
	Ended         int              // number of backends whose flows this plan ended
	MethodChanged bool             // flows with the old method end
	settled       bool             // no half-open flow refers to a previous backend
	gone          []netip.AddrPort // backends whose flows end although the plan does not list them as down
	First         bool             // the frontend had no plan from this agent, or no backend, before
	Err           error
}

// Put applies updates. It writes backends, table, frontend and VIP in this order, so no entry refers to a missing one.
// later is the approximate number of targets that later calls will add.
func (s *Services) Put(updates []*Update, later int) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.putLocked(updates, later)
}

func (s *Services) putLocked(updates []*Update, later int) {
	if len(updates) > 1 || later > 0 {
		s.reserve(updates, later)
	}
	room := &room{tables: s.shared(), count: s.places}
	for _, u := range updates {
		u.Err = s.prepare(u, room)
	}
	for _, u := range updates {
		if u.Err == nil {
			u.Err = s.putFrontend(u.Plan.Frontend, u.Value, u.isNew)
		}
		s.complete(u)
	}
	s.Slots.wake()
}

// prepare writes everything that the plan needs and packets cannot see yet.
func (s *Services) prepare(u *Update, room *room) (err error) {
	p := u.Plan
	if err := room.admit(p, s.Frontends[p.Frontend]); err != nil {
		return err
	}
	if u.Frontend, u.isNew, err = s.frontend(p.Frontend); err != nil {
		return err
	}
	if u.Value, err = encodeFrontend(p, u.Frontend.ID); err != nil {
		return err
	}
	u.MethodChanged = !u.isNew && u.Frontend.Value.Method != u.Value.Method
	if u.ids, err = s.Backends.use(p); err != nil {
		return err
	}
	if u.anyNode, err = s.Backends.anyNode(p); err != nil {
		return err
	}
	if err := s.entries.add(u.Frontend.ID, p, u.ids); err != nil {
		return err
	}
	return s.writeTable(u)
}

// writeTable writes a plan's table. Its slots list their previous backends, which may still have flows: with nat, flows
// that were half-open when the slot's backend changed.
func (s *Services) writeTable(u *Update) error {
	var was Table
	if !u.isNew && !u.MethodChanged && !u.settled {
		var err error
		if was, err = s.Slots.Read(u.Frontend.Value); err != nil {
			s.log.Warn("previous table not read; flows in slots that get another backend may break",
				"frontend", u.Plan.Frontend, "err", err)
		}
	}
	u.gone = s.gone(u, was)
	rehashed := len(was.Slots) > 0 && selection(u.Frontend.Value) != selection(u.Value)
	next := newSlots(u.Plan, u.Table, u.ids, was, rehashed, u.anyNode, s.withoutFlows(u))
	switch {
	case rehashed:
		u.Value.OlderAlgorithm = u.Frontend.Value.Algorithm
	case len(was.Slots) == len(next.Slots):
		u.Value.OlderAlgorithm = u.Frontend.Value.OlderAlgorithm
	}
	u.Value.Changed = u.Frontend.Value.Changed
	if !slices.EqualFunc(was.Slots, next.Slots, func(a, b Slot) bool { return a.Backend == b.Backend }) || rehashed {
		u.Value.Changed = TableClock(bpf.Uptime())
	}
	u.older = next.ids(false)
	s.Backends.keep(u.older)
	return s.Slots.Write(next, &u.Value)
}

// withoutFlows returns a function that reports whether a backend has no flows that continue after an update.
func (s *Services) withoutFlows(u *Update) func(id uint32) bool {
	p, known := u.Plan, map[uint32]bool{}
	note := func(list []netip.AddrPort) {
		for _, at := range list {
			if b := s.Backends.ByAddr[at]; b != nil {
				known[b.ID] = true
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
	return func(id uint32) bool { return known[id] || s.Backends.ByID[id] == nil }
}

// complete records the result of an update. After an error, it releases the ids that the update used.
func (s *Services) complete(u *Update) {
	if u.Err != nil {
		if u.Plan.Last == 0 || u.isNew { // some prefixes of a range may refer to the new table
			s.Slots.Retire(u.Value)
		}
		s.Backends.unuse(u.ids)
		s.Backends.unuse(u.older)
		if u.isNew && u.Frontend != nil {
			s.Free = append(s.Free, u.Frontend.ID)
			s.prefixes -= prefixesOf(u.Plan.Frontend)
		}
		return
	}
	f := u.Frontend
	u.First = f.Plan == nil || !f.up
	if f.Plan != nil && f.Plan.Service != u.Plan.Service {
		f.former = append(f.former, f.Plan)
	}
	s.Backends.unuse(f.backends)
	f.service, f.backends = u.Plan.Service, slices.Concat(u.ids, u.older)
	if !u.isNew {
		s.Slots.Retire(f.Value)
	}
	f.Value, f.up = u.Value, len(u.ids) > 0
	f.Plan, f.changed = u.Plan, time.Time{}
	if len(u.older) > 0 && settles(u.Plan) {
		f.changed = time.Now()
	}
	s.Frontends[u.Plan.Frontend] = f
	s.changes++
	if u.Ended, u.Err = s.endDown(f, slices.Concat(u.Plan.Down, u.gone)); u.Err == nil {
		f.former = nil
	}
	if len(s.vips[u.Plan.VIP]) == 0 {
		u.Err = errors.Join(u.Err, s.Filter.Add(u.Plan.VIP, bpf.AddrVIP))
	}
	s.ofVIP(u.Plan.VIP)[f.ID] = f
	u.Err = errors.Join(u.Err, s.entries.trim(f.ID, u.Plan, u.ids), s.setVIP(u.Plan.VIP))
}

func (s *Services) frontend(f lb.Frontend) (_ *frontend, isNew bool, err error) {
	if known, ok := s.Frontends[f]; ok {
		return known, false, nil
	}
	if len(s.Free) == 0 {
		return nil, false, fmt.Errorf("%w: frontend map full (%d entries)", lb.ErrRefused, MaxFrontends)
	}
	prefixes := prefixesOf(f)
	if s.prefixes+prefixes >= MaxFrontends { // some kernels cannot replace an entry of a full map
		return nil, false, fmt.Errorf("%w: map of port ranges full (%d entries)", lb.ErrRefused, MaxFrontends)
	}
	id := s.Free[len(s.Free)-1]
	if err := resetCounts(s.counters, id, noTraffic()); err != nil {
		return nil, false, err
	}
	s.Free, s.prefixes = s.Free[:len(s.Free)-1], s.prefixes+prefixes
	return &frontend{ID: id, is: f}, true, nil
}

// Remove removes a frontend and returns its id. The caller must end its flows and then release the id.
func (s *Services) Remove(f lb.Frontend) (id uint32, err error) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	state, ok := s.Frontends[f]
	if !ok {
		return 0, nil
	}
	if err := s.deleteFrontend(f, state.ID); err != nil {
		return 0, err
	}
	delete(s.Frontends, f)
	s.prefixes -= prefixesOf(f)
	s.changes++
	if outer := s.Frontends[withoutDecap(f)]; outer != nil && state.Plan != nil {
		outer.former = append(outer.former, state.Plan) // the keys of its flows contain the outer frontend's id
	}
	delete(s.ofVIP(f.VIP), state.ID)
	s.Backends.unuse(state.backends)
	s.Slots.Retire(state.Value)
	return state.ID, errors.Join(s.entries.trim(state.ID, nil, nil), s.setVIP(f.VIP))
}

// Release frees the ids of removed frontends, and of backends that no table or flow uses.
func (s *Services) Release(frontends []uint32, unused func(backend uint32) bool) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	s.Free = append(s.Free, frontends...)
	ended := map[uint32]bool{} // backends with flows that may still be in the tables
	for t := range s.Ended {
		ended[t.Backend] = true
	}
	s.Backends.release(func(id uint32) bool { return unused(id) && !ended[id] })
}

// TableClock returns the value of table_clock (bpf/frontend.h) at an uptime.
func TableClock(uptime time.Duration) uint16 { return uint16(uptime >> 29) }

// Run reserves words for tables in advance, and frees retired words, until ctx ends.
func (s *Services) Run(ctx context.Context) error { return s.Slots.Run(ctx) }

// Close unmaps the tables. The programs keep using them.
func (s *Services) Close() error { return s.Slots.window.close() }
