package datapath

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// goDown applies a plan in which one of its backends is down.
func (fx *fixture) goDown(plan *lb.FrontendPlan, down netip.AddrPort) {
	fx.t.Helper()
	p := *plan
	p.Targets = slices.DeleteFunc(slices.Clone(p.Targets), func(x lb.Target) bool { return x.Addr == down })
	p.Down = []netip.AddrPort{down}
	fx.apply(lb.Delta{Put: []*lb.FrontendPlan{&p}})
}

func (fx *fixture) collect() {
	fx.t.Helper()
	fx.do(func() error { fx.d.flows.Collect(context.Background(), nil); return nil })
}

// A flow ends the moment its backend goes down, before anything is removed. Its packets are then treated as packets of
// an unknown flow. It does not come back with the backend. The next collection removes its entries.
func TestFlowsEndAtOnceWhenTheirBackendGoesDown(t *testing.T) {
	t.Parallel()
	for name, x := range map[string]struct {
		proto   lb.Protocol
		state   func(*fixture)
		packet  func(*fixture) dptest.Packet
		clients string // what happens to the client's next packet
		reply   bool   // the server has already answered
	}{
		"established": {lb.TCP, established, tcp(dptest.ACK), "no_flow", true},
		"half-open": {lb.TCP, with(web, tcp(dptest.SYN), replies(dptest.SYN|dptest.ACK)), tcp(dptest.ACK),
			"no_flow", true},
		"SYN again": {lb.TCP, with(web, tcp(dptest.SYN)), tcp(dptest.SYN), "forwarded", false},
		"UDP":       {lb.UDP, answered, udp, "forwarded", true},
	} {
		t.Run(name, func(t *testing.T) {
			eachOf(t, nil, func(t *testing.T, fx *fixture) {
				x.state(fx)
				fx.run(x.packet(fx).Frame())
				plan, before, down := fx.service(x.proto, "b1", "b2"), fx.flows(), fx.last
				reply := fx.reply(dptest.ACK)
				must.Need(t, !x.reply || down.Src.Addr() == fx.addr("self"), "the last packet was %+v", down)
				fx.goDown(plan, down.Dst)
				after := fx.flows()
				must.True(t, before.equal(after), "the entries changed: %v, %v", before, after)
				fx.wantDid("a reply of the backend", reply, "passed")
				r := fx.run(x.packet(fx).Frame())
				must.True(t, r.reason == x.clients && r.out.Dst != down.Dst,
					"the client's packet: %s %s, to %s", r.did, r.reason, r.out.Dst)
				fx.service(x.proto, "b1", "b2")
				fx.wantDid("a reply of the backend, which is up again", reply, "passed")
				fx.wantReason("the client's packet, when the backend is up again", x.packet(fx), x.clients)
				fx.collect()
				for k, f := range fx.flows().servers {
					old, was := before.servers[k]
					must.True(t, !was || old.F.Generation != f.F.Generation, "the entry %v %v is left", k, f)
				}
				fx.forget()
			})
		})
	}
}

// forget checks that no state of ended flows remains once they are removed.
func (fx *fixture) forget() {
	fx.t.Helper()
	fx.d.services.Mu.Lock()
	for k, e := range fx.d.services.Ended {
		e.Since -= time.Minute
		fx.d.services.Ended[k] = e
	}
	fx.d.services.Mu.Unlock()
	fx.collect()
	left := entries[bpf.MemberKey, uint32](fx.t, fx.d.objects.SyEnded)
	must.True(fx.t, len(left)+len(fx.d.services.Ended) == 0, "%v, %v are left", left, fx.d.services.Ended)
}

// DSR flows end like NAT flows.
func TestDirectReturnFlowsEndAtOnceWhenTheirBackendGoesDown(t *testing.T) {
	t.Parallel()
	eachOf(t, nil, func(t *testing.T, fx *fixture) {
		least := func(s *lb.Service) {
			s.Algorithm, s.Method, s.Encap = lb.AlgorithmRoundRobin, lb.MethodTunnel, lb.EncapGUE
		}
		plan := fx.serve(least, "b1", "b2")
		fx.went(tcp(dptest.SYN)(fx))
		down := fx.went(tcp(dptest.ACK)(fx))
		before := fx.dsrFlows()
		fx.goDown(plan, netip.AddrPortFrom(down, 8080))
		after := fx.dsrFlows()
		must.True(t, len(before) == 1 && maps.Equal(before, after), "the entries were %v and are %v", before, after)
		for range 2 {
			fx.wantReason("the client's packet", tcp(dptest.ACK)(fx), "no_flow")
			fx.serve(least, "b1", "b2") // it is up again
		}
		fx.collect()
		left := fx.dsrFlows()
		must.True(t, len(left) == 0, "%v are left", left)
		fx.forget()
	})
}

// A backend that goes down for one frontend keeps another frontend's flows, even if an agent starts in between.
func TestFlowsOfOtherFrontendsContinue(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookXDP, false, nil)
	plan := fx.service(lb.TCP, "b1")
	other := *plan
	other.Port = 81
	fx.apply(lb.Delta{Put: []*lb.FrontendPlan{&other}})
	second := func(flags uint8) dptest.Packet {
		p := fx.fromClient(dptest.TCP, flags)
		p.Dst = fx.at("vip", 81)
		return p
	}
	for _, p := range []dptest.Packet{tcp(dptest.SYN)(fx), second(dptest.SYN)} {
		fx.went(p)
		fx.went(fx.reply(dptest.SYN | dptest.ACK))
		p.Flags, p.Seq = dptest.ACK, 1001
		fx.went(p)
	}
	fx.goDown(plan, fx.at("b1", 8080))
	check := func(when string) {
		t.Helper()
		fx.wantReason(when, tcp(dptest.ACK)(fx), "no_flow")
		fx.went(second(dptest.ACK))
		fx.went(fx.reply(dptest.ACK))
	}
	check("down")
	fx.close()
	fx.open()
	check("after a restart of the agent")
	fx.collect()
	check("collected")
	must.Do(t, fx.confirmed().want(1, 1))
	fx.forget()
	check("forgotten")
}

// However many flows a backend has, the number of writes when it goes down is the same, and the source ports are free
// immediately. The next collection removes the entries.
func TestADownBackendCostsNothingPerFlow(t *testing.T) {
	t.Parallel()
	const flows = 100_000
	fx := shared(t, hookTC, false, func(o *Options) {
		o.MaxFlows = 2 * flows
		o.SNATPorts = []PortRange{{61000, 61005}}
	})
	plan := fx.service(lb.TCP, "b1")
	b := fx.d.services.Backends.ByAddr[fx.at("b1", 8080)]
	stream := fx.d.objects.FlowTables()[bpf.GCStream]
	fillFlowsOf(t, stream, flows, 0, fx.d.services.Frontends[plan.Frontend].ID, b.ID)
	for i := range 6 { // one per port
		fx.went(fx.on(i, dptest.TCP, dptest.SYN))
		fx.went(fx.reply(dptest.SYN | dptest.ACK))
		p := fx.on(i, dptest.TCP, dptest.ACK)
		p.Seq = 1001
		fx.went(p)
	}
	fx.wantReason("a seventh flow", fx.on(6, dptest.TCP, dptest.SYN), "snat_exhausted")
	before := fx.flows()
	fx.goDown(plan, fx.at("b1", 8080))
	must.True(t, before.equal(fx.flows()), "entries of flows were written")
	must.Row(t, "entries of ended flows", 1, len(entries[bpf.MemberKey, uint32](t, fx.d.objects.SyEnded)))
	fx.service(lb.TCP, "b1")
	for i := range 6 {
		fx.went(fx.on(10+i, dptest.TCP, dptest.SYN))
	}
	fx.collect()
	must.Do(t, fx.confirmed().want(0, 0))
	must.Row(t, "flows that are left", 6, len(fx.flows().servers)) // the new flows
	fx.forget()
}

// When a backend of a UDP service goes down, its flows move with their next packet, even if the service has used its
// share of flows.
func TestFlowsOfADownBackendMoveInAFullShare(t *testing.T) {
	t.Parallel()
	const flows = 100
	fx := shared(t, hookTC, false, func(o *Options) { o.MaxFlows = flows * udpPart })
	plan := fx.service(lb.UDP, "b1", "b2")
	to := map[netip.AddrPort]int{}
	for i := range flows / 2 { // a frontend's share
		fx.went(fx.on(i, dptest.UDP, 0))
		to[fx.last.Dst]++
	}
	fx.wantReason("one more flow", fx.on(flows, dptest.UDP, 0), "udp_share_full")
	down := fx.at("b1", 8080)
	fx.goDown(plan, down)
	for i := range flows / 2 {
		must.True(t, fx.went(fx.on(i, dptest.UDP, 0)) != down.Addr(), "flow %d went to the backend that is down", i)
	}
	must.True(t, to[down] != 0 && len(fx.flows().servers) == flows/2,
		"%d flows were of the backend, and there are %d in all", to[down], len(fx.flows().servers))
	var share uint32
	id := fx.d.services.Frontends[plan.Frontend].ID
	err := fx.d.objects.SyUdpShare.Lookup(id, &share)
	must.True(t, err == nil && share == flows/2, "the frontend has %d flows, %v; want %d", share, err, flows/2)
}

// The list of flows omits ended flows.
func TestListWithoutEndedFlows(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, nil)
	established(fx)
	plan, down := fx.service(lb.TCP, "b1", "b2"), fx.last.Dst
	fx.goDown(plan, down)
	flows, _, err := fx.d.Flows(t.Context(), lb.FlowFilter{})
	must.True(t, err == nil && len(flows) == 0, "listed %v, %v", flows, err)
}

// If a backend was removed while no agent ran, its flows end with the first plan, provided that the plan knows all
// backends.
func TestFlowsOfBackendsThatAreGoneEndAtAStart(t *testing.T) {
	t.Parallel()
	eachOnce(t, func(t *testing.T, h hookName, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		for name, tt := range map[string]struct {
			kept func(at netip.AddrPort) []netip.AddrPort
			ends bool
		}{
			"removed":   {func(netip.AddrPort) []netip.AddrPort { return []netip.AddrPort{} }, true},
			"exists":    {func(at netip.AddrPort) []netip.AddrPort { return []netip.AddrPort{at} }, false},
			"not known": {func(netip.AddrPort) []netip.AddrPort { return nil }, false},
		} {
			fx.reset()
			fx.service(lb.UDP, "b1")
			fx.run(udp(fx).Frame())
			fx.reply(0)
			was := fx.last.Dst
			fx.close()
			fx.open()
			fx.serve(func(s *lb.Service) { s.Ports[0].Protocol, s.Ports[0].Kept = lb.UDP, tt.kept(was) }, "b2")
			r := fx.run(udp(fx).Frame())
			must.True(t, r.reason == "forwarded" && (r.out.Dst != was) == tt.ends,
				"%s: %s %s, to %s; it was at %s", name, r.did, r.reason, r.out.Dst, was)
		}
	})
}

// owner serves VIP:80/udp for a service with pods on this node, with or without tunnels between nodes.
type owner struct {
	service     string
	tunnels     bool
	using, kept []string
}

func (fx *fixture) owned(was, is owner) {
	fx.t.Helper()
	build := func(o owner) []*lb.FrontendPlan {
		s := &lb.Service{
			Name: o.service, VIPs: []netip.Addr{fx.addr("vip")},
			Ports:     lb.PortsOn(nil, lb.Port{Port: 80, Target: 8080, Protocol: lb.UDP}),
			Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Check: lb.CheckSpec{Type: lb.CheckNone},
			NodeForwarding: lb.NodeForwarding{Enabled: o.tunnels},
		}
		port := &s.Ports[0]
		port.Nodes, port.Kept = []lb.Node{{Addr: fx.addr("self"), Local: true}}, []netip.AddrPort{}
		for _, b := range o.using {
			b := lb.Backend{Addr: fx.addr(b), Weight: 1, Local: true, Node: fx.addr("self")}
			port.Backends = append(port.Backends, b)
		}
		for _, b := range o.kept {
			port.Kept = append(port.Kept, fx.at(b, 8080))
		}
		return lb.Build(s, nil, lb.Drains{}).Frontends
	}
	delta := lb.Delta{Put: build(is)}
	if was.tunnels && !is.tunnels {
		delta.Delete = []lb.Frontend{build(was)[0].Frontend}
	}
	fx.apply(delta)
}

// A frontend that moves to another service in one step has no flows to the previous service's backends.
func TestFlowsOfTheServiceThatHadTheFrontendEnd(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, func(o *Options) { o.Delivers = true })
	b1, b2 := []string{"b1"}, []string{"b2"}
	for name, tt := range map[string]struct {
		steps []owner
		to    string
	}{
		"another service":       {[]owner{{"a", false, b1, nil}, {"b", false, b2, nil}}, "b2"},
		"with the same backend": {[]owner{{"a", false, b1, nil}, {"b", false, []string{"b1", "b2"}, nil}}, "b1"},
		"that drains there":     {[]owner{{"a", false, b1, nil}, {"b", false, b2, b1}}, "b1"},
		"same service":          {[]owner{{"a", false, b1, nil}, {"a", false, b2, nil}}, "b1"},
		"draining before":       {[]owner{{"a", false, b1, nil}, {"a", false, b2, b1}, {"b", false, b2, nil}}, "b2"},
		"tunnels":               {[]owner{{"a", true, b1, nil}, {"b", true, b2, nil}}, "b2"},
		"tunnels, same service": {[]owner{{"a", true, b1, nil}, {"a", true, b2, nil}}, "b1"},
		"from tunnels":          {[]owner{{"a", true, b1, nil}, {"b", false, b2, nil}}, "b2"},
		"from tunnels, same":    {[]owner{{"a", true, b1, nil}, {"a", false, b2, b1}}, "b1"},
		"later than tunnels": {
			[]owner{{"a", true, b1, nil}, {"a", false, b2, b1}, {"b", false, b2, nil}}, "b2",
		},
	} {
		fx.reset()
		var was owner
		for i, step := range tt.steps {
			fx.owned(was, step)
			was = step
			if i == 0 {
				must.Row(t, name+": at first", fx.at("b1", 8080), fx.run(udp(fx).Frame()).out.Dst)
			}
		}
		must.Row(t, name, fx.at(tt.to, 8080), fx.run(udp(fx).Frame()).out.Dst)
	}
}
