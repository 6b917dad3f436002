package flow

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
)

// Timeouts says how long a flow in each state may be idle.
type Timeouts struct {
	HalfOpen    time.Duration // the client is not confirmed
	Established time.Duration // TCP and SCTP; RFC 5382, REQ-5: at least 2 h 4 min
	Closing     time.Duration // one side has sent FIN; RFC 5382, REQ-5: 4 min
	Closed      time.Duration // both have sent FIN, or one has sent RST; for packets in flight
	UDP         time.Duration // RFC 4787, REQ-5: at least 2 min
}

// Collector is the garbage collector of flows. It removes flows that have been idle for longer than their timeout, and
// flows that have ended because their backend is down or their frontend was removed. It reads the tables in chunks at a
// bounded rate, so a million flows cost no more per second than a thousand.
type Collector struct {
	Limits Timeouts

	objects  *bpf.Objects
	services *table.Services
	log      *slog.Logger
	wakeup   chan struct{}    // capacity 1: flows have ended
	state    [2]bpf.Collector // indexed by table, as in sy_collector
	strays   atomic.Bool      // see EndStrays
	swept    time.Time        // when entries without a socket were last searched
	empty    []uint64         // the packet counters before the last walk, if it found no entry

	mu        sync.Mutex            // guards all below
	frontends map[uint32]bpf.Method // whose flows end, and the exception (see End)
	flows     Counts
	tables    [2]uint32 // number of flows, indexed as in walk
	clients   []sampledClient
}

// Counts holds the number of flows in each state that the last complete walk found.
type Counts struct{ HalfOpen, Established, Closing int }

// timeWait is timeout_time_wait of bpf/config.h.
const timeWait = 65 * time.Second

const (
	chunk      = 4096
	firstChunk = 256
	walkEvery  = 5 * time.Second
	walkSoon   = time.Second           // after flows have ended
	chunkPause = 10 * time.Millisecond // at most 400,000 entries a second
)

// New returns a Collector that continues a previous agent's collection. If empty is set, there was none, and there are
// no flows.
func New(
	o *bpf.Objects, s *table.Services, empty bool, limits Timeouts, log *slog.Logger,
) (*Collector, error) {
	g := &Collector{
		Limits: limits, objects: o, services: s, log: log, wakeup: make(chan struct{}, 1),
		frontends: map[uint32]bpf.Method{},
	}
	return g, g.Resume(empty)
}

// End makes Run remove a frontend's flows, except flows with the given method. With method 0, for a removed frontend,
// it removes all flows and then releases the id.
func (g *Collector) End(frontend uint32, except bpf.Method) {
	g.mu.Lock()
	g.frontends[frontend] = except
	g.mu.Unlock()
	g.Wake()
}

// Wake makes the next walk begin soon, so that waiting clients receive their reset. Flows that end before the walk
// share it.
func (g *Collector) Wake() {
	select {
	case g.wakeup <- struct{}{}:
	default:
	}
}

// Run removes ended and expired flows until ctx ends.
func (g *Collector) Run(ctx context.Context) error {
	reset, err := NewResetter()
	if err != nil {
		return err
	}
	defer reset.Close()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-g.wakeup:
			wait(ctx, walkSoon)
		case <-time.After(walkEvery):
		}
		g.Collect(ctx, reset)
	}
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

type walk struct {
	start     time.Duration
	frontends map[uint32]bpf.Method // whose flows end, as in Collector
	backends  map[table.Target]table.EndedFlows
	counts    Counts
	open      map[uint32]uint32 // flows by backend
	udp       map[uint32]uint32 // UDP flows by frontend
	tables    [2]uint32         // flows, indexed by table as in sy_collector
	stored    [2]uint32         // flows stored before the walk, indexed like tables
	clients   sample
	ended     int
	visited   int
	// idle and over remove NAT flows that have expired, and that have ended before.
	idle, over *Remover
}

// ends reports whether a flow ended before its timeout.
func (w *walk) ends(frontend, backend, generation uint32, method bpf.Method) bool {
	if except, ok := w.frontends[frontend]; ok && except != method {
		return true
	}
	e, ok := w.backends[table.Target{Frontend: frontend, Backend: backend}]
	return ok && e.Has(generation)
}

// Collect removes ended and expired flows, counts the others, and releases the ids of removed frontends and of backends
// that no table or flow uses. reset may be nil.
func (g *Collector) Collect(ctx context.Context, reset *Resetter) {
	w := &walk{
		start: bpf.Uptime(), backends: g.services.EndedFlows(), open: map[uint32]uint32{}, udp: map[uint32]uint32{},
	}
	var errStored error
	w.stored, errStored = g.stored()
	g.attend()
	g.mu.Lock()
	w.frontends, g.frontends = g.frontends, map[uint32]bpf.Method{}
	g.mu.Unlock()
	w.idle, w.over = NewRemover(g.objects.SyGc, false, w.start), NewRemover(g.objects.SyGc, true, w.start)
	packets, err := table.ReadVerdicts(g.objects.SyVerdicts)
	if err != nil {
		g.log.Error("packet counters not read", "err", err)
	}
	if err != nil || !slices.Equal(packets, g.empty) { // without packets, empty tables remain empty
		g.empty = nil
		err = errors.Join(g.collectNAT(ctx, w, reset), g.collectDSR(ctx, w), g.expireRelays(ctx, w))
	}
	errSockets := g.collectSockets(ctx, w)
	if errSockets != nil {
		g.log.Error("connections of this machine not ended", "err", errSockets)
	}
	err = errors.Join(errStored, err, w.idle.Flush(), w.over.Flush())
	if err == nil {
		err = ctx.Err()
	}
	// If fewer were removed, some keys belong to other flows now, and the next walk decides.
	if err != nil || errSockets != nil || w.over.Removed < w.over.added {
		g.again(w.frontends)
	} else {
		g.release(w)
	}
	if err != nil {
		if ctx.Err() == nil {
			g.log.Error("flow tables not read", "err", err)
		}
		return
	}
	if w.ended += w.over.Removed; w.ended > 0 {
		g.log.Info("flows ended", "flows", w.ended, "reason", "backend down, or frontend removed or changed")
	}
	g.publish(w)
	if w.visited == 0 {
		g.empty = packets
	}
}

// collectNAT removes ended and expired NAT flows, and counts the others.
func (g *Collector) collectNAT(ctx context.Context, w *walk, reset *Resetter) error {
	remove := func(r *Remover, t bpf.FlowTable, k bpf.ServerKey, f bpf.ServerFlow) {
		if err := r.Add(t, k, f); err != nil {
			g.log.Error("flow not removed", "err", err)
		}
	}
	vip := g.services.FrontendVIPs()
	return g.walkNAT(ctx, chunkPause, func(t bpf.FlowTable, k bpf.ServerKey, f bpf.ServerFlow) {
		g.visit(w, f.Backend)
		switch {
		case w.ends(f.Client.Frontend, f.Backend, f.F.Generation, bpf.MethodNAT):
			if reset != nil {
				g.reset(reset, t, k, f, vip)
			}
			remove(w.over, t, k, f)
		case g.serverExpired(t, k, f, w.start):
			remove(w.idle, t, k, f)
		default:
			if k.Proto() == unix.IPPROTO_UDP {
				w.udp[f.Client.Frontend]++
			}
			if t.ID != bpf.GCHalfOpen {
				w.tables[bpf.Truth(k.Proto() != unix.IPPROTO_UDP)]++
			}
			w.clients.see(t.ID, k, f, vip)
			w.count(bpf.FlowState(f.F.State), f.Backend, bpf.FlowClosed)
		}
	})
}

// visit tells the programs from time to time that the walk is under way. It also marks the backend's id as used.
func (g *Collector) visit(w *walk, backend uint32) {
	w.open[backend] += 0
	if w.visited++; w.visited%chunk == 0 {
		g.attend()
	}
}

// again passes the frontends on to the next walk.
func (g *Collector) again(frontends map[uint32]bpf.Method) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for id, except := range frontends {
		if _, later := g.frontends[id]; !later {
			g.frontends[id] = except
		}
	}
}

// release releases what no flow refers to after a walk.
func (g *Collector) release(w *walk) {
	var removed []uint32
	for id, except := range w.frontends {
		if except == 0 {
			removed = append(removed, id)
		}
	}
	g.services.ForgetEnded(w.backends, w.start)
	g.services.Release(removed, func(id uint32) bool { _, used := w.open[id]; return !used })
}

// publish writes the flow counts of a complete walk.
func (g *Collector) publish(w *walk) {
	g.services.Settle(g.Limits.HalfOpen, g.Limits.UDP)
	err := errors.Join(g.services.SetLoads(w.open), g.services.SetShares(g.objects.SyUdpShare, w.udp),
		g.counted(w.tables, w.stored))
	if err != nil {
		g.log.Error("flow counts not written", "err", err)
	}
	g.mu.Lock()
	g.flows, g.tables, g.clients = w.counts, w.tables, w.clients.after(g.clients, time.Now())
	g.mu.Unlock()
}

// reset sends a RST to the client of an ended TCP flow, unless the flow was closed.
func (g *Collector) reset(
	reset *Resetter, t bpf.FlowTable, k bpf.ServerKey, f bpf.ServerFlow, vip func(frontend uint32) netip.Addr,
) {
	var client bpf.ClientFlow
	if t.ID == bpf.GCHalfOpen || k.Proto() != unix.IPPROTO_TCP || f.F.State >= uint8(bpf.FlowClosed) ||
		t.Clients.Lookup(&f.Client, &client) != nil || !client.SameFlow(k, f) {
		return
	}
	from := netip.AddrPortFrom(vip(f.Client.Frontend), bpf.Swap(f.Client.Dport))
	to := netip.AddrPortFrom(bpf.FromAddr(f.Client.Client), bpf.Swap(f.Client.Sport))
	if err := reset.Reset(from, to, client.F.Ack); err != nil {
		g.log.Debug("flow ended without a reset", "err", err)
	}
}

// count counts a flow. It adds the flow to its backend's open flows if its state precedes over.
func (w *walk) count(state bpf.FlowState, backend uint32, over bpf.FlowState) {
	if state < over {
		w.open[backend]++
	}
	switch state {
	case bpf.FlowHalfOpen:
		w.counts.HalfOpen++
	case bpf.FlowEstablished:
		w.counts.Established++
	default:
		w.counts.Closing++
	}
}

// Counts returns the counts of the last complete walk.
func (g *Collector) Counts() Counts {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.flows
}

// Streams returns the number of confirmed TCP and SCTP flows that the last complete walk found.
func (g *Collector) Streams() uint32 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.tables[1]
}

// expired reports whether one side of a flow has been idle for longer than its timeout (flow_side_expired of
// bpf/flow.h).
func (g *Collector) expired(proto uint8, f bpf.Flow, now time.Duration) bool {
	limit := g.Limits.Established
	switch {
	case f.State == uint8(bpf.FlowClosed):
		limit = g.Limits.Closed
	case f.State == uint8(bpf.FlowClosing) || f.Doubt == uint8(bpf.DoubtReset):
		limit = g.Limits.Closing
	case f.State == uint8(bpf.FlowHalfOpen):
		limit = g.Limits.HalfOpen
	case proto == unix.IPPROTO_UDP:
		limit = g.Limits.UDP
	}
	return bpf.Idle(now, f.Seen) > limit
}

// serverExpired reports whether a flow has expired, judging by its server entry (flow_server_expired of bpf/flow.h).
func (g *Collector) serverExpired(t bpf.FlowTable, k bpf.ServerKey, f bpf.ServerFlow, now time.Duration) bool {
	if first := f.Figures.Fin == uint8(bpf.FinFirst) || f.Figures.Fin == uint8(bpf.FinAcknowledged); first &&
		f.F.State == uint8(bpf.FlowClosed) {
		return bpf.Idle(now, f.F.Seen) > timeWait
	}
	return g.expired(k.Proto(), f.F, now) && (t.ID != bpf.GCUDP || g.clientExpired(t, k, f, now))
}

// clientExpired reports whether the client's entry has expired, is missing, or belongs to a newer flow of the client.
func (g *Collector) clientExpired(t bpf.FlowTable, k bpf.ServerKey, f bpf.ServerFlow, now time.Duration) bool {
	var c bpf.ClientFlow
	if t.Clients.Lookup(&f.Client, &c) != nil || !c.SameFlow(k, f) {
		return true
	}
	return g.expired(k.Proto(), c.F, now)
}

// walkNAT calls visit with the server's entry of every NAT flow, and pauses between chunks. Entries that change during
// the walk may be missed or visited twice.
func (g *Collector) walkNAT(
	ctx context.Context, pause time.Duration, visit func(bpf.FlowTable, bpf.ServerKey, bpf.ServerFlow),
) error {
	for _, t := range g.objects.FlowTables() {
		err := WalkMap(ctx, t.Servers, pause, func(k bpf.ServerKey, f bpf.ServerFlow) { visit(t, k, f) })
		if err != nil {
			return err
		}
	}
	return nil
}

// WalkMap visits the entries of a map. It starts with small reads and grows them up to a chunk as it finds entries,
// because most tables are almost empty on most nodes and are read every few seconds.
func WalkMap[K, V any](ctx context.Context, m *ebpf.Map, pause time.Duration, visit func(K, V)) error {
	var keys []K
	var values []V
	grow := func(size int) { keys, values = make([]K, size), make([]V, size) }
	grow(min(firstChunk, int(m.MaxEntries())))
	var cursor ebpf.MapBatchCursor
	for ctx.Err() == nil {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if errors.Is(err, unix.ENOSPC) { // a bucket is larger than the chunk
			grow(2 * len(keys))
			continue
		}
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read flows: %w", err)
		}
		for i := range n {
			visit(keys[i], values[i])
		}
		if err != nil {
			return nil // that was the last chunk
		}
		if len(keys) < chunk {
			grow(min(4*len(keys), chunk, int(m.MaxEntries())))
		}
		if pause > 0 {
			wait(ctx, pause)
		}
	}
	return nil
}
