package datapath

import (
	"context"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/lb"
)

var flowStates = map[syFlowState]lb.FlowState{
	syFlowStateFLOW_HALF_OPEN: lb.FlowHalfOpen, syFlowStateFLOW_ESTABLISHED: lb.FlowEstablished,
	syFlowStateFLOW_CLOSING: lb.FlowClosing, syFlowStateFLOW_CLOSED: lb.FlowClosed,
}

// Flows lists flows, and reports whether there are more than the filter's limit. It reads the tables in chunks while
// packets are forwarded: flows that change during the call may be missed.
func (d *Datapath) Flows(ctx context.Context, want lb.FlowFilter) (flows []lb.FlowStatus, more bool, err error) {
	_, service, backends := d.services.names()
	now := uptime()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	err = d.gc.walk(ctx, 0, func(_ *ebpf.Map, k syFlowKey, f syFlow) {
		if f.Reply == 1 || more {
			return
		}
		s := toStatus(k, f, now)
		s.Service = service[f.Frontend]
		if isDSR(f) {
			s.Backend = backends[f.Backend]
		}
		if !want.Match(s) {
			return
		}
		if want.Limit > 0 && len(flows) == want.Limit {
			more = true
			stop()
			return
		}
		flows = append(flows, s)
	})
	return flows, more, err
}

// toStatus converts the entry of the client's direction.
func toStatus(k syFlowKey, f syFlow, now time.Duration) lb.FlowStatus {
	s := lb.FlowStatus{
		Client:  netip.AddrPortFrom(fromAddr(k.T.Src), swap(k.T.Sport)),
		Address: fromAddr(k.T.Dst), Port: swap(k.T.Dport), Protocol: lb.Protocol(k.Proto),
		Forward: decodeMethod(syMethod(f.Method)), State: flowStates[syFlowState(f.State)],
		Idle: max(0, now-time.Duration(f.Seen)).Seconds(),
	}
	if !isDSR(f) {
		s.Source = netip.AddrPortFrom(fromAddr(f.T.Src), swap(f.T.Sport))
		s.Backend = netip.AddrPortFrom(fromAddr(f.T.Dst), swap(f.T.Dport))
	}
	return s
}
