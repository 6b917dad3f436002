package pin

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
)

// Programs are pinned so that the next agent need not verify the same ones again, which takes most of the time of a
// start. Nothing else needs these pins. The name of a file is the program's name, a colon and its build (bpf.Build).
const programsDir = "programs"

// Programs opens the pinned programs of a build.
func (p *Pins) Programs(build string) (map[string]*ebpf.Program, error) {
	files, err := p.programFiles()
	if err != nil {
		return nil, err
	}
	all := map[string]*ebpf.Program{}
	for _, file := range files {
		if name, of, _ := strings.Cut(file, ":"); of == build {
			if prog, err := ebpf.LoadPinnedProgram(p.program(file), nil); err == nil {
				all[name] = prog
			} // otherwise it is loaded
		}
	}
	return all, nil
}

// PinPrograms pins programs of a build. When the transaction succeeds, it removes the pins of all others.
func (p *Pins) PinPrograms(all map[string]*ebpf.Program, build string, t *Transaction) error {
	current := map[string]bool{}
	for name, prog := range all {
		file := name + ":" + build
		current[file] = true
		if prog.IsPinned() {
			continue
		}
		err := os.Remove(p.program(file)) // which could not be opened
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			err = prog.Pin(p.program(file))
		}
		if err != nil {
			return fmt.Errorf("pin the program %s: %w", name, err)
		}
		t.OnFailure(func() error { return os.Remove(p.program(file)) })
	}
	return t.OnSuccess(func() error {
		files, err := p.programFiles()
		errs := []error{err}
		for _, file := range files {
			if !current[file] {
				errs = append(errs, os.Remove(p.program(file)))
			}
		}
		return errors.Join(errs...)
	})
}

func (p *Pins) program(file string) string { return filepath.Join(p.Dir, programsDir, file) }

func (p *Pins) programFiles() (names []string, err error) {
	files, err := os.ReadDir(filepath.Join(p.Dir, programsDir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list the pinned programs: %w", err)
	}
	for _, f := range files {
		names = append(names, f.Name())
	}
	return names, nil
}
