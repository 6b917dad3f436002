package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/lb"
)

// Values of a slot's previous backend that are no ids (bpf/types.h).
const (
	noBackend  = 0xffffffff
	anyBackend = 0xfffffffe
)

// table is the content of a frontend's table (bpf/maps.h).
type table struct {
	slots []sySlot
	older []sySlot // of the last table of another size, if slots refer to it
}

// newSlots returns the table of a plan, whose targets have these ids. Each slot lists its earlier backends that may
// still have flows, and after them the nodes that may have any flow.
func newSlots(p *lb.FrontendPlan, ids []uint32, was table, anyNode []uint32, expired func(id uint32) bool) table {
	t := table{slots: make([]sySlot, len(p.Table))}
	for i, target := range p.Table {
		t.slots[i].Backend = ids[target]
	}
	if len(t.slots) == 0 && p.NodeForwarding.Enabled { // packets of existing flows still need their node
		t.slots = make([]sySlot, max(len(was.slots), 1))
		for i := range t.slots {
			t.slots[i].Backend = noBackend
		}
	}
	sameSize := len(was.slots) == len(t.slots)
	refers := false
	for i := range t.slots {
		var before []uint32
		switch {
		case p.NodeForwarding.AnyNode && sameSize:
			before = append([]uint32{was.slots[i].Backend}, anyNode...)
		case p.NodeForwarding.AnyNode:
			before = anyNode
		case len(was.slots) == 0:
		case sameSize:
			before = append([]uint32{was.slots[i].Backend}, was.slots[i].Previous[:]...)
		default: // the flows of a slot came from several slots
			before = []uint32{anyBackend}
		}
		t.slots[i].Previous = earlierBackends(t.slots[i].Backend, before, expired)
		refers = refers || slices.Contains(t.slots[i].Previous[:], anyBackend)
	}
	switch {
	case !refers || !p.NodeForwarding.Enabled:
	case sameSize:
		t.older = withoutExpired(was.older, expired)
	default:
		t.older = withoutExpired(was.slots, expired)
	}
	if len(p.Table) == 0 && !slices.ContainsFunc(t.slots, func(s sySlot) bool { return s.Previous[0] != noBackend }) {
		return table{}
	}
	return t
}

// earlierBackends returns the earlier backends of a slot, the latest first.
func earlierBackends(
	backend uint32, before []uint32, expired func(id uint32) bool,
) (previous [len(sySlot{}.Previous)]uint32) {
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
func withoutExpired(slots []sySlot, expired func(id uint32) bool) []sySlot {
	out := slices.Clone(slots)
	for i, s := range slots {
		if s.Backend != noBackend && expired(s.Backend) {
			out[i].Backend = noBackend
		}
		unlisted := func(id uint32) bool { return id == anyBackend || expired(id) }
		out[i].Previous = earlierBackends(out[i].Backend, s.Previous[:], unlisted)
	}
	return out
}

// earlierIDs returns the ids of all earlier backends.
func (t table) earlierIDs() (ids []uint32) {
	seen := map[uint32]bool{noBackend: true, anyBackend: true}
	note := func(id uint32) {
		if !seen[id] {
			seen[id] = true
			ids = append(ids, id)
		}
	}
	for _, s := range t.slots {
		for _, id := range s.Previous {
			note(id)
		}
	}
	for _, s := range t.older {
		note(s.Backend)
		for _, id := range s.Previous {
			note(id)
		}
	}
	return ids
}

// The header takes the place of a slot, so both have one size (bpf/types.h).
var _ [unsafe.Sizeof(sySlot{})]byte = [unsafe.Sizeof(syTableHeader{})]byte{}

// header returns element 0 of a table as what it is. All elements of an array map have one type, the slot's.
func header(elements []sySlot) *syTableHeader {
	return (*syTableHeader)(unsafe.Pointer(&elements[0]))
}

// newTable makes the map of a table (bpf/maps.h) from the spec of the inner maps. The spec has the BTF of the template:
// Linux before 6.2 compares the BTF of an inner map with that of the template, and refuses a map without it.
func newTable(spec *ebpf.MapSpec, t table) (*ebpf.Map, error) {
	n := 1 + len(t.slots) + len(t.older)
	keys, values := make([]uint32, n), make([]sySlot, 1, n)
	*header(values) = syTableHeader{Slots: uint32(len(t.slots)), OlderSlots: uint32(len(t.older))}
	values = append(append(values, t.slots...), t.older...)
	for i := range keys {
		keys[i] = uint32(i)
	}
	spec = spec.Copy()
	spec.MaxEntries = uint32(n)
	m, err := ebpf.NewMap(spec)
	if err != nil {
		return nil, fmt.Errorf("make a table: %w", err)
	}
	if _, err := m.BatchUpdate(keys, values, nil); err != nil {
		m.Close()
		return nil, fmt.Errorf("fill a table: %w", err)
	}
	return m, nil
}

// pinTable pins a table for the next agent, which must read the earlier backends of its slots. From the map of maps the
// kernel opens a table only with CAP_SYS_ADMIN.
func pinTable(path string, table *ebpf.Map) error {
	next := path + "-next"
	if err := os.Remove(next); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("pin a table: %w", err)
	}
	if err := table.Pin(next); err != nil {
		return fmt.Errorf("pin a table: %w", err)
	}
	return os.Rename(next, path)
}

// readTable returns a pinned table; an empty one when there is none.
func readTable(path string) (t table, err error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return t, nil
	}
	if err != nil {
		return t, fmt.Errorf("open a table: %w", err)
	}
	defer m.Close()
	keys, values := make([]uint32, m.MaxEntries()), make([]sySlot, m.MaxEntries())
	var cursor ebpf.MapBatchCursor
	if n, err := m.BatchLookup(&cursor, keys, values, nil); n != len(keys) {
		return t, fmt.Errorf("read a table: %w", err)
	}
	h := header(values)
	n := 1 + int(h.Slots)
	if n+int(h.OlderSlots) != len(values) {
		return t, fmt.Errorf("read a table: %d slots and %d older ones in %d elements",
			h.Slots, h.OlderSlots, len(values))
	}
	return table{slots: values[1:n], older: values[n:]}, nil
}
