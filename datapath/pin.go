package datapath

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// schema is the version of what is pinned. It changes with the layout or the meaning of any map.
const schema = "v6"

// pins is the directory of pinned maps and links, held by one agent at a time.
type pins struct {
	dir  string // PinPath/schema
	lock *os.File
}

// openPins makes and locks the directory. It fails when another agent has it, or when what is there is of another schema.
func openPins(path string) (*pins, error) {
	if err := mountBPF(filepath.Dir(path)); err != nil {
		return nil, err
	}
	dir := filepath.Join(path, schema)
	for _, sub := range []string{"links", "slots"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return nil, fmt.Errorf("make the directory for pinned maps: %w", err)
		}
	}
	lock, err := lockDir(path)
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		lock.Close()
		return nil, fmt.Errorf("list %s: %w", path, err)
	}
	for _, e := range entries {
		if e.Name() != schema {
			lock.Close()
			return nil, fmt.Errorf("%s has state of schema %s, this version has %s; run \"steelyard cleanup\", which ends its flows, or the version that left it", path, e.Name(), schema)
		}
	}
	return &pins{dir: dir, lock: lock}, nil
}

// lockDir takes path for this process until the file is closed, by whatever end.
func lockDir(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("lock the datapath: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: another agent is running", path)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

func (p *pins) close() error { return p.lock.Close() }

func (p *pins) table(frontend uint32) string {
	return filepath.Join(p.dir, "slots", fmt.Sprint(frontend))
}

func (p *pins) link(name string) string { return filepath.Join(p.dir, "links", name) }

// mountBPF makes sure that dir is on a bpffs; it mounts one at the usual place only.
func mountBPF(dir string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err == nil && fs.Type == unix.BPF_FS_MAGIC {
		return nil
	}
	if dir != filepath.Dir(DefaultPinPath) {
		return fmt.Errorf("%s is not on a bpffs; mount one: mount -t bpf bpf %s", dir, dir)
	}
	if err := unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("mount bpffs on %s: %w", dir, err)
	}
	return nil
}
