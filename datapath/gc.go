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
	err := g.walk(ctx, 0, func(m *ebpf.Map, k syFlowKey, f syFlow) {
		_, removed := frontends[f.Frontend]
		if f.Reply == 1 || !(removed || backends[target{f.Frontend, f.Backend}]) {
			return
		}
		ended++
		g.remove(m, k, f)
		if k.Proto == unix.IPPROTO_TCP && m == g.objects.SyFlows && f.State < uint8(syFlowStateFLOW_CLOSED) {
			if err := reset.client(k, f); err != nil {
				g.log.Debug("flow ended without a reset", "err", err)
			}
		}
	})
	if err != nil {
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
	err := g.walk(ctx, chunkPause, func(m *ebpf.Map, k syFlowKey, f syFlow) {
		if g.expired(k, f, now) && g.reverseExpired(k, f, now) {
			g.remove(m, k, f)
			return
		}
		open[f.Backend] += 0 // the id is in use
		if f.Reply == 1 {
			return
		}
		if f.State < uint8(syFlowStateFLOW_CLOSED) {
			open[f.Backend]++
		}
		switch syFlowState(f.State) {
		case syFlowStateFLOW_HALF_OPEN:
			counts.HalfOpen++
		case syFlowStateFLOW_ESTABLISHED:
			counts.Established++
		default:
			counts.Closing++
		}
	})
	if err != nil {
		g.log.Error("flow tables not read", "err", err)
		return
	}
	if ctx.Err() != nil {
		return
	}
	g.services.release(nil, func(id uint32) bool { _, used := open[id]; return !used })
	if err := g.services.setLoads(open); err != nil {
		g.log.Error("loads of backends not written", "err", err)
	}
	g.mu.Lock()
	g.flows = counts
	g.mu.Unlock()
}

// counts returns the result of the last complete walk.
func (g *flowGC) counts() FlowCounts {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.flows
}

// expired reports whether one direction is idle for longer than its timeout (bpf/flow.h has the same rule).
func (g *flowGC) expired(k syFlowKey, f syFlow, now time.Duration) bool {
	limit := g.limits.Established
	switch {
	case f.State == uint8(syFlowStateFLOW_CLOSED):
		limit = g.limits.Closed
	case f.State == uint8(syFlowStateFLOW_CLOSING):
		limit = g.limits.Closing
	case f.State == uint8(syFlowStateFLOW_HALF_OPEN):
		limit = g.limits.HalfOpen
	case k.Proto == unix.IPPROTO_UDP:
		limit = g.limits.UDP
	}
	if f.State == uint8(syFlowStateFLOW_ESTABLISHED) && isDSR(f) {
		limit *= 4
	}
	return now-time.Duration(f.Seen) > limit
}

// isDSR reports whether a flow is by direct return: it has only one entry.
func isDSR(f syFlow) bool { return f.Method != uint8(syMethodMETHOD_NAT) }

// reverseExpired reports whether the reverse direction is expired or missing, or belongs to a newer flow of the client.
func (g *flowGC) reverseExpired(k syFlowKey, f syFlow, now time.Duration) bool {
	if isDSR(f) {
		return true
	}
	other := reverseKey(k, f)
	for _, m := range []*ebpf.Map{g.objects.SyFlows, g.objects.SyHalfopen} {
		var t syFlow
		if m.Lookup(&other, &t) == nil && reverseKey(other, t) == k {
			return g.expired(other, t, now)
		}
	}
	return true
}

// remove removes both directions of a flow. A reverse entry that belongs to another flow stays.
func (g *flowGC) remove(m *ebpf.Map, k syFlowKey, f syFlow) {
	other := reverseKey(k, f)
	var t syFlow
	if !isDSR(f) && m.Lookup(&other, &t) == nil && reverseKey(other, t) == k {
		if err := ignoreMissing(m.Delete(&other)); err != nil {
			g.log.Debug("flow not removed", "err", err)
		}
	}
	if err := ignoreMissing(m.Delete(&k)); err != nil {
		g.log.Debug("flow not removed", "err", err)
	}
}

// walk calls visit for every entry of all tables, and pauses between chunks. Entries that change during the walk may be
// missed or visited twice.
func (g *flowGC) walk(ctx context.Context, pause time.Duration, visit func(*ebpf.Map, syFlowKey, syFlow)) error {
	for _, m := range []*ebpf.Map{g.objects.SyHalfopen, g.objects.SyFlows, g.objects.SyDsrFlows} {
		if err := walkMap(ctx, m, pause, visit); err != nil {
			return err
		}
	}
	return nil
}

func walkMap(ctx context.Context, m *ebpf.Map, pause time.Duration, visit func(*ebpf.Map, syFlowKey, syFlow)) error {
	size := min(chunk, int(m.MaxEntries()))
	keys, values := make([]syFlowKey, size), make([]syFlow, size)
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
			visit(m, keys[i], values[i])
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
