package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
)

// repairPins restores pins of maps and links that were removed, or are hidden by another mount. Without them the next
// agent would start without flows, and could not replace the programs.
func (d *Datapath) repairPins() error {
	missing, pinned := map[string]*ebpf.Map{}, d.pins.List()
	note := func(path string, m *ebpf.Map) {
		if !pinned[path] && errors.Is(unix.Access(path, unix.F_OK), unix.ENOENT) {
			missing[path] = m
		}
	}
	for name, m := range d.objects.PinnedMaps() {
		note(filepath.Join(d.pins.Dir, name), m)
	}
	for _, c := range d.chunks.All() {
		for i, m := range c.Maps() {
			note(c.Pin(i), m)
		}
	}
	if err := d.pins.Remake(); err != nil {
		return fmt.Errorf("pin the maps again: %w", err)
	}
	for path, m := range missing {
		if err := pin.Again(m, path); err != nil {
			return fmt.Errorf("pin the maps again: %w", err)
		}
	}
	links, err := d.uplinks.repin()
	if len(missing) > 0 || links > 0 {
		d.repairs.made("pins", "maps and links pinned again", "maps", len(missing), "links", links, "path", d.pins.Dir)
	}
	return err
}

// repairChain restores the target of the tail call. Without it, decapsulated packets are lost.
func (d *Datapath) repairChain() error {
	d.uplinks.mu.Lock()
	want, err := d.uplinks.ids.of(d.objects.SyTcDecap)
	d.uplinks.mu.Unlock()
	if err != nil {
		return err
	}
	var now uint32
	if err := d.objects.SyProgs.Lookup(uint32(0), &now); err == nil && now == uint32(want) {
		return nil
	}
	if err := d.objects.SyProgs.Put(uint32(0), d.objects.SyTcDecap); err != nil {
		return fmt.Errorf("chain the programs: %w", err)
	}
	d.repairs.made("programs", "programs chained again", "earlier", now)
	return nil
}

// repairs counts and logs what others changed and the agent restored.
type repairs struct {
	log *slog.Logger
	mu  sync.Mutex // guards n
	n   map[string]uint64
}

func newRepairs(log *slog.Logger) *repairs {
	return &repairs{log: log, n: map[string]uint64{"programs": 0, "pins": 0, "forwarding": 0}}
}

func (r *repairs) made(what, text string, args ...any) {
	r.mu.Lock()
	r.n[what]++
	r.mu.Unlock()
	r.log.Warn(text, args...)
}

func (r *repairs) counts() map[string]uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return maps.Clone(r.n)
}
