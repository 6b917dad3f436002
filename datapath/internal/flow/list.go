package flow

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

var states = map[bpf.FlowState]lb.FlowState{
	bpf.FlowHalfOpen: lb.FlowHalfOpen, bpf.FlowEstablished: lb.FlowEstablished,
	bpf.FlowClosing: lb.FlowClosing, bpf.FlowClosed: lb.FlowClosed,
}

// List lists flows. more is true if the filter's limit was reached or the context all ended first. It reads the tables
// in chunks while packets are forwarded, so it may miss flows that change during the call.
func (g *Collector) List(
	all context.Context, want lb.FlowFilter,
) (flows []lb.FlowStatus, more bool, err error) {
	_, service, backends := g.services.Names()
	now := bpf.Uptime()
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
	vip, ended := g.services.FrontendVIPs(), &walk{backends: g.services.EndedFlows()}
	err = g.walkNAT(ctx, 0, func(t bpf.FlowTable, k bpf.ServerKey, f bpf.ServerFlow) {
		if more || ended.ends(f.Client.Frontend, f.Backend, f.F.Generation, bpf.MethodNAT) {
			return
		}
		s := natStatus(now, k, f)
		s.Address, s.Backend = vip(f.Client.Frontend), serverOf(k, backends[f.Backend])
		var c bpf.ClientFlow
		switch {
		case t.ID == bpf.GCHalfOpen:
			halfOpen(&s, f)
		case t.Clients.Lookup(&f.Client, &c) == nil && c.SameFlow(k, f): // the side seen last counts
			s.Idle = min(s.Idle, max(0, bpf.Idle(now, c.F.Seen).Seconds()))
			s.FromClient = figures(s.Protocol, c.F, c.Figures)
		}
		add(s, f.Client.Frontend)
	})
	errDSR := g.walkDSR(ctx, 0, func(_ *ebpf.Map, k bpf.FlowKey, f bpf.DSRFlow) {
		if ended.ends(f.Frontend, f.Backend, f.Generation, bpf.Method(f.Method)) {
			return
		}
		s := status(k, f.State, now-time.Duration(f.Seen))
		s.Forward, s.Backend = table.DecodeMethod(bpf.Method(f.Method)), backends[f.Backend]
		add(s, f.Frontend)
	})
	return flows, more || all.Err() != nil, errors.Join(err, errDSR)
}

// natStatus converts the fields of a NAT flow that are in its server's entry.
func natStatus(now time.Duration, k bpf.ServerKey, f bpf.ServerFlow) lb.FlowStatus {
	s := status(bpf.FlowKey{Proto: k.Proto(), T: bpf.Tuple{Src: f.Client.Client, Sport: f.Client.Sport,
		Dport: f.Client.Dport}}, f.F.State, bpf.Idle(now, f.F.Seen))
	s.Forward, s.Source = lb.MethodNAT, netip.AddrPortFrom(bpf.FromAddr(k.To), bpf.Swap(k.Dport))
	s.Age = max(0, bpf.Age(now, f.Figures.Opened).Seconds())
	s.Handshake = (time.Duration(f.Figures.Handshake) * bpf.HandshakeUnit).Seconds()
	s.FromServer = figures(s.Protocol, f.F, f.Figures)
	return s
}

// figures converts the figures of one side of an established flow.
func figures(p lb.Protocol, f bpf.Flow, x bpf.Figures) lb.FlowFigures {
	out := lb.FlowFigures{Packets: uint64(x.Packets)<<8 | uint64(f.Packets)}
	switch p {
	case lb.UDP:
		out.Bytes = uint64(x.Wraps)<<32 | uint64(f.End)
	case lb.TCP:
		out.Bytes = uint64(x.Wraps)<<32 + uint64(f.End) - uint64(x.First)
		if x.Fin != 0 && out.Bytes > 0 { // FIN has a sequence number as well
			out.Bytes--
		}
		out.Retransmissions = uint32(x.Resent)
	}
	return out
}

// halfOpen corrects the figures of a flow whose server entry is in the table of half-open flows.
func halfOpen(s *lb.FlowStatus, f bpf.ServerFlow) {
	s.FromClient.Packets = uint64(f.Figures.ClientPackets)
	s.FromServer.Bytes = 0
	if s.Protocol == lb.TCP {
		s.FromClient.Retransmissions = uint32(max(1, s.FromClient.Packets) - 1)
		s.FromServer.Retransmissions = uint32(max(1, s.FromServer.Packets) - 1)
	}
	if f.F.Answered == 0 {
		s.Handshake = 0
	}
}

// serverOf returns a NAT flow's address and port of its backend.
func serverOf(k bpf.ServerKey, backend netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(backend.Addr(), bpf.Swap(k.Sport))
}

// status converts the fields that the entries of all methods share.
func status(k bpf.FlowKey, state uint8, idle time.Duration) lb.FlowStatus {
	return lb.FlowStatus{
		Scope:   lb.ScopeOutside,
		Client:  netip.AddrPortFrom(bpf.FromAddr(k.T.Src), bpf.Swap(k.T.Sport)),
		Address: bpf.FromAddr(k.T.Dst), Port: bpf.Swap(k.T.Dport), Protocol: lb.Protocol(k.Proto),
		State: states[bpf.FlowState(state)],
		Idle:  max(0, idle).Seconds(),
	}
}

// From reports whether a flow uses one of these source addresses towards its server.
func (g *Collector) From(ctx context.Context, addrs map[netip.Addr]bool) (found bool, err error) {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	err = g.walkNAT(ctx, time.Millisecond, func(_ bpf.FlowTable, k bpf.ServerKey, _ bpf.ServerFlow) {
		if addrs[bpf.FromAddr(k.To)] {
			found = true
			stop()
		}
	})
	return found, err
}
