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

// Flows lists flows, and reports whether there may be more: the filter's limit was reached, or all ended. It reads the
// tables in chunks while packets are forwarded: flows that change during the call may be missed.
func (d *Datapath) Flows(all context.Context, want lb.FlowFilter) (flows []lb.FlowStatus, more bool, err error) {
	_, service, backends := d.services.names()
	now := uptime()
	ctx, stop := context.WithCancel(all)
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
	vip, ended := d.services.frontendVIPs(), &flowWalk{backends: d.services.endedFlows()}
	err = d.gc.walk(ctx, 0, func(t flowTable, k syServerKey, f syServerFlow) {
		if more || ended.ends(f.Client.Frontend, f.Backend, f.F.Generation, syMethodMETHOD_NAT) {
			return
		}
		s := flowStatus(syFlowKey{Proto: k.proto(), T: syTuple{Src: f.Client.Client, Sport: f.Client.Sport,
			Dport: f.Client.Dport}}, f.F.State, idle(now, f.F.Seen))
		s.Address, s.Forward = vip(f.Client.Frontend), lb.MethodNAT
		s.Source = netip.AddrPortFrom(fromAddr(k.To), swap(k.Dport))
		s.Backend = netip.AddrPortFrom(backends[f.Backend].Addr(), swap(k.Sport))
		var c syClientFlow
		if t.clients.Lookup(&f.Client, &c) == nil && c.sameFlow(k, f) { // the side that was seen last
			s.Idle = min(s.Idle, max(0, idle(now, c.F.Seen).Seconds()))
		}
		add(s, f.Client.Frontend)
	})
	errDSR := d.gc.walkDSR(ctx, 0, func(_ *ebpf.Map, k syFlowKey, f syDsrFlow) {
		if ended.ends(f.Frontend, f.Backend, f.Generation, syMethod(f.Method)) {
			return
		}
		s := flowStatus(k, f.State, now-time.Duration(f.Seen))
		s.Forward, s.Backend = decodeMethod(syMethod(f.Method)), backends[f.Backend]
		add(s, f.Frontend)
	})
	return flows, more || all.Err() != nil, errors.Join(err, errDSR)
}

// flowStatus converts what the entries of all methods have.
func flowStatus(k syFlowKey, state uint8, idle time.Duration) lb.FlowStatus {
	return lb.FlowStatus{
		Client:  netip.AddrPortFrom(fromAddr(k.T.Src), swap(k.T.Sport)),
		Address: fromAddr(k.T.Dst), Port: swap(k.T.Dport), Protocol: lb.Protocol(k.Proto),
		State: flowStates[syFlowState(state)],
		Idle:  max(0, idle).Seconds(),
	}
}
