package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// Values of a slot's previous backend that are no ids (bpf/types.h).
const (
	noBackend  = 0xffffffff
	anyBackend = 0xfffffffe
)

// newSlots returns the slots of a plan, whose targets have these ids. Each remembers which backend it had before, as far
// as that may still have flows.
func newSlots(p *lb.FrontendPlan, ids []uint32, old []sySlot, dead func(id uint32) bool) []sySlot {
	slots := make([]sySlot, len(p.Table))
	for i, target := range p.Table {
		slots[i].Backend = ids[target]
		switch {
		case len(old) == 0:
			slots[i].Previous = noBackend
		case len(old) != len(slots): // flows that share a slot now did not before
			slots[i].Previous = anyBackend
		default:
			slots[i].Previous = previous(slots[i].Backend, old[i], dead)
		}
	}
	return slots
}

func previous(backend uint32, old sySlot, dead func(uint32) bool) uint32 {
	for _, id := range []uint32{old.Backend, old.Previous} {
		if id != backend && id != noBackend && (id == anyBackend || !dead(id)) {
			return id
		}
	}
	return noBackend
}

// newTable makes the map of a plan's slots (bpf/maps.h).
func newTable(slots []sySlot) (*ebpf.Map, error) {
	keys, values := make([]uint32, len(slots)+1), make([]sySlot, 1, len(slots)+1)
	values[0].Backend = uint32(len(slots))
	values = append(values, slots...)
	for i := range keys {
		keys[i] = uint32(i)
	}
	table, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "table", Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: uint32(len(keys)), Flags: unix.BPF_F_INNER_MAP,
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

// pinTable keeps a table within reach of the next agent, which must know what slots had before. The kernel would give a table
// of the map of maps only to a process with CAP_SYS_ADMIN.
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

// readTable returns the slots of a pinned table; none when there is no such table.
func readTable(path string) ([]sySlot, error) {
	table, err := ebpf.LoadPinnedMap(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open a table: %w", err)
	}
	defer table.Close()
	keys, slots := make([]uint32, table.MaxEntries()), make([]sySlot, table.MaxEntries())
	var cursor ebpf.MapBatchCursor
	if n, err := table.BatchLookup(&cursor, keys, slots, nil); n != len(keys) {
		return nil, fmt.Errorf("read a table: %w", err)
	}
	return slices.Clone(slots[1:]), nil
}
