package datapath

import (
	"fmt"
	"slices"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// Values of a slot that are no ids (bpf/types.h).
const (
	noBackend   = 0x7fffffff
	anyBackend  = 0x7ffffffe // in the list of a slot: the older table follows
	previousMax = 3
)

// slot has the id of a backend, and those of earlier ones that may still have flows.
type slot struct {
	backend  uint32
	previous [previousMax]uint32
}

func (s slot) changed() bool { return s.previous[0] != noBackend }

// table is the content of a frontend's table.
type table struct {
	slots []slot
	older []slot // of the last table of another size, if slots refer to it
}

// tables are the results of lb.FrontendPlan.Table of plans.
type tables map[*lb.FrontendPlan][]uint16

// of returns the table of a plan; it computes one that t does not have.
func (t tables) of(p *lb.FrontendPlan) []uint16 {
	if table, ok := t[p]; ok {
		return table
	}
	return p.Table()
}

// tables computes the tables of plans before anything is locked or written. It returns the plans without those for
// which that is not possible, which it adds to failed.
func (d *Datapath) tables(plans []*lb.FrontendPlan, failed map[lb.Frontend]error) ([]*lb.FrontendPlan, tables) {
	done, t := make([]*lb.FrontendPlan, 0, len(plans)), make(tables, len(plans))
	for _, p := range plans {
		var table []uint16
		if d.o.Boundary.Do(lb.PartTable, p.Service+" "+p.Frontend.String(), func() { table = p.Table() }) {
			done, t[p] = append(done, p), table
		} else {
			failed[p.Frontend] = fmt.Errorf("%w: its table cannot be computed", lb.ErrRefused)
		}
	}
	return done, t
}

// newSlots returns the table of a plan, whose targets have these ids. Each slot lists its earlier backends that may
// still have flows, and after them the nodes that may have any flow.
func newSlots(
	p *lb.FrontendPlan, targets []uint16, ids []uint32, was table, rehashed bool, anyNode []uint32,
	expired func(id uint32) bool,
) table {
	t := table{slots: make([]slot, len(targets))}
	for i, target := range targets {
		t.slots[i].backend = ids[target]
	}
	if len(t.slots) == 0 && p.NodeForwarding.Enabled { // packets of existing flows still need their node
		t.slots = make([]slot, max(len(was.slots), 1))
		for i := range t.slots {
			t.slots[i].backend = noBackend
		}
	}
	sameSize := len(was.slots) == len(t.slots) && !rehashed
	refers := false
	var before []uint32
	for i := range t.slots {
		before = before[:0]
		switch {
		case p.NodeForwarding.AnyNode && sameSize:
			before = append(append(before, was.slots[i].backend), anyNode...)
		case p.NodeForwarding.AnyNode:
			before = append(before, anyNode...)
		case len(was.slots) == 0:
		case sameSize:
			before = append(append(before, was.slots[i].backend), was.slots[i].previous[:]...)
		default: // the flows of a slot came from several slots
			before = append(before, anyBackend)
		}
		t.slots[i].previous = earlierBackends(t.slots[i].backend, before, expired)
		refers = refers || slices.Contains(t.slots[i].previous[:], anyBackend)
	}
	switch {
	case !refers:
	case sameSize:
		t.older = withoutExpired(was.older, expired)
	default:
		t.older = withoutExpired(was.slots, expired)
	}
	if len(targets) == 0 && !slices.ContainsFunc(t.slots, slot.changed) {
		return table{}
	}
	return t
}

// selection is what decides which slot a packet has.
func selection(f bpf.Frontend) [2]bool {
	a := f.Algorithm
	return [2]bool{a == uint8(bpf.AlgorithmSourceHash),
		f.Affinity == 0 && (a == uint8(bpf.AlgorithmSourceHash) || a == uint8(bpf.AlgorithmFlowHash))}
}

// earlierBackends returns the earlier backends of a slot, the latest first.
func earlierBackends(
	backend uint32, before []uint32, expired func(id uint32) bool,
) (previous [previousMax]uint32) {
	n := 0
	for i := range previous {
		previous[i] = noBackend
	}
	for _, id := range before {
		known := id == noBackend || id == backend || slices.Contains(previous[:n], id)
		if n == len(previous) || known || id != anyBackend && expired(id) {
			continue
		}
		previous[n] = id
		n++
		if id == anyBackend {
			break
		}
	}
	return previous
}

// withoutExpired returns the slots of an older table without the backends that have no flows.
func withoutExpired(slots []slot, expired func(id uint32) bool) []slot {
	out := slices.Clone(slots)
	for i, s := range slots {
		if s.backend != noBackend && expired(s.backend) {
			out[i].backend = noBackend
		}
		unlisted := func(id uint32) bool { return id == anyBackend || expired(id) }
		out[i].previous = earlierBackends(out[i].backend, s.previous[:], unlisted)
	}
	return out
}

// ids returns those of all backends.
func (t table) ids() []uint32 { return t.collect(true) }

// earlierIDs returns the ids of all earlier backends.
func (t table) earlierIDs() []uint32 { return t.collect(false) }

func (t table) collect(current bool) (ids []uint32) {
	seen := map[uint32]bool{noBackend: true, anyBackend: true}
	note := func(id uint32) {
		if !seen[id] {
			seen[id] = true
			ids = append(ids, id)
		}
	}
	for _, s := range t.slots {
		if current {
			note(s.backend)
		}
		if !s.changed() {
			continue
		}
		for _, id := range s.previous {
			note(id)
		}
	}
	for _, s := range t.older {
		note(s.backend)
		for _, id := range s.previous {
			note(id)
		}
	}
	return ids
}
