package datapath

import (
	"context"
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/datapath/internal/flow"
	"github.com/steelyard-lb/steelyard/datapath/internal/table"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func entries[K comparable, V any](t testing.TB, m *ebpf.Map) map[K]V {
	t.Helper()
	out := map[K]V{}
	must.Do(t, flow.WalkMap(context.Background(), m, 0, func(k K, f V) { out[k] = f }))
	return out
}

// natFlows holds the servers' entries of NAT flows, and the clients' entries that exist.
type natFlows struct {
	servers map[bpf.ServerKey]bpf.ServerFlow
	clients map[bpf.ClientKey]bpf.ClientFlow
}

func (fx *fixture) flowsIn(tables ...bpf.FlowTable) natFlows {
	fx.t.Helper()
	all := natFlows{map[bpf.ServerKey]bpf.ServerFlow{}, map[bpf.ClientKey]bpf.ClientFlow{}}
	for _, t := range tables {
		maps.Copy(all.servers, entries[bpf.ServerKey, bpf.ServerFlow](fx.t, t.Servers))
		maps.Copy(all.clients, entries[bpf.ClientKey, bpf.ClientFlow](fx.t, t.Clients))
	}
	return all
}

// flows returns all NAT flows.
func (fx *fixture) flows() natFlows { return fx.flowsIn(fx.d.objects.FlowTables()...) }

// confirmed returns the NAT flows whose client is confirmed.
func (fx *fixture) confirmed() natFlows {
	flows := fx.flowsIn(fx.d.objects.FlowTables()[1:]...)
	half := uint8(bpf.FlowHalfOpen)
	maps.DeleteFunc(flows.servers, func(_ bpf.ServerKey, f bpf.ServerFlow) bool { return f.F.State == half })
	maps.DeleteFunc(flows.clients, func(_ bpf.ClientKey, f bpf.ClientFlow) bool { return f.F.State == half })
	return flows
}

func (a natFlows) equal(b natFlows) bool {
	return maps.Equal(a.servers, b.servers) && maps.Equal(a.clients, b.clients)
}

// want returns an error unless there are this many flows and client entries.
func (a natFlows) want(servers, clients int) error {
	return wrong(len(a.servers) != servers || len(a.clients) != clients,
		"%d flows with %d entries of clients; want %d, %d", len(a.servers), len(a.clients), servers, clients)
}

// A restart keeps flows and ids, and forwarding continues.
func TestRestartKeepsFlowsAndIDs(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		established(fx)
		before, ids := fx.flows(), fx.d.services.Frontends
		fx.close()
		fx.open()
		if held, err := fx.d.Held(); err != nil || len(held) != 1 || held[0].VIP != fx.addr("vip") {
			t.Errorf("held %v, %v; want the frontend", held, err)
		}
		for f, was := range ids {
			now := fx.d.services.Frontends[f]
			must.True(t, now != nil && now.ID == was.ID, "%s was %d and is %+v", f, was.ID, now)
		}
		after := fx.flows()
		must.True(t, before.equal(after), "flows were\n%v\nand are\n%v", before, after)
		fx.wantReason("after the restart", fx.reply(dptest.ACK), forwarded)
		fx.service(lb.TCP, "b1", "b2")
		fx.wantReason("after the first plan", tcp(dptest.ACK)(fx), forwarded)
	})
}

// end ends flows as Run does.
func (fx *fixture) end() {
	fx.t.Helper()
	fx.do(func() error {
		reset, err := flow.NewResetter()
		if err != nil {
			return err
		}
		defer reset.Close()
		fx.d.flows.Collect(context.Background(), reset)
		return nil
	})
}

// A backend that is removed from the plan but not down keeps its flows.
func TestFlowsOfARemovedBackendContinue(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, nil)
	established(fx)
	other := "b1"
	if fx.last.Dst.Addr() == fx.addr("b1") {
		other = "b2"
	}
	fx.service(lb.TCP, other)
	fx.end()
	before := fx.last.Dst
	r := fx.run(tcp(dptest.ACK)(fx).Frame())
	must.True(t, r.out.Dst == before, "%s: went to %s; want %s", r.reason, r.out.Dst, before)
	fx.collect()
	must.True(t, fx.d.services.Backends.ByAddr[before] != nil, "the id of a backend with flows was released")
	fx.run(resetBy(replies, 5001)(fx).Frame())
	fx.d.flows.Limits.Closed, fx.d.flows.Limits.HalfOpen = -time.Second, 0
	fx.collect() // removes the flow
	fx.collect() // finds no flow
	must.True(t, fx.d.services.Backends.ByAddr[before] == nil,
		"the id of a backend without plan and flows was not released")
}

func TestFlowsEndWithTheirFrontend(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, true, nil)
	established(fx)
	f := lb.Frontend{VIP: fx.addr("vip"), Port: 80, Protocol: lb.TCP}
	fx.apply(lb.Delta{Delete: []lb.Frontend{f}})
	fx.end()
	must.Do(t, fx.flows().want(0, 0))
	r := fx.run(tcp(dptest.SYN)(fx).Frame())
	must.True(t, r.did == "passed", "to the address of a removed frontend: %s", r.did)
	must.Row(t, "free ids", table.MaxFrontends, len(fx.d.services.Free))
}

// The list contains each flow once, with both ends, and only flows that match the filter.
func TestListOfFlows(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		fx.service(lb.TCP, "b1")
		for i := range 20 {
			fx.run(fx.on(i, dptest.TCP, dptest.SYN).Frame())
		}
		open := fx.on(0, dptest.TCP, dptest.SYN)
		fx.run(open.Frame())
		fx.run(fx.reply(dptest.SYN | dptest.ACK).Frame())
		fx.run(fx.on(0, dptest.TCP, dptest.ACK).Frame())
		list := func(f lb.FlowFilter) []lb.FlowStatus {
			flows, more, err := fx.d.Flows(t.Context(), f)
			must.True(t, err == nil && more == (f.Limit == 5), "%+v: more %t, %v", f, more, err)
			return flows
		}
		for _, x := range []struct {
			filter lb.FlowFilter
			want   int
		}{
			{lb.FlowFilter{}, 20}, {lb.FlowFilter{Limit: 5}, 5},
			{lb.FlowFilter{State: lb.FlowHalfOpen}, 19}, {lb.FlowFilter{Service: "other"}, 0},
		} {
			got := len(list(x.filter))
			must.True(t, got == x.want, "%+v: %d flows; want %d", x.filter, got, x.want)
		}
		ended, end := context.WithCancel(t.Context())
		end()
		if _, more, err := fx.d.Flows(ended, lb.FlowFilter{}); err != nil || !more {
			t.Errorf("a walk that was cut short: more %t, %v", more, err)
		}
		flows := list(lb.FlowFilter{State: lb.FlowEstablished})
		must.Need(t, len(flows) == 1, "%d established flows; want 1", len(flows))
		f := flows[0]
		must.True(t, f.Idle >= 0 && f.Idle <= 60 && f.Source == fx.last.Src,
			"idle %f s, source %s; want %s", f.Idle, f.Source, fx.last.Src)
		must.True(t, f.Age >= 0 && f.Handshake > 0 && f.FromClient.Packets == 3 && f.FromServer.Packets == 1, "%+v", f)
		f.Idle, f.Source, f.Age, f.Handshake = 0, netip.AddrPort{}, 0, 0
		f.FromClient, f.FromServer = lb.FlowFigures{}, lb.FlowFigures{}
		want := lb.FlowStatus{Scope: lb.ScopeOutside, Service: "web", Client: open.Src, Address: fx.addr("vip"),
			Port: 80, Protocol: lb.TCP,
			Backend: fx.at("b1", 8080), Forward: lb.MethodNAT, State: lb.FlowEstablished}
		must.True(t, f == want, "%+v; want %+v", f, want)
		fx.reset()
		fx.tunnelTo(lb.TCP, nil, 21)
		fx.went(fx.on(3, dptest.TCP, dptest.SYN))
		fx.went(fx.on(3, dptest.TCP, dptest.ACK))
		if flows := list(lb.FlowFilter{}); len(flows) != 1 || flows[0].Forward != lb.MethodTunnel ||
			flows[0].Backend != fx.at("b1", 80) {
			t.Errorf("flows with a tunnel: %+v; want one to b1", flows)
		}
	})
}

// A packet that cannot be stored because its key is in use does not count as flows_full (D25).
func TestATakenKeyIsNoFullTable(t *testing.T) {
	t.Parallel()
	for _, h := range []hookName{hookXDP, hookTC} {
		fx := shared(t, h, false, nil)
		with(web, tcp(dptest.SYN), replies(dptest.SYN|dptest.ACK))(fx)
		for k := range fx.flowsIn(fx.d.objects.FlowTables()[bpf.GCHalfOpen]).servers {
			fx.put(fx.d.objects.SyStreamServers, k, bpf.ServerFlow{})
		}
		if r := fx.run(tcp(dptest.ACK)(fx).Frame()); r.did != "dropped" || r.reason != "no_flow" {
			t.Errorf("%s: %s: %s; want dropped: no_flow", h, r.did, r.reason)
		}
	}
}
