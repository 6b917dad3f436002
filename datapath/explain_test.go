package datapath

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
)

// Explain returns the decision that the programs take, and changes no map.
func TestExplain(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		fx := shared(t, hookTC, v6, func(o *Options) { o.Delivers = true })
		for _, tt := range []struct {
			name   string
			state  func()
			to     netip.AddrPort
			proto  lb.Protocol
			action string
			reason string
			server string
			steps  []string
		}{
			{"not ours", func() {}, fx.at("elsewhere", 80), lb.TCP, "pass", "not_ours", "",
				[]string{"is not the address of a service"}},
			{"no such port", func() { fx.service(lb.TCP, "b1") }, fx.at("vip", 81), lb.TCP, "reset", "no_frontend",
				"", []string{"no service has", "the VIP has no service on this port"}},
			{"nat", func() { fx.service(lb.TCP, "b1") }, fx.at("vip", 80), lb.TCP, "forward", "forwarded",
				fx.at("b1", 8080).String(),
				[]string{"a frontend of web", "one is opened", "from " + fx.addr("self").String(),
					"by eth0, on the same network"}},
			{"udp", func() { fx.service(lb.UDP, "b1") }, fx.at("vip", 80), lb.UDP, "forward", "forwarded",
				fx.at("b1", 8080).String(), []string{"one is opened"}},
			{"sctp", func() { fx.service(lb.SCTP, "b1") }, fx.at("vip", 80), lb.SCTP, "forward", "forwarded",
				fx.at("b1", 8080).String(), []string{"one is opened"}},
			{"known", func() { fx.service(lb.TCP, "b1"); fx.run(fx.fromClient(dptest.TCP, dptest.SYN).Frame()) },
				fx.at("vip", 80), lb.TCP, "forward", "forwarded", fx.at("b1", 8080).String(),
				[]string{"its flow is known"}},
			{"no backend", func() { fx.service(lb.TCP) }, fx.at("vip", 80), lb.TCP, "reset", "no_backend", "",
				[]string{"no backend accepts new flows"}},
			{"not allowed", func() {
				fx.serve(func(s *lb.Service) {
					s.Allow = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd99::/16")}
				}, "b1")
			}, fx.at("vip", 80), lb.TCP, "drop", "not_allowed", "", []string{"not in the service's allow list"}},
			{"dsr", func() { fx.serve(func(s *lb.Service) { s.Method = lb.MethodDSR }, "b1") }, fx.at("vip", 80),
				lb.TCP, "forward", "forwarded", fx.at("b1", 0).String(), []string{"the MAC address of"}},
			{"udp by dsr", func() {
				fx.serve(func(s *lb.Service) { s.Method, s.Ports[0].Protocol = lb.MethodDSR, lb.UDP }, "b1")
			}, fx.at("vip", 80), lb.UDP, "forward", "forwarded", fx.at("b1", 0).String(), []string{"no flow is known"}},
			{"gue behind a router", func() { fx.serve(tunnel(lb.EncapGUE), "far") }, fx.at("vip", 80), lb.TCP,
				"forward", "forwarded", fx.at("far", 0).String(),
				[]string{"through a tunnel (gue)", "next hop " + fx.addr("router").String()}},
			{"local", func() { fx.nodes(lb.TCP, "self") }, fx.at("vip", 80), lb.TCP, "forward", "forwarded",
				fx.at("b1", 8080).String(), []string{"on this node, with the client's address"}},
			{"another node", func() { fx.nodes(lb.TCP, "b2") }, fx.at("vip", 80), lb.TCP, "forward", "forwarded",
				fx.at("b2", 0).String(), []string{"no flow is kept here"}},
			{"a datagram, other nodes may have its flow",
				func() { fx.nodes(lb.UDP, "b2"); fx.nodes(lb.UDP, "self", "-b2") }, fx.at("vip", 80), lb.UDP,
				"forward", "forwarded", fx.at("b2", 0).String(),
				[]string{"passed to nodes that may have it",
					"if the flow is unknown there, next to " + fx.addr("self").String()}},
		} {
			fx.reset()
			tt.state()
			before, counted := fx.flows(), fx.counts()
			q := lb.Question{Client: fx.at("client", 40000), To: tt.to, Protocol: tt.proto}
			var e lb.Explanation
			fx.do(func() (err error) {
				e, err = fx.d.Explain(q)
				return err
			})
			backend := ""
			if e.Backend.IsValid() {
				backend = e.Backend.String()
			}
			if e.Action != tt.action || e.Reason != tt.reason || backend != tt.server {
				t.Errorf("%s: %s: %s, to %q; want %s: %s, to %q",
					tt.name, e.Action, e.Reason, backend, tt.action, tt.reason, tt.server)
			}
			for _, want := range tt.steps {
				if !strings.Contains(strings.Join(e.Steps, "\n"), want) {
					t.Errorf("%s: nothing about %q in\n%s", tt.name, want, strings.Join(e.Steps, "\n"))
				}
			}
			if !fx.flows().equal(before) || len(fx.counts()) != len(counted) {
				t.Errorf("%s: it changed a map", tt.name)
			}
		}
	}
}

// The SYN of a connection that will find the table of flows full is forwarded; its explanation says what follows.
func TestExplainWithAFullTable(t *testing.T) {
	t.Parallel()
	const size = 2
	fx := shared(t, hookTC, false, func(o *Options) { o.MaxFlows = size })
	fx.service(lb.TCP, "b1")
	q := lb.Question{Client: fx.at("client", 41000), To: fx.at("vip", 80), Protocol: lb.TCP}
	explain := func() (e lb.Explanation) {
		fx.collect()
		fx.do(func() (err error) { e, err = fx.d.Explain(q); return err })
		return e
	}
	for i := range size {
		if e := explain(); e.Fault != "" {
			t.Errorf("%d flows: %s", i, e.Fault)
		}
		if why := fx.openFlow(lb.TCP, i); why != "" {
			t.Fatalf("flow %d: %s", i, why)
		}
	}
	e := explain()
	steps := strings.Join(e.Steps, "\n")
	if !strings.HasPrefix(e.Fault, "flows_full: ") || !strings.Contains(steps, "it is refused: flows_full: ") {
		t.Errorf("fault %q, steps:\n%s", e.Fault, steps)
	}
}

// A packet that is dropped before a frontend is looked up says nothing about frontends.
func TestExplainSourceThatIsNeverOnTheWire(t *testing.T) {
	t.Parallel()
	for v6, source := range map[bool]string{false: "127.0.0.1", true: "ff02::1"} {
		fx := shared(t, hookTC, v6, nil)
		fx.service(lb.TCP, "b1")
		q := lb.Question{Client: netip.AddrPortFrom(netip.MustParseAddr(source), 40000), To: fx.at("vip", 80),
			Protocol: lb.TCP}
		var e lb.Explanation
		fx.do(func() (err error) {
			e, err = fx.d.Explain(q)
			return err
		})
		if e.Reason != "malformed" || len(e.Steps) == 0 || !strings.HasPrefix(e.Steps[0], "drop: headers are") {
			t.Errorf("%s: %s, steps %q", source, e.Reason, e.Steps)
		}
	}
}
