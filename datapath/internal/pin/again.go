package pin

import (
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// List returns the paths of the pinned maps. Listing is cheaper than checking each map, because large configurations
// have hundreds.
func (p *Pins) List() map[string]bool {
	all := map[string]bool{}
	for _, dir := range []string{p.Dir, filepath.Dir(p.Chunk("x"))} {
		f, err := os.Open(dir)
		if err != nil {
			continue
		}
		names, _ := f.Readdirnames(-1) // callers check paths that are missing
		f.Close()
		for _, name := range names {
			all[filepath.Join(dir, name)] = true
		}
	}
	return all
}

// Again pins a map whose pin was removed behind m's back.
func Again(m *ebpf.Map, path string) error {
	c, err := m.Clone()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Pin(path)
}

// Remake recreates and locks the pin directory, unless it is complete and is still the directory that this agent has
// locked.
func (p *Pins) Remake() error {
	was, err := p.lock.Stat()
	if err != nil {
		return err
	}
	complete := true
	for _, sub := range []string{"links", "chunks"} {
		complete = complete && unix.Access(filepath.Join(p.Dir, sub), unix.F_OK) == nil
	}
	if now, err := os.Stat(p.path); err == nil && complete && os.SameFile(was, now) {
		return nil
	}
	if !onBPF(p.path) {
		if err := mountBPF(p.path); err != nil {
			return err
		}
	}
	for _, sub := range []string{"links", "chunks"} {
		if err := os.MkdirAll(filepath.Join(p.Dir, sub), 0o700); err != nil {
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
	lock, err := LockDir(p.path)
	if err != nil {
		return err
	}
	p.lock.Close()
	p.lock = lock
	return nil
}
