package hook

import (
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
)

// RepairPins restores pins of maps and links that were removed or are hidden by another mount. Without them, the next
// agent would start without flows and could not replace the programs.
func (a *Hooks) RepairPins() error {
	now, settled := a.Pins.Stamp()
	if settled && now == a.complete {
		return nil
	}
	a.complete = pin.Stamp{}
	missing, pinned := map[string]*ebpf.Map{}, a.Pins.List()
	note := func(path string, m *ebpf.Map) {
		if !pinned[path] && errors.Is(unix.Access(path, unix.F_OK), unix.ENOENT) {
			missing[path] = m
		}
	}
	for name, m := range a.Objects.PinnedMaps() {
		note(filepath.Join(a.Pins.Dir, name), m)
	}
	for _, c := range a.Chunks.All() {
		for i, m := range c.Maps() {
			note(c.Pin(i), m)
		}
	}
	if err := a.Pins.Remake(); err != nil {
		return fmt.Errorf("pin the maps again: %w", err)
	}
	for path, m := range missing {
		if err := pin.Again(m, path); err != nil {
			return fmt.Errorf("pin the maps again: %w", err)
		}
	}
	links, err := a.repin()
	if len(missing) > 0 || links > 0 {
		a.repaired("pins", "maps and links pinned again", "maps", len(missing), "links", links, "path", a.Pins.Dir)
	} else if err == nil && settled {
		a.complete = now
	}
	return err
}

// chain makes this binary's sy_tc_decap the target of the tail call.
func (a *Hooks) chain() error {
	var earlier uint32 // lookups return the program's id
	switch err := a.Objects.SyProgs.Lookup(uint32(0), &earlier); {
	case err == nil:
		id := ebpf.ProgramID(earlier)
		a.open.KeepProgram(id, func(prog *ebpf.Program) error { return a.Objects.SyProgs.Put(uint32(0), prog) })
	case !errors.Is(err, ebpf.ErrKeyNotExist):
		return fmt.Errorf("read the chained program: %w", err)
	}
	return a.putChain()
}

// putChain makes sy_tc_decap the target of the tail call.
func (a *Hooks) putChain() error {
	if err := a.Objects.SyProgs.Put(uint32(0), a.programs.Decap); err != nil {
		return fmt.Errorf("chain the programs: %w", err)
	}
	return nil
}

// RepairChain restores the target of the tail call, without which decapsulated packets are lost.
func (a *Hooks) RepairChain() error {
	a.Mu.Lock()
	defer a.Mu.Unlock()
	want, err := a.ids.of(a.programs.Decap)
	if err != nil {
		return err
	}
	var now uint32
	if err := a.Objects.SyProgs.Lookup(uint32(0), &now); err == nil && now == uint32(want) {
		return nil
	}
	if err := a.putChain(); err != nil {
		return err
	}
	a.repaired("programs", "programs chained again", "earlier", now)
	return nil
}

// repairs counts the agent's repairs of what other software changed.
type repairs struct {
	mu sync.Mutex // guards n
	n  map[string]uint64
}

// repaired counts and logs a repair of what.
func (a *Hooks) repaired(what, text string, args ...any) {
	a.repairs.mu.Lock()
	a.repairs.n[what]++
	a.repairs.mu.Unlock()
	a.Log.Warn(text, args...)
}

// Repairs returns the number of repairs of programs, pins and forwarding, by these words.
func (a *Hooks) Repairs() map[string]uint64 {
	a.repairs.mu.Lock()
	defer a.repairs.mu.Unlock()
	return maps.Clone(a.repairs.n)
}
