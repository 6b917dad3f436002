package l2

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/announce/l2/members"
	"github.com/steelyard-lb/steelyard/lb"
)

// Options configures an Announcer.
type Options struct {
	Interfaces []string
	Log        *slog.Logger
	// Repeat has the delays after which gratuitous frames are repeated. nil means 100 ms, 500 ms, 1 s, 2 s and 4 s.
	Repeat []time.Duration
	// Members are the other nodes with the same VIPs; only one node at a time has a VIP. If nil, there are none, and a
	// VIP is announced if no host replies for it.
	Members Membership
	// Forwards reports whether packets that arrive on an interface are forwarded. The announcer replies only on such
	// interfaces, and detects changes within a second. nil means all interfaces.
	Forwards func(name string) bool
	// ProbeOwn is the interval between probes for other hosts that reply for this node's VIPs, in whole seconds. 0
	// disables them.
	ProbeOwn time.Duration
	// Boundary wraps the handling of each frame and each kernel notification. It may be nil.
	Boundary *lb.Boundary
	// Claim announces addresses without probing. It is for tests.
	Claim bool
}

// Limits for unsolicited frames on all interfaces together, and for log lines about conflicts.
const (
	frameInterval = 250 * time.Microsecond // per address
	frameBurst    = 32
	// For probes and the first frames of an announcement, for which clients wait.
	urgentInterval = 20 * time.Microsecond
	urgentBurst    = 256
	logInterval    = 10 * time.Second
	logBurst       = 20
)

var defaultRepeat = []time.Duration{
	100 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second,
}

// Announcer implements lb.Announcer.
type Announcer struct {
	o          Options
	metrics    *metrics
	responders []*responder
	claimed    chan struct{} // capacity 1; signals new claims
	pace       bucket        // for frames other than replies
	urgent     bucket        // for frames that clients wait for
	logged     bucket        // for log lines, because any host in the segment can cause conflicts

	mu     sync.RWMutex // guards all below; replies are sent under RLock, so that Set waits for them
	owned  map[netip.Addr]*ownership
	claims map[netip.Addr]*claim // not owned yet
	// conflicts has the last conflict of each owned or claimed VIP.
	conflicts map[netip.Addr]*Conflict
	// published are the claims last sent to the members.
	published map[netip.Addr]members.Claim
	// leaving are owned VIPs to be left to other members, until they have them.
	leaving    map[netip.Addr]*leave
	again      map[netip.Addr]time.Time // when to announce owned VIPs again
	alive      map[netip.Addr]time.Time // since when members have been alive
	local      map[netip.Addr]bool      // VIPs with endpoints on this node
	apart      map[netip.Addr]apart
	firstSet   time.Time       // zero before the first Set
	joined     bool            // see joining
	reelected  bool            // the members may have changed, so elect again
	uneven     bool            // … and some may have more of a service's VIPs than others
	publishing bool            // what this node publishes may have changed
	macs       chan struct{}   // capacity 1; this node's MAC addresses may have changed
	seen       atomic.Int64    // boottime when the process last ran, in nanoseconds
	ctx        context.Context // of Run; nil before
	// suspended is the end of the last suspension, or nil.
	suspended atomic.Pointer[time.Time]
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
	a := &Announcer{
		o: o, metrics: newMetrics(), claimed: make(chan struct{}, 1),
		owned: map[netip.Addr]*ownership{}, claims: map[netip.Addr]*claim{}, conflicts: map[netip.Addr]*Conflict{},
		leaving: map[netip.Addr]*leave{}, local: map[netip.Addr]bool{}, apart: map[netip.Addr]apart{},
		again:  map[netip.Addr]time.Time{},
		macs:   make(chan struct{}, 1),
		pace:   bucket{interval: frameInterval, burst: frameBurst},
		urgent: bucket{interval: urgentInterval, burst: urgentBurst},
		logged: bucket{interval: logInterval, burst: logBurst},
	}
	for _, name := range o.Interfaces {
		r := &responder{
			a: a, name: name, changed: make(chan struct{}, 1), log: o.Log.With("interface", name), sys: kernel,
		}
		a.responders = append(a.responders, r)
	}
	return a, nil
}

// Require sets Options.Forwards. Call it before Run.
func (a *Announcer) Require(forwards func(name string) bool) { a.o.Forwards = forwards }

// leave is a VIP being left to another member.
type leave struct {
	taken bool // frames from that member were heard
	moves bool // Set did not remove the VIP, so it stays if no member takes it
}

// Set implements lb.Announcer. It returns an error for addresses that are not unicast, but announces the others. With
// members, it waits up to a second for another member to take over the removed VIPs.
func (a *Announcer) Set(ctx context.Context, list []lb.Announcement) error {
	want, errs := map[netip.Addr]lb.Announcement{}, lb.VIPErrors{}
	for _, x := range list {
		if !x.VIP.IsGlobalUnicast() {
			errs.Add(x.VIP, errors.New("not a global unicast address"))
			continue
		}
		want[x.VIP] = x
	}
	a.mu.Lock()
	if a.firstSet.IsZero() {
		a.firstSet = time.Now()
	}
	added := a.add(want)
	removed := a.remove(want)
	running := a.ctx
	if a.o.Claim {
		for _, vip := range added {
			delete(a.claims, vip)
			a.owned[vip] = &ownership{since: time.Now(), announced: time.Now()}
		}
	} else {
		added = nil // runClaims will announce them
	}
	a.publishing = true
	a.wake()
	a.mu.Unlock()
	if running != nil && len(added) > 0 {
		slices.SortFunc(added, netip.Addr.Compare)
		a.announce(running, a.responders, added)
	}
	if len(removed) > 0 {
		if running != nil {
			a.handOver(ctx.Done())
		}
		a.mu.Lock()
		a.drop(removed)
		a.publishing = true
		a.wake()
		a.mu.Unlock()
	}
	return errs.OrNil()
}

// add claims the new VIPs and returns them. a.mu is held.
func (a *Announcer) add(want map[netip.Addr]lb.Announcement) (added []netip.Addr) {
	for vip := range want {
		a.local[vip] = want[vip].Local
		a.setApart(want[vip])
		if a.has(vip) {
			continue
		}
		added = append(added, vip)
		a.claims[vip] = &claim{due: time.Now()}
		for _, p := range a.responders {
			p.join(vip)
		}
	}
	return added
}

// remove drops the unwanted VIPs, except those that must first be left to another member. It returns these. a.mu is
// held.
func (a *Announcer) remove(want map[netip.Addr]lb.Announcement) (left []netip.Addr) {
	var gone []netip.Addr
	for _, vip := range a.allOf() {
		if _, ok := want[vip]; ok {
			continue
		}
		if _, owned := a.owned[vip]; owned && a.o.Members != nil {
			a.leaving[vip] = &leave{}
			left = append(left, vip)
		} else {
			gone = append(gone, vip)
		}
	}
	a.drop(gone)
	return left
}

func (a *Announcer) drop(vips []netip.Addr) {
	for _, vip := range vips {
		delete(a.owned, vip)
		delete(a.claims, vip)
		delete(a.conflicts, vip)
		delete(a.leaving, vip)
		delete(a.local, vip)
		delete(a.apart, vip)
		for _, p := range a.responders {
			p.leave(vip)
		}
	}
}

// has reports whether vip is owned or claimed. a.mu is held.
func (a *Announcer) has(vip netip.Addr) bool {
	_, owned := a.owned[vip]
	_, claimed := a.claims[vip]
	return owned || claimed
}

func (a *Announcer) allOf() []netip.Addr {
	return slices.AppendSeq(slices.Collect(maps.Keys(a.owned)), maps.Keys(a.claims))
}

// announce starts to send gratuitous frames for vips, immediately and after each delay in Repeat, because frames can be
// lost.
func (a *Announcer) announce(ctx context.Context, responders []*responder, vips []netip.Addr) {
	a.bursts.Go(func() {
		start := time.Now()
		pace := &a.urgent
		for _, after := range append([]time.Duration{0}, a.o.Repeat...) {
			if after > 0 { // with two timers of 0 in a synctest bubble, Go's race detector can crash
				select {
				case <-ctx.Done():
					return
				case <-time.After(time.Until(start.Add(after))):
				}
			}
			for _, p := range responders {
				p.gratuitous(ctx, vips, pace)
			}
			pace = &a.pace
		}
	})
}

// Run replies to requests until ctx ends.
func (a *Announcer) Run(ctx context.Context) error {
	a.mu.Lock()
	a.ctx = ctx
	a.mu.Unlock()
	var running sync.WaitGroup
	running.Go(func() { a.watchLinks(ctx) })
	for _, p := range a.responders {
		running.Go(func() { p.run(ctx) })
	}
	running.Go(func() { a.runClaims(ctx) })
	running.Go(func() { a.watchClock(ctx) })
	running.Go(func() { a.refresh(ctx) })
	if a.o.Members != nil {
		running.Go(func() { a.balance(ctx) })
		running.Go(func() { a.tellMACs(ctx) })
	}
	running.Wait()
	a.mu.Lock()
	a.ctx = nil
	a.mu.Unlock()
	a.bursts.Wait()
	return nil
}

// reply calls send if vip is owned. A Set that removes vip returns only after send has returned.
func (a *Announcer) reply(vip netip.Addr, send func() error) (sent bool, err error) {
	return a.whileOwned(vip, true, send)
}

// claimOwned calls send if vip is owned and not being left. The member that takes over announces the VIP itself and
// must receive no reply to its probes.
func (a *Announcer) claimOwned(vip netip.Addr, send func() error) (sent bool, err error) {
	return a.whileOwned(vip, false, send)
}

func (a *Announcer) whileOwned(vip netip.Addr, leavingToo bool, send func() error) (sent bool, err error) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	_, leaving := a.leaving[vip]
	if a.owned[vip] == nil || leaving && !leavingToo || a.wasSuspended() {
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
	a.mu.RLock()
	a.metrics.owned.Set(float64(len(a.owned)))
	a.mu.RUnlock()
	alive := 1
	if a.o.Members != nil {
		for _, p := range a.o.Members.Peers(netip.Addr{}) {
			if p.Alive {
				alive++
			}
		}
	}
	a.metrics.members.Set(float64(alive))
	a.metrics.each(func(c prometheus.Collector) { c.Collect(ch) })
}

type metrics struct {
	replies, gratuitous, conflicts *prometheus.CounterVec
	overruns                       prometheus.Counter
	members, owned                 prometheus.Gauge
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
			Help: "Overruns of the link update queue, after which every interface is checked again.",
		}),
		members: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "steelyard_l2_members", Help: "Members of [l2] that respond, including this node.",
		}),
		owned: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "steelyard_l2_addresses", Help: "VIPs that this node replies for.",
		}),
	}
}

func (m *metrics) each(f func(prometheus.Collector)) {
	for _, c := range []prometheus.Collector{
		m.replies, m.gratuitous, m.conflicts, m.overruns, m.members, m.owned,
	} {
		f(c)
	}
}
