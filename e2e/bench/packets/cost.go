package packets

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"regexp"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// CostOptions are the options of Cost.
type CostOptions struct {
	Rows    *regexp.Regexp // matches the names of paths
	Flows   int            // open flows of the largest load, a power of two
	Packets int            // per round
	Rounds  int
	Log     io.Writer
}

// Cell is the cost of a path under a load, in nanoseconds per packet.
type Cell struct {
	Path, Load string
	// Min and Median are of all rounds, without the wrapper.
	Min, Median float64
	Wrapper     float64
	// TimesFloor is Min as a multiple of the floor's Min under the same load. TimesFloorWhole is the same ratio
	// including the wrapper.
	TimesFloor, TimesFloorWhole float64
}

type cell struct {
	path, load   string
	w            *wrapper
	prog         *ebpf.Program
	times, nulls []float64
}

func Cost(o CostOptions) (_ []Cell, err error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, err
	}
	l, err := lab.New()
	if err != nil {
		return nil, err
	}
	b := &bench{lab: l, flows: o.Flows, nodes: map[string]*node{}, recorded: map[string]*ebpf.Map{}}
	defer func() { err = errors.Join(err, b.Close()) }()
	cells, err := b.cells(o)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(o.Log, "%d measurements, %d rounds\n", len(cells), o.Rounds)
	for range o.Rounds {
		for _, c := range cells {
			if err := c.measure(o.Packets); err != nil {
				return nil, fmt.Errorf("%s, %s: %w", c.path, c.load, err)
			}
		}
	}
	return results(cells), nil
}

// measure measures one round. With a medium number of flows, warming up brings each flow's entry into the caches; with
// many flows, entries are never cached.
func (c *cell) measure(packets int) error {
	warm := 2000
	if c.load == load64k || c.load == loadUDP {
		warm = flows64k
	}
	if _, _, _, err := c.w.run(c.prog, warm); err != nil {
		return err
	}
	ns, _, _, err := c.w.run(c.prog, packets)
	if err != nil {
		return err
	}
	// Use the same number of packets, so that the fixed cost of a run is the same.
	null, _, _, err := c.w.run(c.w.null(), packets)
	if err != nil {
		return err
	}
	c.times, c.nulls = append(c.times, ns), append(c.nulls, null)
	return nil
}

func (b *bench) cells(o CostOptions) (cells []*cell, err error) {
	floors, err := b.floors()
	if err != nil {
		return nil, err
	}
	for _, p := range paths {
		if !o.Rows.MatchString(p.name) {
			continue
		}
		fmt.Fprintf(o.Log, "prepare %s\n", p.name)
		for _, load := range p.loads {
			if load == load1M && b.flows < flows1M {
				continue
			}
			n, err := b.node(p.node)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", p.name, err)
			}
			c, err := b.cell(p, load, n, p.program(n))
			if err != nil {
				return nil, fmt.Errorf("%s, %s: %w", p.name, load, err)
			}
			cells = append(cells, c)
		}
	}
	return append(floors, cells...), nil
}

// cell prepares a measurement and checks that the program does what should be measured.
func (b *bench) cell(p path, load string, n *node, prog *ebpf.Program) (*cell, error) {
	proto := uint8(dptest.TCP)
	if load == loadUDP {
		proto = dptest.UDP
	}
	frame := p.frame(proto)
	if frame.Proto == dptest.TCP {
		frame.Flags, frame.Seq, frame.Ack = dptest.ACK, 1001, 5001
		if load == loadSYN {
			frame.Flags, frame.Ack = dptest.SYN, 0
		}
	}
	recorded := b.recorded[p.node+map[uint8]string{dptest.TCP: "tcp", dptest.UDP: "udp"}[proto]]
	w, err := newWrapper(n, p.hook, packets{frame: frame, ipAt: p.ipAt, vary: p.vary, services: p.services}, recorded)
	if err != nil {
		return nil, err
	}
	f := flows{0, math.MaxUint32, strideMeasure, map[string]uint32{
		load1: 0, load64k: flows64k - 1, loadUDP: flows64k - 1, load1M: flows1M - 1, loadSYN: 1<<24 - 1,
	}[load]}
	if p.vary == varyRecorded {
		f.stride = 1 // makes reading the records cheap; their order is random
	}
	if load == loadSYN {
		f.base = 1 << 23
	}
	if err := w.set(f); err != nil {
		return nil, err
	}
	c := &cell{path: p.name, load: load, w: w, prog: prog}
	for range 32 {
		_, ret, out, err := w.run(prog, 1)
		if err != nil {
			return nil, err
		}
		if err := p.check(ret, out); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func (p path) check(ret uint32, out []byte) error {
	if p.want != 0 && ret != p.want {
		return fmt.Errorf("the program returned %d; want %d; the packet is %x", int32(ret), int32(p.want), out)
	}
	src, dst := addresses(out)
	if p.from.IsValid() && !p.from.Contains(src) || p.to.IsValid() && !p.to.Contains(dst) {
		return fmt.Errorf("the packet is from %s to %s; want %s to %s", src, dst, p.from, p.to)
	}
	return nil
}

// addresses returns the addresses in a frame's first IP header.
func addresses(f []byte) (src, dst netip.Addr) {
	if f[14]>>4 == 6 {
		src, _ = netip.AddrFromSlice(f[22:38])
		dst, _ = netip.AddrFromSlice(f[38:54])
		return src, dst
	}
	src, _ = netip.AddrFromSlice(f[26:30])
	dst, _ = netip.AddrFromSlice(f[30:34])
	return src, dst
}

func results(cells []*cell) (out []Cell) {
	floor := map[string]Cell{}
	for _, c := range cells {
		null := slices.Min(c.nulls)
		r := Cell{Path: c.path, Load: c.load, Wrapper: null, Min: slices.Min(c.times) - null,
			Median: median(c.times) - median(c.nulls)}
		if c.path == Floor {
			floor[c.load] = r
		}
		out = append(out, r)
	}
	for i := range out {
		c := &out[i]
		if f, ok := floor[c.Load]; ok {
			c.TimesFloor = c.Min / f.Min
			c.TimesFloorWhole = (c.Min + c.Wrapper) / (f.Min + f.Wrapper)
		}
	}
	return out
}

func median(x []float64) float64 {
	x = slices.Sorted(slices.Values(x))
	return (x[(len(x)-1)/2] + x[len(x)/2]) / 2
}
