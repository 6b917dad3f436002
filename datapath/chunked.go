package datapath

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

// chunked is an array in the kernel that grows: an array of arrays of one size (bpf/maps.h). Each chunk is pinned,
// because the kernel opens an inner map from the outer one only with CAP_SYS_ADMIN.
//
// To add chunks takes the kernel a grace period, about 15 ms, for any number of them (barrier). So Apply asks for all
// that a delta needs at once, and room for what comes next is made apart from it.
type chunked struct {
	outer *ebpf.Map
	spec  *ebpf.MapSpec // of a chunk
	pins  *pin.Pins

	growing sync.Mutex   // held by grow
	mu      sync.RWMutex // guards chunks
	chunks  []*ebpf.Map
	grown   int // how often chunks were added
}

// chunks are the arrays that grow with the configuration.
type chunks struct{ slots, backends, frontendCounters, backendCounters *chunked }

func openChunks(o *bpf.Objects, inner map[string]*ebpf.MapSpec, pins *pin.Pins) (c *chunks, err error) {
	c = &chunks{}
	for _, x := range []struct {
		to    **chunked
		outer *ebpf.Map
		name  string
	}{
		{&c.slots, o.SySlots, "sy_slots"}, {&c.backends, o.SyBackends, "sy_backends"},
		{&c.frontendCounters, o.SyFeCounters, "sy_fe_counters"}, {&c.backendCounters, o.SyBeCounters, "sy_be_counters"},
	} {
		if *x.to, err = openChunked(x.outer, inner[x.name], pins); err != nil {
			return c, err
		}
	}
	return c, nil
}

func (c *chunks) all() []*chunked {
	return []*chunked{c.slots, c.backends, c.frontendCounters, c.backendCounters}
}

func (c *chunks) close() {
	for _, x := range c.all() {
		if x != nil {
			x.close()
		}
	}
}

// openChunked opens the chunks of an earlier agent.
func openChunked(outer *ebpf.Map, spec *ebpf.MapSpec, pins *pin.Pins) (*chunked, error) {
	c := &chunked{outer: outer, spec: spec, pins: pins}
	for range outer.MaxEntries() {
		m, err := ebpf.LoadPinnedMap(c.pin(len(c.chunks)), nil)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("open a chunk of %s: %w", c.name(), err)
		}
		if m == nil {
			break
		}
		c.chunks = append(c.chunks, m)
		if err := c.outer.Put(uint32(len(c.chunks)-1), m); err != nil { // the agent may have ended before it did
			return nil, fmt.Errorf("add a chunk to %s: %w", c.name(), err)
		}
	}
	return c, nil
}

func (c *chunked) name() string { return c.spec.Name }

func (c *chunked) pin(chunk int) string {
	return c.pins.Chunk(fmt.Sprintf("%s-%d", c.spec.Name, chunk))
}

// len returns the number of elements that exist.
func (c *chunked) len() uint32 {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return uint32(len(c.chunks)) * c.spec.MaxEntries
}

// maps returns the chunks that exist.
func (c *chunked) maps() []*ebpf.Map {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return slices.Clone(c.chunks)
}

// grow adds chunks until there are n elements. It may be called while other methods run.
func (c *chunked) grow(n uint32) (err error) {
	if c.len() >= n {
		return nil
	}
	c.growing.Lock()
	defer c.growing.Unlock()
	first := int(c.len() / c.spec.MaxEntries)
	var added []*ebpf.Map
	defer func() {
		if err != nil {
			for _, m := range added {
				err = errors.Join(err, m.Unpin(), m.Close())
			}
		}
	}()
	for c.len()+uint32(len(added))*c.spec.MaxEntries < n {
		m, err := ebpf.NewMap(c.spec)
		if err != nil {
			return fmt.Errorf("add a chunk to %s: %w", c.name(), err)
		}
		if err := m.Pin(c.pin(first + len(added))); err != nil {
			m.Close()
			return fmt.Errorf("pin a chunk of %s: %w", c.name(), err)
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
		return fmt.Errorf("add chunks to %s: %w", c.name(), err)
	}
	c.mu.Lock()
	c.chunks, c.grown = append(c.chunks, added...), c.grown+1
	c.mu.Unlock()
	return nil
}

// at returns the chunk of an element and its index there.
func (c *chunked) at(i uint32) (*ebpf.Map, uint32) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return c.chunks[i/c.spec.MaxEntries], i % c.spec.MaxEntries
}

// put writes an element, which exists after grow.
func (c *chunked) put(i uint32, value any) error {
	m, k := c.at(i)
	return m.Put(k, value)
}

func (c *chunked) lookup(i uint32, value any) error {
	m, k := c.at(i)
	return m.Lookup(k, value)
}

// barrier returns when no program that runs now runs any longer: the kernel waits for a grace period when an element of
// an array of maps is written (maybe_wait_bpf_programs in kernel/bpf/syscall.c). It takes about 20 ms.
func (c *chunked) barrier() error {
	if c.len() == 0 {
		return nil
	}
	first, _ := c.at(0)
	return c.outer.Put(uint32(0), first)
}

func (c *chunked) close() {
	for _, m := range c.chunks {
		m.Close()
	}
}
