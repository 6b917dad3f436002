package table

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/pin"
)

// Chunked is a growing array in the kernel: an array of arrays of the same size (bpf/maps.h). Each chunk is pinned,
// because opening an inner map through the outer one needs CAP_SYS_ADMIN.
//
// The kernel needs one grace period, about 15 ms, to add any number of chunks (barrier). So Apply requests all chunks
// for a delta together, and chunks for the next deltas are added in advance.
type Chunked struct {
	outer *ebpf.Map
	Spec  *ebpf.MapSpec // of a chunk
	pins  *pin.Pins

	growing sync.Mutex   // held by grow
	mu      sync.RWMutex // guards chunks
	Chunks  []*ebpf.Map
	Grown   int // how often chunks were added
}

// Chunks holds the arrays that grow with the configuration.
type Chunks struct{ Slots, Backends, FrontendCounters, BackendCounters, Handshakes *Chunked }

// OpenChunks opens the growing arrays. inner holds the specs of their chunks by the name of the outer map.
func OpenChunks(o *bpf.Objects, inner map[string]*ebpf.MapSpec, pins *pin.Pins) (c *Chunks, err error) {
	c = &Chunks{}
	for _, x := range []struct {
		to    **Chunked
		outer *ebpf.Map
		name  string
	}{
		{&c.Slots, o.SySlots, "sy_slots"}, {&c.Backends, o.SyBackends, "sy_backends"},
		{&c.FrontendCounters, o.SyFeCounters, "sy_fe_counters"}, {&c.BackendCounters, o.SyBeCounters, "sy_be_counters"},
		{&c.Handshakes, o.SyBeHandshakes, "sy_be_handshakes"},
	} {
		if *x.to, err = openChunked(x.outer, inner[x.name], pins); err != nil {
			return c, err
		}
	}
	return c, nil
}

func (c *Chunks) All() []*Chunked {
	return []*Chunked{c.Slots, c.Backends, c.FrontendCounters, c.BackendCounters, c.Handshakes}
}

// Close closes the descriptors of all chunks.
func (c *Chunks) Close() {
	for _, x := range c.All() {
		if x != nil {
			x.close()
		}
	}
}

// openChunked opens a previous agent's chunks.
func openChunked(outer *ebpf.Map, spec *ebpf.MapSpec, pins *pin.Pins) (*Chunked, error) {
	c := &Chunked{outer: outer, Spec: spec, pins: pins}
	for range outer.MaxEntries() {
		m, err := ebpf.LoadPinnedMap(c.Pin(len(c.Chunks)), nil)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("open a chunk of %s: %w", c.Name(), err)
		}
		if m == nil {
			break
		}
		c.Chunks = append(c.Chunks, m)
		if err := c.complete(uint32(len(c.Chunks)-1), m); err != nil {
			return nil, fmt.Errorf("add a chunk to %s: %w", c.Name(), err)
		}
	}
	return c, nil
}

// complete adds a previous agent's chunk if that agent was killed before it did. Each addition takes a grace period.
func (c *Chunked) complete(i uint32, m *ebpf.Map) error {
	info, err := m.Info()
	if err != nil {
		return err
	}
	var now uint32 // lookups return the map's id
	if id, ok := info.ID(); ok && c.outer.Lookup(i, &now) == nil && now == uint32(id) {
		return nil
	}
	return c.outer.Put(i, m)
}

func (c *Chunked) Name() string { return c.Spec.Name }

// Pin returns the pin path of a chunk.
func (c *Chunked) Pin(chunk int) string {
	return c.pins.Chunk(fmt.Sprintf("%s-%d", c.Spec.Name, chunk))
}

// Len returns the current number of elements.
func (c *Chunked) Len() uint32 {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return uint32(len(c.Chunks)) * c.Spec.MaxEntries
}

// Maps returns the current chunks.
func (c *Chunked) Maps() []*ebpf.Map {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return slices.Clone(c.Chunks)
}

// grow adds chunks until there are at least n elements. It may run concurrently with other methods.
func (c *Chunked) grow(n uint32) (err error) {
	if c.Len() >= n {
		return nil
	}
	c.growing.Lock()
	defer c.growing.Unlock()
	first := int(c.Len() / c.Spec.MaxEntries)
	var added []*ebpf.Map
	defer func() {
		if err != nil {
			for _, m := range added {
				err = errors.Join(err, m.Unpin(), m.Close())
			}
		}
	}()
	for c.Len()+uint32(len(added))*c.Spec.MaxEntries < n {
		m, err := ebpf.NewMap(c.Spec)
		if err != nil {
			return fmt.Errorf("add a chunk to %s: %w", c.Name(), err)
		}
		if err := m.Pin(c.Pin(first + len(added))); err != nil {
			m.Close()
			return fmt.Errorf("pin a chunk of %s: %w", c.Name(), err)
		}
		added = append(added, m)
	}
	if len(added) == 0 {
		return nil
	}
	keys, fds := make([]uint32, len(added)), make([]uint32, len(added))
	for i, m := range added {
		keys[i], fds[i] = uint32(first+i), uint32(m.FD())
	}
	if _, err := c.outer.BatchUpdate(keys, fds, nil); err != nil {
		return fmt.Errorf("add chunks to %s: %w", c.Name(), err)
	}
	c.mu.Lock()
	c.Chunks, c.Grown = append(c.Chunks, added...), c.Grown+1
	c.mu.Unlock()
	return nil
}

// at returns the chunk of an element and its index there.
func (c *Chunked) at(i uint32) (*ebpf.Map, uint32) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.Chunks[i/c.Spec.MaxEntries], i % c.Spec.MaxEntries
}

// put writes an element, for which grow must have made a chunk.
func (c *Chunked) put(i uint32, value any) error {
	m, k := c.at(i)
	return m.Put(k, value)
}

func (c *Chunked) lookup(i uint32, value any) error {
	m, k := c.at(i)
	return m.Lookup(k, value)
}

// barrier returns when all programs that are running now have ended. It relies on the kernel waiting for a grace period
// when an element of an array of maps is written (maybe_wait_bpf_programs in kernel/bpf/syscall.c).
func (c *Chunked) barrier() error {
	if c.Len() == 0 {
		return nil
	}
	first, _ := c.at(0)
	return c.outer.Put(uint32(0), first)
}

func (c *Chunked) close() {
	for _, m := range c.Chunks {
		m.Close()
	}
}
