package table

import (
	"slices"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// Values in a slot that are not ids (bpf/types.h), and the length of its list.
const (
	NoBackend   = 0x7fffffff
	AnyBackend  = 0x7ffffffe // in a slot's list: continue in the older table
	previousMax = 3
)

// Slot holds the id of a backend, and the ids of previous ones that may still have flows.
type Slot struct {
	Backend  uint32
	Previous [previousMax]uint32
}

// Changed reports whether previous backends may still have flows.
func (s Slot) Changed() bool { return s.Previous[0] != NoBackend }

// Table is the contents of a frontend's table.
type Table struct {
	Slots []Slot
	Older []Slot // of the last table of another size, if slots refer to it
}

// newSlots returns the table of a plan whose targets have these ids. Each slot lists its previous backends that may
// still have flows, followed by the nodes that may have any flow.
func newSlots(
	p *lb.FrontendPlan, targets []uint16, ids []uint32, was Table, rehashed bool, anyNode []uint32,
	expired func(id uint32) bool,
) Table {
	t := Table{Slots: make([]Slot, len(targets))}
	for i, target := range targets {
		t.Slots[i].Backend = ids[target]
	}
	if len(t.Slots) == 0 && p.NodeForwarding.Enabled { // packets of existing flows still need their node
		t.Slots = make([]Slot, max(len(was.Slots), 1))
		for i := range t.Slots {
			t.Slots[i].Backend = NoBackend
		}
	}
	sameSize := len(was.Slots) == len(t.Slots) && !rehashed
	refers := false
	var before []uint32
	for i := range t.Slots {
		before = before[:0]
		switch {
		case p.NodeForwarding.AnyNode && sameSize:
			before = append(append(before, was.Slots[i].Backend), anyNode...)
		case p.NodeForwarding.AnyNode:
			before = append(before, anyNode...)
		case len(was.Slots) == 0:
		case sameSize:
			before = append(append(before, was.Slots[i].Backend), was.Slots[i].Previous[:]...)
		default: // each slot's flows came from several slots
			before = append(before, AnyBackend)
		}
		t.Slots[i].Previous = earlierBackends(t.Slots[i].Backend, before, expired)
		refers = refers || slices.Contains(t.Slots[i].Previous[:], AnyBackend)
	}
	switch {
	case !refers:
	case sameSize:
		t.Older = withoutExpired(was.Older, expired)
	default:
		t.Older = withoutExpired(was.Slots, expired)
	}
	if len(targets) == 0 && !slices.ContainsFunc(t.Slots, Slot.Changed) {
		return Table{}
	}
	return t
}

// selection returns which inputs select a packet's slot. If they differ, so do the slots.
func selection(f bpf.Frontend) [2]bool {
	a := f.Algorithm
	return [2]bool{a == uint8(bpf.AlgorithmSourceHash),
		f.Affinity == 0 && (a == uint8(bpf.AlgorithmSourceHash) || a == uint8(bpf.AlgorithmFlowHash))}
}

// earlierBackends returns a slot's previous backends, the latest first.
func earlierBackends(
	backend uint32, before []uint32, expired func(id uint32) bool,
) (previous [previousMax]uint32) {
	n := 0
	for i := range previous {
		previous[i] = NoBackend
	}
	for _, id := range before {
		known := id == NoBackend || id == backend || slices.Contains(previous[:n], id)
		if n == len(previous) || known || id != AnyBackend && expired(id) {
			continue
		}
		previous[n] = id
		n++
		if id == AnyBackend {
			break
		}
	}
	return previous
}

// withoutExpired returns the slots of an older table without the backends that have no flows.
func withoutExpired(slots []Slot, expired func(id uint32) bool) []Slot {
	out := slices.Clone(slots)
	for i, s := range slots {
		if s.Backend != NoBackend && expired(s.Backend) {
			out[i].Backend = NoBackend
		}
		unlisted := func(id uint32) bool { return id == AnyBackend || expired(id) }
		out[i].Previous = earlierBackends(out[i].Backend, s.Previous[:], unlisted)
	}
	return out
}

// ids returns the ids of all previous backends in the table and, with current, of the slots' backends.
func (t Table) ids(current bool) (ids []uint32) {
	seen := map[uint32]bool{NoBackend: true, AnyBackend: true}
	note := func(id uint32) {
		if !seen[id] {
			seen[id] = true
			ids = append(ids, id)
		}
	}
	for _, s := range t.Slots {
		if current {
			note(s.Backend)
		}
		if !s.Changed() {
			continue
		}
		for _, id := range s.Previous {
			note(id)
		}
	}
	for _, s := range t.Older {
		note(s.Backend)
		for _, id := range s.Previous {
			note(id)
		}
	}
	return ids
}
