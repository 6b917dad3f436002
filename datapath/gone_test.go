package datapath

import (
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
)

// Flows to a backend that was removed while no agent ran end with the first plan, where the plan knows all backends.
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
			fx.serve(func(s *lb.Service) {
				s.Ports[0].Protocol, s.Ports[0].Kept = lb.UDP, tt.kept(was)
			}, "b2")
			if r := fx.run(udp(fx).Frame()); r.reason != "forwarded" || (r.out.Dst != was) != tt.ends {
				t.Errorf("%s: %s %s, to %s; it was at %s", name, r.did, r.reason, r.out.Dst, was)
			}
		}
	})
}

// owner puts VIP:80/udp for a service with pods on this node: with tunnels between the nodes, or without.
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
			port.Backends = append(port.Backends, lb.Backend{
				Addr: fx.addr(b), Weight: 1, Local: true, Node: fx.addr("self"),
			})
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

// A frontend that goes to another service in one step has no flows to the backends of the service that had it.
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
		to := func() netip.AddrPort {
			t.Helper()
			r := fx.run(udp(fx).Frame())
			if r.reason != "forwarded" {
				t.Fatalf("%s: %s: %s", name, r.did, r.reason)
			}
			return r.out.Dst
		}
		var was owner
		for i, step := range tt.steps {
			fx.owned(was, step)
			if was = step; i == 0 && to() != fx.at("b1", 8080) {
				t.Fatalf("%s: the flow is not at b1", name)
			}
		}
		if got, want := to(), fx.at(tt.to, 8080); got != want {
			t.Errorf("%s: the flow is at %s; want %s", name, got, want)
		}
	}
}
