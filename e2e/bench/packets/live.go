package packets

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// LiveOptions are the options of Live.
type LiveOptions struct {
	Rounds  int
	Packets int // per round and way
	Log     io.Writer
}

const (
	live1, live32k, liveSYN = "1 flow", "32k flows", "new SYN"
	flows32k                = 1 << 15
)

// LiveLoads are the table's columns.
var LiveLoads = []string{live1, live32k, liveSYN}

// Rate is a way's packet rate under a load.
type Rate struct {
	Way, Load string
	// PerSecond is the median of the rounds, and Best the maximum. They include the work of source and sink on the same
	// CPU.
	PerSecond, Best float64
	// Base is the name of the way that Ratio compares this one with. Ratio is the median of the rounds' ratios, and Low
	// and High are their extremes.
	Base             string
	Ratio, Low, High float64
}

// run is a way under a load.
type run struct {
	way   *way
	load  string
	w     *wrapper
	rates []float64
}

// Live measures packet rates.
func Live(o LiveOptions) (_ []Rate, err error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, err
	}
	l, err := lab.New()
	if err != nil {
		return nil, err
	}
	b := &bench{lab: l, flows: flows32k, nodes: map[string]*node{}, recorded: map[string]*ebpf.Map{}}
	defer func() { err = errors.Join(err, b.Close()) }()
	var runs []*run
	for _, w := range ways() {
		fmt.Fprintf(o.Log, "prepare %s\n", w.name)
		if err := w.build(b); err != nil {
			return nil, fmt.Errorf("%s: %w", w.name, err)
		}
		for _, load := range LiveLoads {
			r, err := w.newRun(load)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", w.name, err)
			}
			runs = append(runs, r)
		}
	}
	// Runs with the same load follow each other, because they are compared.
	slices.SortStableFunc(runs, func(a, b *run) int {
		return slices.Index(LiveLoads, a.load) - slices.Index(LiveLoads, b.load)
	})
	fmt.Fprintf(o.Log, "%d measurements, %d rounds\n", len(runs), o.Rounds)
	for range o.Rounds {
		for _, r := range runs {
			if err := r.measure(o.Packets); err != nil {
				return nil, fmt.Errorf("%s, %s: %w", r.way.name, r.load, err)
			}
		}
	}
	return rates(runs), nil
}

func (w *way) newRun(load string) (*run, error) {
	frame := toVIP(w.vip, dptest.TCP)
	frame.Flags, frame.Seq, frame.Ack = dptest.ACK, 1001, 5001
	if load == liveSYN {
		frame.Flags, frame.Ack = dptest.SYN, 0
	}
	wr, err := newWrapper(nil, hookXDP, packets{frame: frame, vary: varyClient}, nil)
	if err != nil {
		return nil, err
	}
	f := flows{0, math.MaxUint32, strideMeasure,
		map[string]uint32{live1: 0, live32k: flows32k - 1, liveSYN: 1<<24 - 1}[load]}
	if load == liveSYN {
		f.base = 1 << 23
	}
	return &run{way: w, load: load, w: wr}, wr.set(f)
}

// measure sends packets and counts the arrivals.
func (r *run) measure(packets int) error {
	if err := r.send(packets / 10); err != nil {
		return err
	}
	before, err := r.way.arrived()
	if err != nil {
		return err
	}
	start := time.Now()
	if err := r.send(packets); err != nil {
		return err
	}
	took := time.Since(start)
	after, err := r.way.arrived()
	if err != nil {
		return err
	}
	if after-before < uint64(packets)/20 {
		return fmt.Errorf("%d of %d packets arrived", after-before, packets)
	}
	var dst [4]byte
	if err := r.way.sink.ReceivedDst.Get(&dst); err != nil {
		return err
	}
	if addr := netip.AddrFrom4(dst); !r.way.to.Contains(addr) {
		return fmt.Errorf("the packets went to %s; want %s", addr, r.way.to)
	}
	r.rates = append(r.rates, float64(after-before)/took.Seconds())
	return nil
}

func (r *run) send(packets int) error {
	const liveFrames = 1 << 1 // BPF_F_TEST_XDP_LIVE_FRAMES
	o := ebpf.RunOptions{Data: r.w.frame, Repeat: uint32(packets), Flags: liveFrames,
		Context: xdpContext(r.w.frame, r.way.source)}
	return r.way.client.Do(func() error {
		_, err := r.w.objs.SourceXdp.Run(&o)
		return err
	})
}

// arrived waits until no more packets arrive and returns their number.
func (w *way) arrived() (n uint64, err error) {
	for still := 0; still < 10; still++ {
		var now uint64
		if err := w.sink.Received.Get(&now); err != nil {
			return 0, err
		}
		if now != n {
			n, still = now, 0
		}
		time.Sleep(time.Millisecond)
	}
	return n, nil
}

func rates(runs []*run) (out []Rate) {
	byName := map[string]*run{}
	for _, r := range runs {
		byName[r.way.name+r.load] = r
	}
	for _, r := range runs {
		rate := Rate{Way: r.way.name, Load: r.load, PerSecond: median(r.rates), Best: slices.Max(r.rates),
			Base: r.way.base}
		base := byName[r.way.base+r.load]
		var ratios []float64
		for i := range r.rates {
			ratios = append(ratios, r.rates[i]/base.rates[i])
		}
		rate.Ratio, rate.Low, rate.High = median(ratios), slices.Min(ratios), slices.Max(ratios)
		out = append(out, rate)
	}
	return out
}
