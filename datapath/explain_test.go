package datapath

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// answer explains a client's first packet.
func (fx *fixture) answer(client, to netip.AddrPort, proto lb.Protocol) (e lb.Explanation) {
	fx.t.Helper()
	fx.do(func() (err error) {
		e, err = fx.d.Explain(lb.Question{Client: client, To: to, Protocol: proto})
		return err
	})
	return e
}

// Explain returns the programs' decision and changes no map.
func TestExplain(t *testing.T) {
	t.Parallel()
	for _, v6 := range []bool{false, true} {
		fx := shared(t, hookTC, v6, func(o *Options) { o.Delivers = true })
		none, vip, b1 := netip.AddrPort{}, fx.at("vip", 80), fx.at("b1", 8080)
		for _, tt := range []struct {
			name   string
			state  func()
			to     netip.AddrPort
			proto  lb.Protocol
			action string
			reason string
			server netip.AddrPort
			steps  []string
		}{
			{"not ours", func() {}, fx.at("elsewhere", 80), lb.TCP, "pass", "not_ours", none,
				[]string{"is not the address of a service"}},
			{"no such port", func() { fx.service(lb.TCP, "b1") }, fx.at("vip", 81), lb.TCP, "reset", "no_frontend",
				none, []string{"no service has", "the VIP has no service on this port"}},
			{"nat", func() { fx.service(lb.TCP, "b1") }, vip, lb.TCP, "forward", "forwarded", b1,
				[]string{"a frontend of web", "one is opened", "from " + fx.addr("self").String(),
					"by eth0, on the same network"}},
			{"udp", func() { fx.service(lb.UDP, "b1") }, vip, lb.UDP, "forward", "forwarded", b1,
				[]string{"one is opened"}},
			{"sctp", func() { fx.service(lb.SCTP, "b1") }, vip, lb.SCTP, "forward", "forwarded", b1,
				[]string{"one is opened"}},
			{"known", func() { fx.service(lb.TCP, "b1"); fx.run(fx.fromClient(dptest.TCP, dptest.SYN).Frame()) }, vip,
				lb.TCP, "forward", "forwarded", b1, []string{"its flow is known"}},
			{"no backend", func() { fx.service(lb.TCP) }, vip, lb.TCP, "reset", "no_backend", none,
				[]string{"no backend accepts new flows"}},
			{"not allowed", func() {
				fx.serve(func(s *lb.Service) {
					s.Allow = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd99::/16")}
				}, "b1")
			}, vip, lb.TCP, "drop", "not_allowed", none, []string{"not in the service's allow list"}},
			{"dsr", func() { fx.serve(func(s *lb.Service) { s.Method = lb.MethodDSR }, "b1") }, vip, lb.TCP, "forward",
				"forwarded", fx.at("b1", 0), []string{"the MAC address of"}},
			{"udp by dsr", func() {
				fx.serve(func(s *lb.Service) { s.Method, s.Ports[0].Protocol = lb.MethodDSR, lb.UDP }, "b1")
			}, vip, lb.UDP, "forward", "forwarded", fx.at("b1", 0), []string{"its flow is unknown"}},
			{"gue behind a router", func() { fx.serve(tunnel(lb.EncapGUE), "far") }, vip, lb.TCP, "forward",
				"forwarded", fx.at("far", 0),
				[]string{"through a tunnel (gue)", "next hop " + fx.addr("router").String()}},
			{"local", func() { fx.nodes(lb.TCP, "self") }, vip, lb.TCP, "forward", "forwarded", b1,
				[]string{"on this node, with the client's address"}},
			{"another node", func() { fx.nodes(lb.TCP, "b2") }, vip, lb.TCP, "forward", "forwarded", fx.at("b2", 0),
				[]string{"this node stores no flow"}},
			{"a datagram, other nodes may have its flow",
				func() { fx.nodes(lb.UDP, "b2"); fx.nodes(lb.UDP, "self", "-b2") }, vip, lb.UDP, "forward", "forwarded",
				fx.at("b2", 0), []string{"passed to nodes that may know it",
					"if the flow is unknown there, next to " + fx.addr("self").String()}},
		} {
			fx.reset()
			tt.state()
			before, counted := fx.flows(), fx.counts()
			e := fx.answer(fx.at("client", 40000), tt.to, tt.proto)
			must.Row(t, tt.name, []any{tt.action, tt.reason, tt.server}, []any{e.Action, e.Reason, e.Backend})
			for _, want := range tt.steps {
				must.True(t, strings.Contains(strings.Join(e.Steps, "\n"), want),
					"%s: nothing about %q in\n%s", tt.name, want, strings.Join(e.Steps, "\n"))
			}
			must.True(t, fx.flows().equal(before) && len(fx.counts()) == len(counted), "%s: it changed a map", tt.name)
		}
	}
}

// If the flow table is full, a SYN is forwarded, and its explanation says that the connection will fail.
func TestExplainWithAFullTable(t *testing.T) {
	t.Parallel()
	const size = 2
	fx := shared(t, hookTC, false, func(o *Options) { o.MaxFlows = size })
	fx.service(lb.TCP, "b1")
	explain := func() lb.Explanation {
		fx.collect()
		return fx.answer(fx.at("client", 41000), fx.at("vip", 80), lb.TCP)
	}
	for i := range size {
		e := explain()
		must.True(t, e.Fault == "", "%d flows: %s", i, e.Fault)
		why := fx.openFlow(lb.TCP, i)
		must.Need(t, why == "", "flow %d: %s", i, why)
	}
	e := explain()
	steps := strings.Join(e.Steps, "\n")
	must.True(t, strings.HasPrefix(e.Fault, "flows_full: ") && strings.Contains(steps, "it is refused: flows_full: "),
		"fault %q, steps:\n%s", e.Fault, steps)
}

// If a packet is dropped before the frontend lookup, its explanation does not mention frontends.
func TestExplainSourceThatIsNeverOnTheWire(t *testing.T) {
	t.Parallel()
	for v6, source := range map[bool]string{false: "127.0.0.1", true: "ff02::1"} {
		fx := shared(t, hookTC, v6, nil)
		fx.service(lb.TCP, "b1")
		e := fx.answer(netip.AddrPortFrom(netip.MustParseAddr(source), 40000), fx.at("vip", 80), lb.TCP)
		must.True(t, e.Reason == "malformed" && len(e.Steps) > 0 && strings.HasPrefix(e.Steps[0], "drop: headers are"),
			"%s: %s, steps %q", source, e.Reason, e.Steps)
	}
}
