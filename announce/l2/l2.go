package l2

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/lb"
)

// Options is everything an Announcer needs.
type Options struct {
	Interfaces []string
	Log        *slog.Logger
	// Repeat is when a take-over is told again, after the first time. nil: 100 ms, 500 ms, 1 s, 2 s and 4 s.
	Repeat []time.Duration
}

var repeats = []time.Duration{100 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second}

// Announcer implements lb.Announcer.
type Announcer struct {
	o       Options
	metrics *metrics
	ports   []*port

	mu     sync.RWMutex            // guards all below; an answer is sent under RLock, so that Set waits for it
	owned  map[netip.Addr]struct{} //
	rivals map[string]bool         // reported already: VIP and MAC
	ctx    context.Context         // of Run; nil before
	bursts sync.WaitGroup
}

// New returns an Announcer that is silent until it owns something and runs.
func New(o Options) (*Announcer, error) {
	if len(o.Interfaces) == 0 {
		return nil, errors.New("no interface to answer on")
	}
	if o.Repeat == nil {
		o.Repeat = repeats
	}
	a := &Announcer{o: o, metrics: newMetrics(), owned: map[netip.Addr]struct{}{}, rivals: map[string]bool{}}
	for _, name := range o.Interfaces {
		a.ports = append(a.ports, &port{a: a, name: name, log: o.Log.With("interface", name)})
	}
	return a, nil
}

// Set implements lb.Announcer. It fails for addresses that no neighbour can ask for, and announces the others.
func (a *Announcer) Set(_ context.Context, list []lb.Announcement) error {
	want, errs := map[netip.Addr]struct{}{}, []error(nil)
	for _, x := range list {
		if !x.VIP.IsGlobalUnicast() {
			errs = append(errs, fmt.Errorf("announce %s by ARP or NDP: it is no unicast address", x.VIP))
			continue
		}
		want[x.VIP] = struct{}{}
	}
	a.mu.Lock()
	var added []netip.Addr
	for vip := range want {
		if _, ok := a.owned[vip]; !ok {
			added = append(added, vip)
		}
	}
	for _, p := range a.ports {
		for vip := range a.owned {
			if _, ok := want[vip]; !ok {
				p.leave(vip)
			}
		}
		for _, vip := range added {
			p.join(vip)
		}
	}
	a.owned = want
	ctx := a.ctx
	a.mu.Unlock()
	if ctx != nil && len(added) > 0 {
		slices.SortFunc(added, netip.Addr.Compare)
		a.tell(ctx, a.ports, added)
	}
	return errors.Join(errs...)
}

// tell announces the take-over of VIPs at once, and again later: switches and neighbours miss things.
func (a *Announcer) tell(ctx context.Context, ports []*port, vips []netip.Addr) {
	say := func() {
		for _, p := range ports {
			p.gratuitous(vips)
		}
	}
	say()
	a.bursts.Go(func() {
		start := time.Now()
		for _, after := range a.o.Repeat {
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Until(start.Add(after))):
				say()
			}
		}
	})
}

// Run answers until ctx ends.
func (a *Announcer) Run(ctx context.Context) error {
	a.mu.Lock()
	a.ctx = ctx
	a.mu.Unlock()
	changes, stop, err := watchLinks(ctx, a.ports, a.o.Log)
	if err != nil {
		return err
	}
	defer stop()
	var running sync.WaitGroup
	for i, p := range a.ports {
		running.Go(func() { p.run(ctx, changes[i]) })
	}
	running.Wait()
	a.mu.Lock()
	a.ctx = nil
	a.mu.Unlock()
	a.bursts.Wait()
	return nil
}

// answer runs send when vip is owned, so that it is over before a Set that drops vip returns.
func (a *Announcer) answer(vip netip.Addr, send func() error) (sent bool, err error) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	if _, ok := a.owned[vip]; !ok {
		return false, nil
	}
	return true, send()
}

// all returns the owned VIPs, sorted.
func (a *Announcer) all() []netip.Addr {
	a.mu.RLock()
	defer a.mu.RUnlock()
	return slices.SortedFunc(maps.Keys(a.owned), netip.Addr.Compare)
}

// rival reports another machine that claims an owned VIP, once for each.
func (a *Announcer) rival(vip netip.Addr, mac, iface string) {
	a.mu.Lock()
	_, owned := a.owned[vip]
	key := vip.String() + " " + mac
	known := a.rivals[key]
	if owned {
		a.rivals[key] = true
	}
	a.mu.Unlock()
	if !owned {
		return
	}
	a.metrics.rivals.WithLabelValues(iface).Inc()
	if !known {
		a.o.Log.Warn("another machine claims a VIP of ours", "vip", vip, "mac", mac, "interface", iface)
	}
}

// Describe implements prometheus.Collector.
func (a *Announcer) Describe(ch chan<- *prometheus.Desc) {
	a.metrics.each(func(c prometheus.Collector) { c.Describe(ch) })
}

// Collect implements prometheus.Collector.
func (a *Announcer) Collect(ch chan<- prometheus.Metric) {
	a.metrics.each(func(c prometheus.Collector) { c.Collect(ch) })
}

type metrics struct{ answers, gratuitous, rivals *prometheus.CounterVec }

func newMetrics() *metrics {
	counter := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"interface"})
	}
	return &metrics{
		answers:    counter("steelyard_l2_answers_total", "ARP and NDP answers for owned VIPs."),
		gratuitous: counter("steelyard_l2_gratuitous_total", "Unasked announcements of owned VIPs."),
		rivals:     counter("steelyard_l2_rival_frames_total", "Frames in which another machine claims an owned VIP."),
	}
}

func (m *metrics) each(f func(prometheus.Collector)) {
	for _, c := range []*prometheus.CounterVec{m.answers, m.gratuitous, m.rivals} {
		f(c)
	}
}
