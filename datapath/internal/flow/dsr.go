package flow

import (
	"context"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// walkDSR calls visit for every DSR flow.
func (g *Collector) walkDSR(
	ctx context.Context, pause time.Duration, visit func(*ebpf.Map, bpf.FlowKey, bpf.DSRFlow),
) error {
	for _, m := range []*ebpf.Map{g.objects.SyDsrHalfopen, g.objects.SyDsrFlows} {
		err := WalkMap(ctx, m, pause, func(k bpf.FlowKey, f bpf.DSRFlow) { visit(m, k, f) })
		if err != nil {
			return err
		}
	}
	return nil
}

// collectDSR removes ended and idle DSR flows, and counts the others.
func (g *Collector) collectDSR(ctx context.Context, w *walk) error {
	return g.walkDSR(ctx, chunkPause, func(m *ebpf.Map, k bpf.FlowKey, f bpf.DSRFlow) {
		g.visit(w, f.Backend)
		switch {
		case w.ends(f.Frontend, f.Backend, f.Generation, bpf.Method(f.Method)):
			w.ended++
			g.removeDSR(m, k)
		case g.expiredDSR(k, f, w.start):
			g.removeDSR(m, k)
		default:
			w.count(bpf.FlowState(f.State), f.Backend, bpf.FlowClosing)
		}
	})
}

// expiredDSR is dsr_expired of bpf/dsr.h. Its limits are longer, because only a sample of the packets refreshes an
// established entry.
func (g *Collector) expiredDSR(k bpf.FlowKey, f bpf.DSRFlow, now time.Duration) bool {
	limit := 4 * g.Limits.Established
	switch {
	case f.State == uint8(bpf.FlowClosed):
		limit = g.Limits.Closed
	case f.State == uint8(bpf.FlowClosing) && f.Asked == 0:
		limit = min(g.Limits.Closing, timeWait)
	case f.State == uint8(bpf.FlowClosing):
		limit = g.Limits.Closing
	case f.State == uint8(bpf.FlowHalfOpen):
		limit = g.Limits.HalfOpen
	case k.Proto == unix.IPPROTO_UDP:
		limit = 4 * g.Limits.UDP
	}
	return now-time.Duration(f.Seen) > limit
}

// expireRelays removes idle entries of relayed flows. It also removes nodes from entries if they no longer have flows
// of the frontend and may be down. If none remains, the next datagram opens a flow here. The remaining entries are
// counted for the programs.
func (g *Collector) expireRelays(ctx context.Context, w *walk) error {
	nodes, relays := sync.OnceValue(g.services.Nodes), map[uint32]uint32{} // most hosts have no entry
	err := WalkMap(ctx, g.objects.SyRelays, 0, func(k bpf.FlowKey, r bpf.Relay) {
		w.visited++
		f := lb.Frontend{VIP: bpf.FromAddr(k.T.Dst), Port: bpf.Swap(k.T.Dport), Protocol: lb.Protocol(k.Proto)}
		of, known := nodes()[f]
		if bpf.Idle(w.start, r.Seen) > g.Limits.UDP || !known {
			g.removeDSR(g.objects.SyRelays, k)
			return
		}
		if of.Has == nil {
			relays[of.ID]++
			return
		}
		left := bpf.Relay{Seen: r.Seen}
		for _, node := range r.Next[:min(int(r.N), len(r.Next))] {
			if of.Has[node] {
				left.Next[left.N] = node
				left.N++
			}
		}
		if left.N == 0 {
			g.removeDSR(g.objects.SyRelays, k)
			return
		}
		relays[of.ID]++
		if left.N != r.N {
			if err := g.objects.SyRelays.Update(k, left, ebpf.UpdateExist); table.IgnoreMissing(err) != nil {
				g.log.Debug("relayed flow not changed", "err", err)
			}
		}
	})
	if err == nil {
		err = g.services.SetShares(g.objects.SyRelayShare, relays)
	}
	return err
}

func (g *Collector) removeDSR(m *ebpf.Map, k bpf.FlowKey) {
	if err := table.IgnoreMissing(m.Delete(&k)); err != nil {
		g.log.Debug("flow not removed", "err", err)
	}
}
