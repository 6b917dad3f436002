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

// upkeep ends flows: those that have been silent for too long, and those whose backend is dead or whose frontend is
// gone. It walks the tables in chunks with a bounded rate, so a million flows cost no more per second than a thousand.
type upkeep struct {
	objects  *syObjects
	services *services
	limits   Timeouts
	log      *slog.Logger
	wake     chan struct{} // capacity 1: there is something to end

	mu        sync.Mutex // guards all below
	backends  map[target]bool
	frontends map[uint32]bool // true: the id is free afterwards
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

func newUpkeep(o *syObjects, s *services, limits Timeouts, log *slog.Logger) *upkeep {
	return &upkeep{
		objects: o, services: s, limits: limits, log: log, wake: make(chan struct{}, 1),
		backends: map[target]bool{}, frontends: map[uint32]bool{},
	}
}

// endBackends makes Run end the flows of a frontend to these backends.
func (u *upkeep) endBackends(frontend uint32, backends []uint32) {
	if len(backends) == 0 {
		return
	}
	u.mu.Lock()
	for _, b := range backends {
		u.backends[target{frontend, b}] = true
	}
	u.mu.Unlock()
	u.poke()
}

// endFrontend makes Run end all flows of a frontend and give its id back.
func (u *upkeep) endFrontend(id uint32) { u.end(id, true) }

// endFlows makes Run end all flows of a frontend that stays.
func (u *upkeep) endFlows(frontend uint32) { u.end(frontend, false) }

func (u *upkeep) end(frontend uint32, free bool) {
	u.mu.Lock()
	u.frontends[frontend] = u.frontends[frontend] || free
	u.mu.Unlock()
	u.poke()
}

func (u *upkeep) poke() {
	select {
	case u.wake <- struct{}{}:
	default:
	}
}

func (u *upkeep) run(ctx context.Context) error {
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
		case <-u.wake:
			u.endWanted(ctx, reset)
		case <-tick.C:
			u.expire(ctx)
		}
	}
}

// endWanted ends the flows of dead backends and gone frontends, as fast as it can.
func (u *upkeep) endWanted(ctx context.Context, reset *resetter) {
	u.mu.Lock()
	backends, frontends := u.backends, u.frontends
	u.backends, u.frontends = map[target]bool{}, map[uint32]bool{}
	u.mu.Unlock()
	ended := 0
	err := u.walk(ctx, 0, func(m *ebpf.Map, k syFlowKey, f syFlow) {
		_, gone := frontends[f.Frontend]
		if f.Reply == 1 || !(gone || backends[target{f.Frontend, f.Backend}]) {
			return
		}
		ended++
		u.remove(m, k, f)
		if k.Proto == unix.IPPROTO_TCP && m == u.objects.SyFlows && f.State < uint8(syFlowStateFLOW_CLOSED) {
			if err := reset.client(k, f); err != nil {
				u.log.Debug("flow ended without a reset", "err", err)
			}
		}
	})
	if err != nil {
		u.log.Error("flows of a dead backend not ended", "err", err)
	}
	ids := make([]uint32, 0, len(frontends))
	for id, free := range frontends {
		if free {
			ids = append(ids, id)
		}
	}
	u.services.release(ids, func(uint32) bool { return false })
	if ended > 0 {
		u.log.Info("flows ended", "flows", ended, "reason", "backend dead or frontend gone")
	}
}

// expire removes flows that are over, counts the others, and gives back the ids of backends that nobody uses.
func (u *upkeep) expire(ctx context.Context) {
	now := uptime()
	var counts FlowCounts
	open := map[uint32]uint32{} // flows by backend
	err := u.walk(ctx, chunkPause, func(m *ebpf.Map, k syFlowKey, f syFlow) {
		if u.over(k, f, now) && u.twinOver(k, f, now) {
			u.remove(m, k, f)
			return
		}
		open[f.Backend] += 0 // its id is in use
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
		u.log.Error("flow tables not read", "err", err)
		return
	}
	if ctx.Err() != nil {
		return
	}
	u.services.release(nil, func(id uint32) bool { _, used := open[id]; return !used })
	if err := u.services.setLoads(open); err != nil {
		u.log.Error("loads of backends not corrected", "err", err)
	}
	u.mu.Lock()
	u.flows = counts
	u.mu.Unlock()
}

// counts returns what the last walk found.
func (u *upkeep) counts() FlowCounts {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.flows
}

// over reports whether one direction has been silent for too long (bpf/flow.h has the same rule).
func (u *upkeep) over(k syFlowKey, f syFlow, now time.Duration) bool {
	limit := u.limits.Established
	switch {
	case f.State == uint8(syFlowStateFLOW_CLOSED):
		limit = u.limits.Closed
	case f.State == uint8(syFlowStateFLOW_CLOSING):
		limit = u.limits.Closing
	case f.State == uint8(syFlowStateFLOW_HALF_OPEN):
		limit = u.limits.HalfOpen
	case k.Proto == unix.IPPROTO_UDP:
		limit = u.limits.UDP
	}
	if f.State == uint8(syFlowStateFLOW_ESTABLISHED) && oneWay(f) {
		limit *= 4
	}
	return now-time.Duration(f.Seen) > limit
}

// oneWay reports whether a flow has only one entry.
func oneWay(f syFlow) bool { return f.Method != uint8(syMethodMETHOD_NAT) }

// twinOver reports whether the other direction is over too, gone, or belongs to a newer flow of the same client.
func (u *upkeep) twinOver(k syFlowKey, f syFlow, now time.Duration) bool {
	if oneWay(f) {
		return true
	}
	other := twinKey(k, f)
	for _, m := range []*ebpf.Map{u.objects.SyFlows, u.objects.SyHalfopen} {
		var t syFlow
		if m.Lookup(&other, &t) == nil && twinKey(other, t) == k {
			return u.over(other, t, now)
		}
	}
	return true
}

// remove removes both directions of a flow. A direction that now belongs to another flow stays.
func (u *upkeep) remove(m *ebpf.Map, k syFlowKey, f syFlow) {
	other := twinKey(k, f)
	var t syFlow
	if !oneWay(f) && m.Lookup(&other, &t) == nil && twinKey(other, t) == k {
		if err := ignoreMissing(m.Delete(&other)); err != nil {
			u.log.Debug("flow not removed", "err", err)
		}
	}
	if err := ignoreMissing(m.Delete(&k)); err != nil {
		u.log.Debug("flow not removed", "err", err)
	}
}

// walk calls visit for every entry of all tables, pausing between chunks. What changes meanwhile may be missed or seen
// twice; the next walk sees it.
func (u *upkeep) walk(ctx context.Context, pause time.Duration, visit func(*ebpf.Map, syFlowKey, syFlow)) error {
	for _, m := range []*ebpf.Map{u.objects.SyHalfopen, u.objects.SyFlows, u.objects.SyDsrFlows} {
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
			return nil // that was the last chunk
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

// uptime is the clock of the programs.
func uptime() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC_COARSE, &t); err != nil {
		panic("datapath: no monotonic clock: " + err.Error())
	}
	return time.Duration(t.Nano())
}
