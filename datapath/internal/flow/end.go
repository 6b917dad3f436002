package flow

import (
	"context"
	"errors"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// EndFlows ends the NAT flows that a filter selects, except closed ones, whose source port must rest. It resets their
// clients, and the servers receive a reset when they send the next packet. It returns how many it has ended, and how
// many direct flows it has kept: without an entry, their packets would only reach the same server again.
func (g *Collector) EndFlows(ctx context.Context, want lb.FlowFilter) (ended, kept int, err error) {
	reset, err := NewResetter()
	if err != nil {
		return 0, 0, err
	}
	defer reset.Close()
	_, service, backends := g.services.Names()
	now, vip := bpf.Uptime(), g.services.FrontendVIPs()
	over := NewRemover(g.objects.SyGc, true, now)
	var failed error
	err = g.walkNAT(ctx, 0, func(t bpf.FlowTable, k bpf.ServerKey, f bpf.ServerFlow) {
		s := natStatus(now, k, f)
		s.Service, s.Address = service[f.Client.Frontend], vip(f.Client.Frontend)
		s.Backend = serverOf(k, backends[f.Backend])
		if s.State == lb.FlowClosed || !want.Match(s) {
			return
		}
		g.reset(reset, t, k, f, vip)
		failed = errors.Join(failed, over.Add(t, k, f))
	})
	errDSR := g.walkDSR(ctx, 0, func(_ *ebpf.Map, k bpf.FlowKey, f bpf.DSRFlow) {
		s := status(k, f.State, 0)
		s.Service, s.Backend = service[f.Frontend], backends[f.Backend]
		if s.State != lb.FlowClosed && want.Match(s) {
			kept++
		}
	})
	err = errors.Join(err, failed, errDSR, over.Flush(), ctx.Err())
	return over.Removed, kept, err
}
