package table

import (
	"fmt"
	"os"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// window keeps only the most recently used map mapped into memory, because mapped pages count as the agent's memory.
type window struct {
	mu     sync.Mutex // guards all below
	of     *ebpf.Map
	memory []byte
}

// open maps an array with BPF_F_MMAPABLE, and calls do with its elements. Programs may read them at the same time.
func (w *window) open(m *ebpf.Map, do func(memory []byte)) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.of != m {
		if err := w.unmap(); err != nil {
			return err
		}
		page := os.Getpagesize()
		size := (int(m.MaxEntries()*m.ValueSize()) + page - 1) / page * page
		memory, err := unix.Mmap(m.FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return fmt.Errorf("map the memory of %v: %w", m, err)
		}
		w.of, w.memory = m, memory
	}
	do(w.memory)
	return nil
}

func (w *window) close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.unmap()
}

func (w *window) unmap() error {
	if w.of == nil {
		return nil
	}
	if err := unix.Munmap(w.memory); err != nil {
		return fmt.Errorf("unmap the memory of %v: %w", w.of, err)
	}
	w.of, w.memory = nil, nil
	return nil
}
