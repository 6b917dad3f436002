package datapath

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// flowGC is the garbage collection of flows: it removes flows that are idle for longer than their timeout, and flows
// whose backend is down or whose frontend was removed. It reads the tables in chunks at a bounded rate, so a million
// flows cost no more per second than a thousand.
type flowGC struct {
	objects  *syObjects
	services *services
	limits   Timeouts
	log      *slog.Logger
	wakeup   chan struct{} // capacity 1: flows are to be ended

	mu        sync.Mutex // guards all below
	backends  map[target]bool
	frontends map[uint32]bool // true: the id is released afterwards
	flows     FlowCounts
}

// target is a backend as seen by one frontend.
type target struct{ frontend, backend uint32 }

// FlowCounts are the flows of the last complete walk, by state.
type FlowCounts struct{ HalfOpen, Established, Closing int }

// timeWait is timeout_time_wait of bpf/config.h.
const timeWait = 65 * time.Second

const (
	chunk      = 4096
	walkEvery  = 5 * time.Second
	chunkPause = 10 * time.Millisecond // at most 400,000 entries a second
)

func newFlowGC(o *syObjects, s *services, limits Timeouts, log *slog.Logger) *flowGC {
	return &flowGC{
		objects: o, services: s, limits: limits, log: log, wakeup: make(chan struct{}, 1),
		backends: map[target]bool{}, frontends: map[uint32]bool{},
	}
}

// endBackends makes Run end the flows of a frontend to these backends.
func (g *flowGC) endBackends(frontend uint32, backends []uint32) {
	if len(backends) == 0 {
		return
	}
	g.mu.Lock()
	for _, b := range backends {
		g.backends[target{frontend, b}] = true
	}
	g.mu.Unlock()
	g.wake()
}

// endFrontend makes Run end all flows of a frontend and release its id.
func (g *flowGC) endFrontend(id uint32) { g.end(id, true) }

// endFlows makes Run end all flows of a frontend that stays.
func (g *flowGC) endFlows(frontend uint32) { g.end(frontend, false) }

func (g *flowGC) end(frontend uint32, free bool) {
	g.mu.Lock()
	g.frontends[frontend] = g.frontends[frontend] || free
	g.mu.Unlock()
	g.wake()
}

func (g *flowGC) wake() {
	select {
	case g.wakeup <- struct{}{}:
	default:
	}
}

func (g *flowGC) run(ctx context.Context) error {
	reset, err := newResetter()
	if err != nil {
		return err
	}
	defer reset.close()
	tick := time.NewTicker(walkEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-g.wakeup:
			g.endRequested(ctx, reset)
		case <-tick.C:
			g.expire(ctx)
		}
	}
}

// endRequested ends the flows of backends that are down and of removed frontends, without pauses.
func (g *flowGC) endRequested(ctx context.Context, reset *resetter) {
	g.mu.Lock()
	backends, frontends := g.backends, g.frontends
	g.backends, g.frontends = map[target]bool{}, map[uint32]bool{}
	g.mu.Unlock()
	ended := 0
	ends := func(frontend, backend uint32) bool {
		_, removed := frontends[frontend]
		return removed || backends[target{frontend, backend}]
	}
	vip := g.services.frontendVIPs()
	remove := newFlowRemover(g.objects.SyGc, true, uptime())
	err := g.walk(ctx, 0, func(t flowTable, k syServerKey, f syServerFlow) {
		if !ends(f.Client.Frontend, f.Backend) {
			return
		}
		ended++
		var client syClientFlow
		known := t.clients.Lookup(&f.Client, &client) == nil && client.sameFlow(k)
		if err := remove.add(t, k, f); err != nil {
			g.log.Error("flow not ended", "err", err)
			return
		}
		if k.proto() == unix.IPPROTO_TCP && known && f.F.State < uint8(syFlowStateFLOW_CLOSED) {
			if err := reset.client(f.Client, vip(f.Client.Frontend), client.F.Ack); err != nil {
				g.log.Debug("flow ended without a reset", "err", err)
			}
		}
	})
	n, errDSR := g.endDSR(ctx, ends)
	ended += n
	if err := errors.Join(err, remove.flush(), errDSR); err != nil {
		g.log.Error("flows not ended", "err", err)
	}
	ids := make([]uint32, 0, len(frontends))
	for id, free := range frontends {
		if free {
			ids = append(ids, id)
		}
	}
	g.services.release(ids, func(uint32) bool { return false })
	if ended > 0 {
		g.log.Info("flows ended", "flows", ended, "reason", "backend down or frontend removed")
	}
}

// expire removes flows after their timeout, counts the others, and releases the ids of backends without a table or
// flow.
func (g *flowGC) expire(ctx context.Context) {
	now := uptime()
	var counts FlowCounts
	open := map[uint32]uint32{} // flows by backend
	udp := map[uint32]uint32{}  // flows of UDP by frontend
	remove := newFlowRemover(g.objects.SyGc, false, now)
	err := g.walk(ctx, chunkPause, func(t flowTable, k syServerKey, f syServerFlow) {
		if g.serverExpired(t, k, f, now) {
			if err := remove.add(t, k, f); err != nil {
				g.log.Error("flow not removed", "err", err)
			}
			return
		}
		if k.proto() == unix.IPPROTO_UDP {
			udp[f.Client.Frontend]++
		}
		counts.add(f.F.State, f.Backend, open)
	})
	if err := errors.Join(err, remove.flush(), g.expireDSR(ctx, now, &counts, open)); err != nil {
		g.log.Error("flow tables not read", "err", err)
		return
	}
	if ctx.Err() != nil {
		return
	}
	g.services.settle(g.limits)
	g.services.release(nil, func(id uint32) bool { _, used := open[id]; return !used })
	g.expireRelays(ctx, now)
	if err := errors.Join(g.services.setLoads(open), g.services.setUDPFlows(udp)); err != nil {
		g.log.Error("numbers of flows not written", "err", err)
	}
	g.mu.Lock()
	g.flows = counts
	g.mu.Unlock()
}

// add counts a flow, and adds it to the open flows of its backend.
func (c *FlowCounts) add(state uint8, backend uint32, open map[uint32]uint32) {
	open[backend] += 0
	if state < uint8(syFlowStateFLOW_CLOSED) {
		open[backend]++
	}
	switch syFlowState(state) {
	case syFlowStateFLOW_HALF_OPEN:
		c.HalfOpen++
	case syFlowStateFLOW_ESTABLISHED:
		c.Established++
	default:
		c.Closing++
	}
}

// counts returns the result of the last complete walk.
func (g *flowGC) counts() FlowCounts {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.flows
}

// expired reports whether one side of a flow is idle for longer than its timeout (flow_side_expired of bpf/flow.h).
func (g *flowGC) expired(proto uint8, f syFlow, now time.Duration) bool {
	limit := g.limits.Established
	switch {
	case f.State == uint8(syFlowStateFLOW_CLOSED):
		limit = g.limits.Closed
	case f.State == uint8(syFlowStateFLOW_CLOSING) || f.Doubt == uint8(syFlowDoubtDOUBT_RESET):
		limit = g.limits.Closing
	case f.State == uint8(syFlowStateFLOW_HALF_OPEN):
		limit = g.limits.HalfOpen
	case proto == unix.IPPROTO_UDP:
		limit = g.limits.UDP
	}
	return idle(now, f.Seen) > limit
}

// serverExpired reports whether a flow has expired, given its server's entry (flow_server_expired of bpf/flow.h).
func (g *flowGC) serverExpired(t flowTable, k syServerKey, f syServerFlow, now time.Duration) bool {
	if f.F.State == uint8(syFlowStateFLOW_CLOSED) && f.F.Fin == uint8(syFinFIN_FIRST) {
		return idle(now, f.F.Seen) > timeWait
	}
	return g.expired(k.proto(), f.F, now) && g.clientExpired(t, k, f, now)
}

// clientExpired reports whether the client's side is expired or missing, or belongs to a newer flow of the client.
func (g *flowGC) clientExpired(t flowTable, k syServerKey, f syServerFlow, now time.Duration) bool {
	var c syClientFlow
	if t.clients.Lookup(&f.Client, &c) != nil || !c.sameFlow(k) {
		return true
	}
	return g.expired(k.proto(), c.F, now)
}

// flowTable is a table of flows by nat: a map for the packets of clients and one for those of servers.
type flowTable struct {
	id               syGcTable
	clients, servers *ebpf.Map
}

func (o *syObjects) flowTables() []flowTable {
	return []flowTable{
		{syGcTableGC_HALF_OPEN, o.SyHalfopenClients, o.SyHalfopenServers},
		{syGcTableGC_UDP, o.SyUdpClients, o.SyUdpServers},
		{syGcTableGC_STREAM, o.SyStreamClients, o.SyStreamServers},
	}
}

// walk calls visit with the server's entry of every flow by nat, and pauses between chunks. Entries that change during
// the walk may be missed or visited twice.
func (g *flowGC) walk(
	ctx context.Context, pause time.Duration, visit func(flowTable, syServerKey, syServerFlow),
) error {
	for _, t := range g.objects.flowTables() {
		err := walkMap(ctx, t.servers, pause, func(k syServerKey, f syServerFlow) { visit(t, k, f) })
		if err != nil {
			return err
		}
	}
	return nil
}

func walkMap[K, V any](ctx context.Context, m *ebpf.Map, pause time.Duration, visit func(K, V)) error {
	size := min(chunk, int(m.MaxEntries()))
	keys, values := make([]K, size), make([]V, size)
	var cursor ebpf.MapBatchCursor
	for ctx.Err() == nil {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if errors.Is(err, unix.ENOSPC) { // a bucket larger than the chunk
			size *= 2
			keys, values = slices.Grow(keys[:0], size)[:size], slices.Grow(values[:0], size)[:size]
			continue
		}
		if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return fmt.Errorf("read flows: %w", err)
		}
		for i := range n {
			visit(keys[i], values[i])
		}
		if err != nil {
			return nil // last chunk
		}
		if pause > 0 {
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
		}
	}
	return nil
}

// uptime is bpf_ktime_get_coarse_ns.
func uptime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &t); err != nil {
		panic("datapath: no monotonic clock: " + err.Error())
	}
	return time.Duration(t.Nano())
}
