package datapath

import (
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// repairPins pins the maps and links again whose pins were removed, or are hidden by another mount: without them the
// next agent would begin without flows, and could not replace the programs.
func (d *Datapath) repairPins() error {
	missing, pinned := map[string]*ebpf.Map{}, d.pins.list()
	note := func(path string, m *ebpf.Map) {
		if !pinned[path] && errors.Is(unix.Access(path, unix.F_OK), unix.ENOENT) {
			missing[path] = m
		}
	}
	for name, m := range d.objects.PinnedMaps() {
		note(filepath.Join(d.pins.dir, name), m)
	}
	for _, c := range d.chunks.all() {
		for i, m := range c.maps() {
			note(c.pin(i), m)
		}
	}
	if err := d.pins.remake(); err != nil {
		return fmt.Errorf("pin the maps again: %w", err)
	}
	for path, m := range missing {
		if err := pinAgain(m, path); err != nil {
			return fmt.Errorf("pin the maps again: %w", err)
		}
	}
	links, err := d.uplinks.repin()
	if len(missing) > 0 || links > 0 {
		d.repairs.made("pins", "maps and links pinned again", "maps", len(missing), "links", links, "path", d.pins.dir)
	}
	return err
}

// list returns the paths of the pinned maps. It is cheaper than a look at each: large configurations have hundreds.
func (p *pins) list() map[string]bool {
	all := map[string]bool{}
	for _, dir := range []string{p.dir, filepath.Dir(p.chunk("x"))} {
		f, err := os.Open(dir)
		if err != nil {
			continue
		}
		names, _ := f.Readdirnames(-1) // what is not listed is looked at
		f.Close()
		for _, name := range names {
			all[filepath.Join(dir, name)] = true
		}
	}
	return all
}

// repairChain makes the tail call work again: without its target, packets that come out of tunnels are lost.
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

// pinAgain pins a map whose pin was removed, of which m does not know.
func pinAgain(m *ebpf.Map, path string) error {
	c, err := m.Clone()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Pin(path)
}

// remake makes the directory again if it is not the one that this agent has locked, and locks it.
func (p *pins) remake() error {
	was, err := p.lock.Stat()
	if err != nil {
		return err
	}
	complete := true
	for _, sub := range []string{"links", "chunks"} {
		complete = complete && unix.Access(filepath.Join(p.dir, sub), unix.F_OK) == nil
	}
	if now, err := os.Stat(p.path); err == nil && complete && os.SameFile(was, now) {
		return nil
	}
	if !onBPF(p.path) {
		if err := mountBPF(filepath.Dir(p.path)); err != nil {
			return err
		}
	}
	for _, sub := range []string{"links", "chunks"} {
		if err := os.MkdirAll(filepath.Join(p.dir, sub), 0o700); err != nil {
			return err
		}
	}
	now, err := os.Stat(p.path)
	if err != nil {
		return err
	}
	if os.SameFile(was, now) {
		return nil
	}
	lock, err := lockDir(p.path)
	if err != nil {
		return err
	}
	p.lock.Close()
	p.lock = lock
	return nil
}

// repairs counts and logs what was changed outside the agent, and restored by it.
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
