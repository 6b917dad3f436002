package pin

import (
	"os"
	"path/filepath"
	"time"

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

// Stamp changes when a pin is added, removed, or hidden by another mount. Comparing it is cheaper than List.
type Stamp [4]struct {
	dev, ino uint64
	changed  unix.Timespec
}

// Stamp returns the current stamp. It is not settled, and another change may leave it as it is, for as long as the
// timestamps of files may take to advance.
func (p *Pins) Stamp() (s Stamp, settled bool) {
	settled = true
	for i, dir := range []string{p.path, p.Dir, p.Link(""), p.Chunk("")} {
		var st unix.Stat_t
		if unix.Stat(dir, &st) != nil {
			return Stamp{}, false
		}
		s[i].dev, s[i].ino, s[i].changed = st.Dev, st.Ino, st.Mtim
		settled = settled && time.Since(time.Unix(st.Mtim.Unix())) > 100*time.Millisecond
	}
	return s, settled
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
