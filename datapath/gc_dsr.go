package datapath

import (
	"context"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
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

// collectDSR removes flows by direct return that have ended or are idle, and counts the others.
func (g *flowGC) collectDSR(ctx context.Context, w *flowWalk) error {
	return g.walkDSR(ctx, chunkPause, func(m *ebpf.Map, k syFlowKey, f syDsrFlow) {
		g.visit(w, f.Backend)
		switch {
		case w.ends(f.Frontend, f.Backend, f.Generation, syMethod(f.Method)):
			w.ended++
			g.removeDSR(m, k)
		case g.expiredDSR(k, f, w.start):
			g.removeDSR(m, k)
		default:
			w.count(syFlowState(f.State), f.Backend, syFlowStateFLOW_CLOSING)
		}
	})
}

// expiredDSR is dsr_expired of bpf/dsr.h: an established entry is refreshed by a sample of the packets only.
func (g *flowGC) expiredDSR(k syFlowKey, f syDsrFlow, now time.Duration) bool {
	limit := 4 * g.limits.Established
	switch {
	case f.State == uint8(syFlowStateFLOW_CLOSED):
		limit = g.limits.Closed
	case f.State == uint8(syFlowStateFLOW_CLOSING) && f.Asked == 0:
		limit = min(g.limits.Closing, timeWait)
	case f.State == uint8(syFlowStateFLOW_CLOSING):
		limit = g.limits.Closing
	case f.State == uint8(syFlowStateFLOW_HALF_OPEN):
		limit = g.limits.HalfOpen
	case k.Proto == unix.IPPROTO_UDP:
		limit = 4 * g.limits.UDP
	}
	return now-time.Duration(f.Seen) > limit
}

// expireRelays removes the entries of relayed flows that are idle, and the nodes that have none of the frontend's flows
// any longer, which may be down. Without a node the next datagram opens a flow here. It writes how many entries are
// left.
func (g *flowGC) expireRelays(ctx context.Context, now time.Duration) {
	nodes, relays := sync.OnceValue(g.services.nodes), map[lb.Frontend]uint32{} // most hosts have no entry
	err := walkMap(ctx, g.objects.SyRelays, 0, func(k syFlowKey, r syRelay) {
		f := lb.Frontend{VIP: fromAddr(k.T.Dst), Port: swap(k.T.Dport), Protocol: lb.Protocol(k.Proto)}
		has, known := nodes()[f]
		if idle(now, r.Seen) > g.limits.UDP || !known {
			g.removeDSR(g.objects.SyRelays, k)
			return
		}
		if has == nil {
			relays[f]++
			return
		}
		left := syRelay{Seen: r.Seen}
		for _, node := range r.Next[:min(int(r.N), len(r.Next))] {
			if has[node] {
				left.Next[left.N] = node
				left.N++
			}
		}
		if left.N == 0 {
			g.removeDSR(g.objects.SyRelays, k)
			return
		}
		relays[f]++
		if left.N != r.N {
			if err := g.objects.SyRelays.Update(k, left, ebpf.UpdateExist); ignoreMissing(err) != nil {
				g.log.Debug("relayed flow not changed", "err", err)
			}
		}
	})
	if err == nil {
		err = g.services.setRelays(relays)
	}
	if err != nil {
		g.log.Error("relayed flows not counted", "err", err)
	}
}

func (g *flowGC) removeDSR(m *ebpf.Map, k syFlowKey) {
	if err := ignoreMissing(m.Delete(&k)); err != nil {
		g.log.Debug("flow not removed", "err", err)
	}
}
