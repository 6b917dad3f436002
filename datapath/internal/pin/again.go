package pin

import (
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
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

// Remake recreates what is missing of the pin directory, and locks it unless this agent has locked it.
func (p *Pins) Remake() error {
	was, err := p.lock.Stat()
	if err != nil {
		return err
	}
	if !onBPF(p.path) {
		if err := mountBPF(p.path); err != nil {
			return err
		}
	}
	if err := p.makeDirs(); err != nil {
		return err
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
