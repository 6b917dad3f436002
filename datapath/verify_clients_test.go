package datapath

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/flow"
	"github.com/steelyard-lb/steelyard/datapath/internal/verify"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// warns waits until there are exactly these warnings, each of which contains the given text.
func (fx *fixture) warns(want ...string) {
	fx.t.Helper()
	labtest.Until(fx.t, "warnings: "+strings.Join(want, "; "), func() error {
		got := lbtest.Texts(fx.d.Findings())
		return wrong(!slices.EqualFunc(got, want, strings.Contains), "%q", got)
	})
}

func toRouter(fx *fixture) {
	fx.do(func() error { return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(v4["router"])}) })
}

// A route that diverts replies from clients that were served causes a warning. Other clients are served, so nothing is
// withdrawn.
func TestLostClients(t *testing.T) {
	t.Parallel()
	blackhole := &netlink.Route{Dst: prefix(v4["client"] + "/32"), Type: unix.RTN_BLACKHOLE}
	fx, x := verified(t, ModeTC, false, nil, toRouter)
	established(fx)
	fx.collect()
	got := fx.d.flows.RecentClients()
	must.Need(t, len(got) == 1 && got[0].Client.Addr() == fx.addr("client"), "sampled clients %v", got)
	fx.watch()
	fx.warns()
	fx.do(func() error { return netlink.RouteAdd(blackhole) })
	fx.warns("1 of 1 sampled clients, such as 192.0.2.100: replies are dropped: no_route")
	x.is("")
	fx.do(func() error { return netlink.RouteDel(blackhole) })
	fx.warns()
	unanswered := &netlink.Route{Dst: blackhole.Dst, Gw: prefix("192.0.2.99/32").IP}
	fx.do(func() error { return netlink.RouteAdd(unanswered) })
	labtest.Until(t, "a warning names the router", func() error {
		w := strings.Join(lbtest.Texts(fx.d.Findings()), "; ")
		return wrong(!strings.Contains(w, "192.0.2.99, the next hop of replies, does not answer"), "%q", w)
	})
}

// Clients with short connections are checked for a while, and lost clients for longer.
func TestClientsOfShortConnections(t *testing.T) {
	t.Parallel()
	blackhole := &netlink.Route{Dst: prefix(v4["client"] + "/32"), Type: unix.RTN_BLACKHOLE}
	fx, _ := verified(t, ModeTC, false, nil, toRouter)
	established(fx)
	fx.collect()
	fx.reset()
	fx.service(lb.TCP, "b1")
	fx.collect()
	fx.collect()
	must.Equal(t, 1, len(fx.d.flows.RecentClients()))
	fx.do(func() error { return netlink.RouteAdd(blackhole) })
	start := time.Now()
	look := func(at time.Duration, sample []lb.Question) (text string) {
		fx.do(func() error {
			v := fx.d.verifier
			v.Mu.Lock()
			defer v.Mu.Unlock()
			v.Look(true)
			text = v.LostClients(sample, start.Add(at))
			return nil
		})
		return text
	}
	const want = "1 of 1 sampled clients, such as 192.0.2.100: replies are dropped: no_route"
	w := look(0, fx.d.flows.RecentClients())
	must.True(t, strings.Contains(w, want), "%q", w)
	w = look(flow.KeepClients-1, nil)
	must.True(t, strings.Contains(w, want), "later %q", w)
	must.Row(t, "at the end", "", look(flow.KeepClients, nil))
}

// Packets from other nodes that are not delivered here cause a warning. This node continues to announce, because its
// announcement does not depend on them.
func TestInboundFaults(t *testing.T) {
	t.Parallel()
	blackhole := &netlink.Route{Dst: prefix(v4["b1"] + "/32"), Type: unix.RTN_BLACKHOLE}
	allow := func(names ...string) func(*fixture) error {
		return func(fx *fixture) error { return fx.sources(names...) }
	}
	for _, tt := range []struct {
		name     string
		do       func(*fixture) error
		undo     func(*fixture) error
		warnings []string // the last is about packets from other nodes
	}{
		{"no route to the backend", func(*fixture) error { return netlink.RouteAdd(blackhole) },
			func(*fixture) error { return netlink.RouteDel(blackhole) },
			[]string{"client packets do not reach a server: 192.0.2.21:8080",
				verify.InboundWarning + "packets are not delivered: no_route"}},
		{"the other node is no source of tunnel packets", allow("self"), allow("self", "b2"),
			[]string{verify.InboundWarning + "tunnel packets from 192.0.2.22 are not accepted: unknown_tunnel_source"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			fx, x := verified(t, ModeTC, false, func(o *Options) { o.Delivers = true }, toRouter)
			fx.do(func() error { return allow("self", "b2")(fx) })
			fx.nodes(lb.TCP, "self", "b2")
			fx.watch()
			fx.warns()
			steps := func() string { return strings.Join(fx.explainClient().Steps, "\n") }
			s := steps()
			must.True(t, strings.Contains(s, "when another node selects this one, the packet is delivered"), "%s", s)
			fx.do(func() error { return tt.do(fx) })
			fx.warns(tt.warnings...)
			s = steps()
			must.True(t, strings.Contains(s, tt.warnings[len(tt.warnings)-1]), "%s", s)
			x.is("")
			fx.do(func() error { return tt.undo(fx) })
			fx.warns()
		})
	}
}

// Forged packets open flows of the synthetic client on all ports. If their server is removed, nothing is withdrawn,
// because such flows continue and say nothing about new ones. A fault is found even if there are many such flows.
func TestForgedFlowsWithdrawNothing(t *testing.T) {
	t.Parallel()
	fx := shared(t, hookTC, false, func(o *Options) { o.MaxFlows = 300_000 })
	put := func(affinity time.Duration, servers ...string) {
		fx.serve(func(s *lb.Service) {
			s.Method, s.Encap, s.Ports[0].Target = lb.MethodTunnel, lb.EncapGUE, 80
			s.Affinity = affinity
		}, servers...)
	}
	f := lb.Frontend{VIP: fx.addr("vip"), Port: 80, Protocol: lb.TCP}
	fault := func() (fault string) {
		fx.do(func() error {
			s, ok := fx.d.services.Subject(f)
			if !ok {
				return errors.New("the frontend has no backend")
			}
			v := fx.d.verifier
			v.Mu.Lock()
			defer v.Mu.Unlock()
			v.Look(true)
			fault = v.Fault(f, s)
			return nil
		})
		return fault
	}
	put(time.Hour, "b1", "b2")
	must.Equal(t, "", fault())
	client, ok := fx.d.verifier.Clients.Of(fx.addr("vip"), nil)
	must.Need(t, ok, "no client of synthetic packets")
	forge := func(step int) netip.Addr {
		var frames [][]byte
		var p dptest.Packet
		for port := 1024; port < 65536; port += step {
			for _, flags := range []uint8{dptest.SYN, dptest.ACK} {
				p = fx.fromClient(dptest.TCP, flags)
				p.Src = netip.AddrPortFrom(client, uint16(port))
				frames = append(frames, p.Frame())
			}
		}
		fx.runMany(frames)
		return fx.went(p)
	}
	// removed forges flows from every step-th port, and removes their server, even from the table's list.
	removed := func(step int) (left string) {
		fx.reset()
		put(time.Hour, "b1", "b2")
		left = "b1"
		if forge(step) == fx.addr(left) {
			left = "b2"
		}
		put(time.Hour, left)
		return left
	}
	put(0, removed(1))
	must.Row(t, "the fault, when all flows of the client are forged", "", fault())
	removed(2)
	put(0, "elsewhere")
	must.True(t, fault() != "", "each second flow is forged: no fault of a server without a route")
}
