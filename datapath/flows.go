package datapath

import (
	"context"
	"errors"
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
	add := func(s lb.FlowStatus, frontend uint32) {
		s.Service = service[frontend]
		switch {
		case more || !want.Match(s):
		case want.Limit > 0 && len(flows) == want.Limit:
			more = true
			stop()
		default:
			flows = append(flows, s)
		}
	}
	err = d.gc.walk(ctx, 0, func(_ *ebpf.Map, k syFlowKey, f syFlow) {
		if f.Reply == 0 {
			add(natStatus(k, f, now), f.Frontend)
		}
	})
	errDSR := d.gc.walkDSR(ctx, 0, func(_ *ebpf.Map, k syFlowKey, f syDsrFlow) {
		s := flowStatus(k, f.State, f.Seen, now)
		s.Forward, s.Backend = decodeMethod(syMethod(f.Method)), backends[f.Backend]
		add(s, f.Frontend)
	})
	return flows, more, errors.Join(err, errDSR)
}

// natStatus converts the entry of the client's direction of a flow by nat.
func natStatus(k syFlowKey, f syFlow, now time.Duration) lb.FlowStatus {
	s := flowStatus(k, f.State, f.Seen, now)
	s.Forward = lb.MethodNAT
	s.Source = netip.AddrPortFrom(fromAddr(f.T.Src), swap(f.T.Sport))
	s.Backend = netip.AddrPortFrom(fromAddr(f.T.Dst), swap(f.T.Dport))
	return s
}

// flowStatus converts what the entries of all methods have.
func flowStatus(k syFlowKey, state uint8, seen uint64, now time.Duration) lb.FlowStatus {
	return lb.FlowStatus{
		Client:  netip.AddrPortFrom(fromAddr(k.T.Src), swap(k.T.Sport)),
		Address: fromAddr(k.T.Dst), Port: swap(k.T.Dport), Protocol: lb.Protocol(k.Proto),
		State: flowStates[syFlowState(state)],
		Idle:  max(0, now-time.Duration(seen)).Seconds(),
	}
}
