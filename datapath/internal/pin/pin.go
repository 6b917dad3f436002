// Package pin manages the directory of pinned maps and links, and the transaction that activates programs.
package pin

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb/state"
)

const DefaultPath = "/sys/fs/bpf/steelyard"

// Schema is the version of the pinned state. It changes with the layout or meaning of any map.
const Schema = "v10"

// Unpublished is the directory beside the final one in which a first start pins. Nothing reads it. Its name has no dot,
// because bpffs refuses dots.
const (
	unpublishedSuffix = "-new"
	Unpublished       = Schema + unpublishedSuffix
)

// Pins is the directory of pinned maps and links, which only one agent at a time can lock. A first start pins
// everything in a temporary directory and publishes it with one rename(2), so the final directory is complete whenever
// it exists.
type Pins struct {
	path    string   // PinPath
	Dir     string   // PinPath/Schema, or the temporary directory until Publish
	earlier []string // maps that were pinned before Open
	lock    *os.File
}

// Open creates and locks the directory. It fails if another agent has the lock, or if the directory contains state of
// another schema.
func Open(path string) (_ *Pins, err error) {
	if !onBPF(path) { // if it is, a container may see no more of the bpffs than path
		if err := mountBPF(path); err != nil {
			return nil, err
		}
		if err := os.MkdirAll(path, 0o700); err != nil {
			return nil, fmt.Errorf("create the directory for pinned maps: %w", err)
		}
	}
	if err := state.Private(path); err != nil {
		return nil, err
	}
	p := &Pins{path: path, Dir: filepath.Join(path, Unpublished)}
	if p.lock, err = LockDir(path); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			p.lock.Close()
		}
	}()
	if err := removeUnused(path); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", path, err)
	}
	for _, e := range entries {
		if e.Name() != Schema {
			return nil, fmt.Errorf("%s has state of schema %s, but this version has %s; "+
				"run \"steelyard cleanup\", which ends all flows, or the version that left this state",
				path, e.Name(), Schema)
		}
		p.Dir = filepath.Join(path, Schema)
	}
	if p.earlier, err = p.maps(); err != nil {
		return nil, err
	}
	return p, p.makeDirs()
}

func (p *Pins) makeDirs() error {
	for _, sub := range []string{"links", "chunks", programsDir} {
		if err := os.MkdirAll(filepath.Join(p.Dir, sub), 0o700); err != nil {
			return fmt.Errorf("create the directory for pinned maps: %w", err)
		}
	}
	return nil
}

// removeUnused removes the directories in path that no version takes over: leftovers of first starts that were killed,
// and directories without pins. The caller holds the lock, so no process uses them.
func removeUnused(path string) error {
	dirs, err := filepath.Glob(filepath.Join(path, "*"))
	if err != nil {
		return fmt.Errorf("list %s: %w", path, err)
	}
	for _, dir := range dirs {
		switch used, err := HasPins(dir); {
		case err != nil:
			return err
		case filepath.Base(dir) == Schema || used && !strings.HasSuffix(dir, unpublishedSuffix):
			continue
		}
		if err := removePins(dir); err != nil {
			return err
		}
	}
	return nil
}

// HasPins reports whether dir exists and anything is pinned in it or its subdirectories.
func HasPins(dir string) (has bool, err error) {
	err = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			has, err = true, fs.SkipAll
		}
		return err
	})
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return false, fmt.Errorf("list the pinned maps: %w", err)
	}
	return has, nil
}

// First reports whether there is no state of a previous agent to take over.
func (p *Pins) First() bool { return filepath.Base(p.Dir) == Unpublished }

// maps returns the names of the pinned maps, or none if the directory does not exist.
func (p *Pins) maps() (names []string, err error) {
	entries, err := os.ReadDir(p.Dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list the pinned maps: %w", err)
	}
	for _, e := range entries {
		if !e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, nil
}

// Publish moves the pins of a first start to the final directory, where the next agent takes them over.
func (p *Pins) Publish() error {
	if !p.First() {
		return nil
	}
	final := filepath.Join(p.path, Schema)
	if err := os.Rename(p.Dir, final); err != nil {
		return fmt.Errorf("publish the pinned maps: %w", err)
	}
	p.Dir = final
	return nil
}

// Rollback removes the maps that Open has pinned, which after a first start means everything.
func (p *Pins) Rollback() error {
	if p.First() {
		return removePins(p.Dir)
	}
	now, err := p.maps()
	errs := []error{err}
	for _, name := range now {
		if !slices.Contains(p.earlier, name) {
			errs = append(errs, os.Remove(filepath.Join(p.Dir, name)))
		}
	}
	return errors.Join(errs...)
}

// removePins removes a directory, if it exists, with its links and maps. It detaches each link explicitly, because the
// kernel detaches a link asynchronously if only its pin is removed.
func removePins(dir string) error {
	links, err := filepath.Glob(filepath.Join(dir, "links", "*"))
	if err != nil {
		return fmt.Errorf("list the links: %w", err)
	}
	for _, path := range links {
		if err := Unpin(path); err != nil {
			return err
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove the pinned maps: %w", err)
	}
	return nil
}

// Unpin removes the link pinned at path, if there is one.
func Unpin(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("open the link %s: %w", filepath.Base(path), err)
	}
	defer l.Close()
	if err := l.Unpin(); err != nil {
		return fmt.Errorf("remove the link %s: %w", filepath.Base(path), err)
	}
	return nil
}

// LockDir locks path until the file is closed or this process ends.
func LockDir(path string) (*os.File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("lock the datapath: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("lock %s: another agent is running; stop it first", path)
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// Close releases the lock. The pins remain.
func (p *Pins) Close() error { return p.lock.Close() }

// Chunk returns the pin path of an inner map.
func (p *Pins) Chunk(name string) string { return filepath.Join(p.Dir, "chunks", name) }

// Link returns the pin path of a link.
func (p *Pins) Link(name string) string { return filepath.Join(p.Dir, "links", name) }

// mountBPF ensures that the parent directory of path is on a bpffs. It mounts one only for the default path.
func mountBPF(path string) error {
	dir := filepath.Dir(path)
	if onBPF(dir) {
		return nil
	}
	if path != DefaultPath { // for example in a pod
		return fmt.Errorf("%s is not on a bpffs; mount one on the host: mount -t bpf bpf %s", path,
			filepath.Dir(DefaultPath))
	}
	if err := unix.Mount("bpf", dir, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0700"); err != nil {
		return fmt.Errorf("mount bpffs on %s: %w", dir, err)
	}
	return nil
}

// onBPF reports whether a directory exists and is on a bpffs.
func onBPF(dir string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) == nil && fs.Type == unix.BPF_FS_MAGIC
}

// OpenToAll reports whether other users may write to the bpffs of the pins, and returns its directory and mode.
func (p *Pins) OpenToAll() (dir string, mode fs.FileMode, open bool) {
	dir = filepath.Dir(p.path)
	info, err := os.Stat(dir)
	if err != nil || !onBPF(dir) {
		return dir, 0, false
	}
	return dir, info.Mode(), info.Mode().Perm()&0o022 != 0
}
