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
	// Claim: announce addresses without asking whether another host has them. For tests.
	Claim bool
}

// Limits of what is sent without being asked for, in all interfaces together, and of what is logged about conflicts.
const (
	frameInterval = 250 * time.Microsecond // per address
	frameBurst    = 32
	logInterval   = 10 * time.Second
	logBurst      = 20
)

var defaultRepeat = []time.Duration{
	100 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second,
}

// Announcer implements lb.Announcer.
type Announcer struct {
	o          Options
	metrics    *metrics
	responders []*responder
	claimed    chan struct{} // capacity 1: there are new claims
	links      *linkWatcher
	pace       bucket // of frames that are not replies
	logged     bucket // conflicts in the log: anyone in the segment can cause them

	mu     sync.RWMutex // guards all below; a reply is sent under RLock, so that Set waits for it
	owned  map[netip.Addr]*ownership
	claims map[netip.Addr]*claim    // not owned yet
	rivals map[netip.Addr]*Conflict // the last of each VIP that is owned or claimed
	ctx    context.Context          // of Run; nil before
	bursts sync.WaitGroup
}

// New returns an Announcer. It sends nothing before Set and Run.
func New(o Options) (*Announcer, error) {
	if len(o.Interfaces) == 0 {
		return nil, errors.New("no interface given")
	}
	if o.Repeat == nil {
		o.Repeat = defaultRepeat
	}
	a := &Announcer{
		o: o, metrics: newMetrics(), claimed: make(chan struct{}, 1),
		owned: map[netip.Addr]*ownership{}, claims: map[netip.Addr]*claim{}, rivals: map[netip.Addr]*Conflict{},
		pace:   bucket{interval: frameInterval, burst: frameBurst},
		logged: bucket{interval: logInterval, burst: logBurst},
	}
	for _, name := range o.Interfaces {
		r := &responder{a: a, name: name, log: o.Log.With("interface", name), sys: kernel}
		a.responders = append(a.responders, r)
	}
	a.links = newLinkWatcher(a.responders, a.metrics.overruns, o.Log)
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
		if !a.has(vip) {
			added = append(added, vip)
			a.claims[vip] = &claim{due: time.Now()}
			for _, p := range a.responders {
				p.join(vip)
			}
		}
	}
	for _, vip := range a.allOf() {
		if _, ok := want[vip]; !ok {
			delete(a.owned, vip)
			delete(a.claims, vip)
			delete(a.rivals, vip)
			for _, p := range a.responders {
				p.leave(vip)
			}
		}
	}
	ctx := a.ctx
	if a.o.Claim {
		for _, vip := range added {
			delete(a.claims, vip)
			a.owned[vip] = &ownership{}
		}
	} else {
		a.wake()
		added = nil // runClaims announces them
	}
	a.mu.Unlock()
	if ctx != nil && len(added) > 0 {
		slices.SortFunc(added, netip.Addr.Compare)
		a.announce(ctx, a.responders, added)
	}
	return errs.OrNil()
}

// has reports whether vip is owned or claimed; a.mu is held.
func (a *Announcer) has(vip netip.Addr) bool {
	_, owned := a.owned[vip]
	_, claimed := a.claims[vip]
	return owned || claimed
}

// allOf returns the owned and the claimed VIPs; a.mu is held.
func (a *Announcer) allOf() []netip.Addr {
	return slices.AppendSeq(slices.Collect(maps.Keys(a.owned)), maps.Keys(a.claims))
}

// announce sends gratuitous frames for vips, and again after each delay of Repeat, because frames can be lost. It does
// not wait.
func (a *Announcer) announce(ctx context.Context, responders []*responder, vips []netip.Addr) {
	a.bursts.Go(func() {
		start := time.Now()
		for _, after := range append([]time.Duration{0}, a.o.Repeat...) {
			select {
			case <-ctx.Done():
				return
			case <-time.After(time.Until(start.Add(after))):
			}
			for _, p := range responders {
				p.gratuitous(ctx, vips)
			}
		}
	})
}

// Run replies to requests until ctx ends.
func (a *Announcer) Run(ctx context.Context) error {
	a.mu.Lock()
	a.ctx = ctx
	a.mu.Unlock()
	links := a.links
	var running sync.WaitGroup
	running.Go(func() { links.run(ctx) })
	for i, p := range a.responders {
		running.Go(func() { p.run(ctx, links.changes[i]) })
	}
	running.Go(func() { a.runClaims(ctx) })
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

// Describe implements prometheus.Collector.
func (a *Announcer) Describe(ch chan<- *prometheus.Desc) {
	a.metrics.each(func(c prometheus.Collector) { c.Describe(ch) })
}

// Collect implements prometheus.Collector.
func (a *Announcer) Collect(ch chan<- prometheus.Metric) {
	a.metrics.each(func(c prometheus.Collector) { c.Collect(ch) })
}

type metrics struct {
	replies, gratuitous, conflicts *prometheus.CounterVec
	overruns                       prometheus.Counter
}

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
		overruns: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "steelyard_l2_link_overruns_total",
			Help: "Overruns of the queue of link updates, after which every interface is looked at again.",
		}),
	}
}

func (m *metrics) each(f func(prometheus.Collector)) {
	for _, c := range []prometheus.Collector{m.replies, m.gratuitous, m.conflicts, m.overruns} {
		f(c)
	}
}
