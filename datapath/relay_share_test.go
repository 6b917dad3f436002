package datapath

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
)

// relays returns how many entries of sy_relays a port has, and how many its frontend has by its share.
func (fx *fixture) relays(port uint16) (entriesOf, share uint32) {
	fx.t.Helper()
	for k := range entries[bpf.FlowKey, bpf.Relay](fx.t, fx.d.objects.SyRelays) {
		if bpf.Swap(k.T.Dport) == port {
			entriesOf++
		}
	}
	id := fx.d.services.Frontends[lb.Frontend{VIP: fx.addr("vip"), Port: port, Protocol: lb.UDP}].ID
	if err := fx.d.objects.SyRelayShare.Lookup(id, &share); err != nil {
		fx.t.Fatal(err)
	}
	return entriesOf, share
}

// on81 is nodes for another service of UDP, on port 81.
func (fx *fixture) on81(names ...string) {
	fx.t.Helper()
	fx.change(func(s *lb.Service) {
		s.Name, s.Ports[0].Protocol, s.Ports[0].Port.Port = "other", lb.UDP, 81
	}, names...)
}

// Datagrams of invented sources, which an earlier node of their slot never returns, leave room for the flows of other
// services that are relayed: these stay with their node.
func TestAFloodOfRelayedDatagramsLeavesOthersAlone(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, func(o *Options) { o.Delivers = true })
	fx.do(func() error { return fx.d.SetTunnelSources([]netip.Addr{fx.addr("b2")}) })
	for _, nodes := range [][]string{{"b2"}, {"self", "-b2"}} {
		fx.nodes(lb.UDP, nodes...)
		fx.on81(nodes...)
	}
	invented := fx.invented(rand.New(rand.NewPCG(1, 3)), 72_000, dptest.UDP, 0)
	fx.runMany(invented)
	flooded, share := fx.relays(80)
	if flooded != share || flooded > fx.d.objects.SyRelays.MaxEntries()/2+1 {
		t.Errorf("the flooded service has %d entries and a share of %d", flooded, share)
	}
	live := fx.on(1, dptest.UDP, 0)
	live.Dst = fx.at("vip", 81)
	fx.sentTo("the slot has changed", fx.run(live.Frame()), live, true, "b2", "self")
	fx.d.services.Settle(0, 0)
	fx.sentTo("the slot has forgotten", fx.run(live.Frame()), live, true, "b2", "self")

	if err := fx.d.objects.SyRelayShare.Update(uint32(table.MaxFrontends), uint32(7), ebpf.UpdateExist); err != nil {
		t.Fatal(err)
	}
	fx.collect()
	var all uint32
	if err := fx.d.objects.SyRelayShare.Lookup(uint32(table.MaxFrontends), &all); err != nil || all != flooded+1 {
		t.Errorf("after a walk: %d entries (%v); want %d", all, err, flooded+1)
	}
}

// A datagram of a service that has its share of flows comes back from the earlier node and is dropped. Nothing of it is
// left, so the flows of that service that the earlier node has are relayed on.
func TestRefusedDatagramsLeaveNoRelays(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, func(o *Options) { o.Delivers, o.MaxFlows = true, 20 })
	fx.do(func() error { return fx.d.SetTunnelSources([]netip.Addr{fx.addr("b2")}) })
	fx.nodes(lb.UDP, "b2")
	fx.nodes(lb.UDP, "self", "-b2")
	live := fx.on(0, dptest.UDP, 0)
	fx.sentTo("a flow of the earlier node", fx.run(live.Frame()), live, true, "b2", "self")
	refused := 0
	for i := range 40 {
		in := fx.on(1+i, dptest.UDP, 0)
		fx.sentTo("a new flow", fx.run(in.Frame()), in, true, "b2", "self")
		if r := fx.received("b2", in, fx.chained(true)...); r.reason == "udp_share_full" {
			refused++
		}
	}
	if n, share := fx.relays(80); refused < 30 || n != 1 || share != 1 {
		t.Errorf("%d were refused, %d are relayed, the share is %d; want 1", refused, n, share)
	}
}
