package inside

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// What is explained happens: each row is also tried.
func TestExplain(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	ip := func(i int) netip.Addr { return clusterIP(true, i) }
	any4 := netip.IPv4Unspecified()
	both := func(r lb.NodeRule) lb.NodeRule { r.Outside = &r.Inside; return r }
	two, none, drop := n.rule("two:http", ip(1), 80, lb.TCP, "p2", "q1"), n.rule("none:http", ip(2), 80, lb.TCP),
		n.rule("drop:http", ip(3), 80, lb.TCP)
	drop.Inside.Drop, two.Affinity = true, time.Hour
	ranged := n.rule("ranged:http", netip.MustParseAddr("203.0.113.1"), 80, lb.TCP, "p2")
	ranged.ClusterIP, ranged.Whole, ranged.Allow = false, true, []netip.Prefix{netip.PrefixFrom(n.pods["b1"].v4, 32)}
	p.apply(two, none, drop, ranged, both(n.rule("np:http", any4, 30000, lb.TCP, "b2")),
		both(n.rule("empty:http", any4, 30001, lb.TCP)))
	pod, bridged := n.pods["p1"], n.pods["b1"]
	far := netip.MustParseAddr("192.0.2.50")
	const forward, reset, dropping = "forward", "reset", "drop"
	for _, tt := range []struct {
		client         *lab.Host
		from           netip.Addr
		to             netip.Addr
		port           uint16
		action, reason string
		scope          lb.Scope
		says           string
	}{
		{pod.Host, pod.v4, ip(1), 80, forward, "forwarded", lb.ScopeInside, "one of 2 endpoints: 10.244.1.6"},
		{bridged.Host, bridged.v4, ip(1), 80, forward, "forwarded", lb.ScopeInside, "within the last 1h0m0s"},
		{n.node, nodeV4, ip(1), 80, forward, "forwarded", lb.ScopeInside, "connect(2)"},
		{pod.Host, pod.v4, ip(1), 81, reset, "no_frontend", lb.ScopeInside, "no Service has 10.96.0.1:81/tcp"},
		{pod.Host, pod.v4, ip(2), 80, reset, "no_backend", lb.ScopeInside, "test/none:http"},
		{n.node, nodeV4, ip(2), 80, reset, "no_backend", lb.ScopeInside, "no endpoint"},
		{pod.Host, pod.v4, ip(3), 80, dropping, "no_local_backend", lb.ScopeInside, "other nodes have some"},
		{pod.Host, pod.v4, ranged.Addr, 80, dropping, "not_allowed", lb.ScopeInside, "[10.244.2.2/32]"},
		{bridged.Host, bridged.v4, ranged.Addr, 80, forward, "forwarded", lb.ScopeInside, "an address of test/ranged"},
		{pod.Host, pod.v4, nodeV4, 30000, forward, "forwarded", lb.ScopeInside, "a node port of test/np:http"},
		{n.outside, far, nodeV4, 30000, forward, "forwarded", lb.ScopeNode, "neither this"},
		{n.outside, far, nodeV4, 30001, reset, "no_backend", lb.ScopeNode, "no endpoint"},
		{n.outside, far, ip(1), 80, dropping, "not_allowed", lb.ScopeNode, "a ClusterIP"},
	} {
		to := netip.AddrPortFrom(tt.to, tt.port)
		t.Run(fmt.Sprintf("%s to %s", tt.client, to), func(t *testing.T) {
			var x Explained
			p.call("Explain", lb.Question{Client: netip.AddrPortFrom(tt.from, 40000), To: to, Protocol: lb.TCP}, &x)
			steps := strings.Join(x.E.Steps, "\n")
			must.True(t, x.OK && x.E.Action == tt.action && x.E.Reason == tt.reason && x.E.Scope == tt.scope &&
				strings.Contains(steps, tt.says), "%+v\n%s", x, steps)
			if tt.client == n.outside && tt.reason == "not_allowed" {
				must.Do(t, n.outside.AddRoute(netip.PrefixFrom(tt.to, 32), nodeV4))
			}
			switch _, _, err := getWithin(t, tt.client, to, 1500*time.Millisecond); tt.action {
			case forward:
				must.Do(t, err)
			case reset:
				must.True(t, err != nil && strings.Contains(err.Error(), "connection refused"), "%v", err)
			case dropping:
				must.True(t, err != nil && strings.Contains(err.Error(), "deadline exceeded"), "%v", err)
			}
		})
	}
	for _, to := range []string{"192.0.2.10:22", "192.0.2.20:80", "203.0.113.1:80"} { // not the proxy's
		var x Explained
		q := must.Get(lb.ParseQuestion("192.0.2.50", to))(t)
		p.call("Explain", q, &x)
		must.True(t, !x.OK, "%s: %+v", to, x)
	}
	open := must.Get(pod.Dial(t.Context(), "tcp", netip.AddrPortFrom(ip(1), 80).String()))(t)
	defer open.Close()
	q := lb.Question{Client: netip.MustParseAddrPort(open.LocalAddr().String()), To: netip.AddrPortFrom(ip(1), 80),
		Protocol: lb.TCP}
	var x Explained
	p.call("Explain", q, &x)
	must.True(t, x.E.Backend.IsValid() && strings.Contains(fmt.Sprint(x.E.Steps), "the flow is known"), "%+v", x)
	p.restart()
	err := p.client.Call("Control.Explain", q, &x)
	must.True(t, err != nil && strings.Contains(err.Error(), "not known yet"), "before the Services are known: %v", err)
}
