package datapath

import (
	"context"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// walkDSR calls visit for every flow by direct return.
func (g *flowGC) walkDSR(ctx context.Context, pause time.Duration, visit func(*ebpf.Map, syFlowKey, syDsrFlow)) error {
	for _, m := range []*ebpf.Map{g.objects.SyDsrHalfopen, g.objects.SyDsrFlows} {
		err := walkMap(ctx, m, pause, func(k syFlowKey, f syDsrFlow) { visit(m, k, f) })
		if err != nil {
			return err
		}
	}
	return nil
}

// endDSR removes the flows by direct return of these frontends and backends, and returns their number.
func (g *flowGC) endDSR(ctx context.Context, ends func(frontend, backend uint32) bool) (n int, err error) {
	err = g.walkDSR(ctx, 0, func(m *ebpf.Map, k syFlowKey, f syDsrFlow) {
		if ends(f.Frontend, f.Backend) {
			n++
			g.removeDSR(m, k)
		}
	})
	return n, err
}

// expireDSR removes flows by direct return after their timeout, and counts the others.
func (g *flowGC) expireDSR(ctx context.Context, now time.Duration, counts *FlowCounts, open map[uint32]uint32) error {
	return g.walkDSR(ctx, chunkPause, func(m *ebpf.Map, k syFlowKey, f syDsrFlow) {
		if g.expiredDSR(k, f, now) {
			g.removeDSR(m, k)
			return
		}
		counts.add(f.State, f.Backend, open)
	})
}

// expiredDSR is dsr_expired of bpf/dsr.h: an established entry is refreshed by a sample of the packets only.
func (g *flowGC) expiredDSR(k syFlowKey, f syDsrFlow, now time.Duration) bool {
	limit := 4 * g.limits.Established
	switch {
	case f.State == uint8(syFlowStateFLOW_CLOSED):
		limit = g.limits.Closed
	case f.State == uint8(syFlowStateFLOW_HALF_OPEN):
		limit = g.limits.HalfOpen
	case k.Proto == unix.IPPROTO_UDP:
		limit = 4 * g.limits.UDP
	}
	return now-time.Duration(f.Seen) > limit
}

func (g *flowGC) removeDSR(m *ebpf.Map, k syFlowKey) {
	if err := ignoreMissing(m.Delete(&k)); err != nil {
		g.log.Debug("flow not removed", "err", err)
	}
}
