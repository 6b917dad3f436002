package packets

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/rlimit"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb"
)

// tracedPerSecond is the rate of the packets that are traced. They come from a client that sends nothing else.
const tracedPerSecond = 10_000

// Traced is what a trace of one client's packets costs the packets of others.
type Traced struct {
	Hook string
	// Ratio is the median of the rounds' ratios of the others' rates with the trace and without it, while the client
	// sends in both. Low and High are the extremes.
	Ratio, Low, High float64
	Sent, Traced     uint64 // packets of the client during the traces
}

// Trace measures both hooks.
func Trace(o LiveOptions) (_ []Traced, err error) {
	if err := rlimit.RemoveMemlock(); err != nil {
		return nil, err
	}
	l, err := lab.New()
	if err != nil {
		return nil, err
	}
	b := &bench{lab: l, flows: flows32k, nodes: map[string]*node{}, recorded: map[string]*ebpf.Map{}}
	defer func() { err = errors.Join(err, b.Close()) }()
	var all []Traced
	for _, mode := range []datapath.Mode{datapath.ModeXDP, datapath.ModeTC} {
		w := &way{name: "traced " + string(mode), vip: vipNAT, to: onLink, prepare: prepareSteelyard(mode)}
		fmt.Fprintf(o.Log, "prepare %s\n", w.name)
		if err := w.build(b); err != nil {
			return nil, err
		}
		r, err := w.newRun(live32k)
		if err != nil {
			return nil, err
		}
		t, err := r.traced(o)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", w.name, err)
		}
		t.Hook = string(mode)
		all = append(all, t)
	}
	return all, nil
}

// traced measures each round without a trace and with one.
func (r *run) traced(o LiveOptions) (t Traced, err error) {
	var ratios []float64
	for range o.Rounds {
		if _, err := r.besideClient(o.Packets); err != nil {
			return t, err
		}
		err := r.way.node.trace(&t.Traced, func() error {
			sent, err := r.besideClient(o.Packets)
			t.Sent += sent
			return err
		})
		if err != nil {
			return t, err
		}
		n := len(r.rates)
		ratios = append(ratios, r.rates[n-1]/r.rates[n-2])
	}
	t.Ratio, t.Low, t.High = median(ratios), slices.Min(ratios), slices.Max(ratios)
	return t, nil
}

// trace calls f during a trace of the client, and adds the number of packets to traced.
func (n *node) trace(traced *uint64, f func() error) error {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	began, ended := make(chan struct{}, 1), make(chan error, 1)
	go func() {
		ended <- n.host.Do(func() error {
			filter := lb.TraceFilter{Client: server4(99), VIP: vipNAT}
			return n.dp.Trace(ctx, filter, nil, func(events []lb.TraceEvent) error {
				for _, e := range events {
					if e.Packet != nil {
						*traced++
					}
				}
				select {
				case began <- struct{}{}:
				default:
				}
				return nil
			})
		})
	}()
	select {
	case <-began:
	case err := <-ended:
		return err
	}
	err := f()
	time.Sleep(200 * time.Millisecond) // until the last records are read
	cancel()
	if ending := <-ended; !errors.Is(ending, context.Canceled) {
		err = errors.Join(err, ending)
	}
	return err
}

// besideClient measures the others' rate while the client sends, and returns the number of the client's packets.
func (r *run) besideClient(packets int) (sent uint64, err error) {
	var fd int
	err = r.way.client.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	})
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	p := toVIP(vipNAT, dptest.TCP)
	p.Src, p.Flags = netip.AddrPortFrom(server4(99), p.Src.Port()), dptest.SYN
	frame := p.Frame()
	copy(frame[:12], r.w.frame) // MAC addresses
	var stop atomic.Bool
	done := make(chan error, 1)
	go func() {
		to := &unix.SockaddrLinklayer{Ifindex: int(r.way.source)}
		for start := time.Now(); !stop.Load(); time.Sleep(time.Millisecond) {
			for due := uint64(time.Since(start).Seconds() * tracedPerSecond); sent < due; sent++ {
				err := unix.Sendto(fd, frame, 0, to)
				if errors.Is(err, unix.ENOBUFS) { // the others have filled the link's queue
					break
				}
				if err != nil {
					done <- err
					return
				}
			}
		}
		done <- nil
	}()
	err = r.measure(packets)
	stop.Store(true)
	return sent, errors.Join(err, <-done)
}
