package l2

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/lb"
)

// Options configures an Announcer.
type Options struct {
	Interfaces []string
	Log        *slog.Logger
	// Repeat are the delays after which gratuitous frames are sent again. nil: 100 ms, 500 ms, 1 s, 2 s and 4 s.
	Repeat []time.Duration
}

var defaultRepeat = []time.Duration{
	100 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second,
}

// Announcer implements lb.Announcer.
type Announcer struct {
	o          Options
	metrics    *metrics
	responders []*responder

	mu        sync.RWMutex // guards all below; a reply is sent under RLock, so that Set waits for it
	owned     map[netip.Addr]struct{}
	conflicts map[string]bool // logged already: VIP and MAC
	ctx       context.Context // of Run; nil before
	bursts    sync.WaitGroup
}

// New returns an Announcer. It sends nothing before Set and Run.
func New(o Options) (*Announcer, error) {
	if len(o.Interfaces) == 0 {
		return nil, errors.New("no interface given")
	}
	if o.Repeat == nil {
		o.Repeat = defaultRepeat
	}
	a := &Announcer{o: o, metrics: newMetrics(), owned: map[netip.Addr]struct{}{}, conflicts: map[string]bool{}}
	for _, name := range o.Interfaces {
		r := &responder{a: a, name: name, log: o.Log.With("interface", name), sys: kernel}
		a.responders = append(a.responders, r)
	}
	return a, nil
}

// Set implements lb.Announcer. It fails for addresses that are not unicast, and announces the others.
func (a *Announcer) Set(_ context.Context, list []lb.Announcement) error {
	want, errs := map[netip.Addr]struct{}{}, lb.VIPErrors{}
	for _, x := range list {
		if !x.VIP.IsGlobalUnicast() {
			errs.Add(x.VIP, errors.New("not a global unicast address"))
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
	for _, p := range a.responders {
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
		a.announce(ctx, a.responders, added)
	}
	return errs.OrNil()
}

// announce sends gratuitous frames for vips now, and again after each delay of Repeat, because frames can be lost.
func (a *Announcer) announce(ctx context.Context, responders []*responder, vips []netip.Addr) {
	send := func() {
		for _, p := range responders {
			p.gratuitous(vips)
		}
	}
	send()
	a.bursts.Go(func() {
		start := time.Now()
		for _, after := range a.o.Repeat {
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Until(start.Add(after))):
				send()
			}
		}
	})
}

// Run replies to requests until ctx ends.
func (a *Announcer) Run(ctx context.Context) error {
	a.mu.Lock()
	a.ctx = ctx
	a.mu.Unlock()
	changes, stop, err := watchLinks(ctx, a.responders, a.o.Log)
	if err != nil {
		return err
	}
	defer stop()
	var running sync.WaitGroup
	for i, p := range a.responders {
		running.Go(func() { p.run(ctx, changes[i]) })
	}
	running.Wait()
	a.mu.Lock()
	a.ctx = nil
	a.mu.Unlock()
	a.bursts.Wait()
	return nil
}

// reply calls send when vip is owned. A Set that removes vip returns only after send has.
func (a *Announcer) reply(vip netip.Addr, send func() error) (sent bool, err error) {
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

// conflict counts an address conflict (RFC 5227 §2.4): a frame in which another host claims an owned VIP. It is logged
// once per VIP and MAC address.
func (a *Announcer) conflict(vip netip.Addr, mac, iface string) {
	a.mu.Lock()
	_, owned := a.owned[vip]
	key := vip.String() + " " + mac
	known := a.conflicts[key]
	if owned {
		a.conflicts[key] = true
	}
	a.mu.Unlock()
	if !owned {
		return
	}
	a.metrics.conflicts.WithLabelValues(iface).Inc()
	if !known {
		a.o.Log.Warn("address conflict", "vip", vip, "mac", mac, "interface", iface)
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

type metrics struct{ replies, gratuitous, conflicts *prometheus.CounterVec }

func newMetrics() *metrics {
	counter := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"interface"})
	}
	return &metrics{
		replies: counter("steelyard_l2_replies_total",
			"ARP replies and neighbour advertisements sent in reply to requests for owned VIPs."),
		gratuitous: counter("steelyard_l2_gratuitous_total",
			"Gratuitous ARP and unsolicited neighbour advertisements sent for owned VIPs."),
		conflicts: counter("steelyard_l2_conflicts_total",
			"Address conflicts (RFC 5227): frames in which another host claims an owned VIP."),
	}
}

func (m *metrics) each(f func(prometheus.Collector)) {
	for _, c := range []*prometheus.CounterVec{m.replies, m.gratuitous, m.conflicts} {
		f(c)
	}
}
