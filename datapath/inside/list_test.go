package inside

import (
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The list has each flow once, from the client's view, even if client and endpoint are the same or replies pass this
// node by another way.
func TestFlowsAreListed(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	self, local := clusterIP(true, 1), clusterIP(true, 2)
	nodePort := n.rule("np:http", netip.IPv4Unspecified(), 30000, lb.TCP, "q1")
	nodePort.Outside = &nodePort.Inside
	p.apply(n.rule("self:http", self, 80, lb.TCP, "p1"), n.rule("local:dns", local, 53, lb.UDP, "p2"), nodePort)
	var names []string
	var rules []lb.NodeRule
	p.call("Rules", true, &rules)
	for _, r := range rules {
		names = append(names, r.Name)
	}
	must.Equal(t, []string{"test/local:dns", "test/np:http", "test/self:http"}, names)
	pod := n.pods["p1"]
	tcp := must.Get(pod.Dial(t.Context(), "tcp", netip.AddrPortFrom(self, 80).String()))(t)
	defer tcp.Close()
	outside := must.Get(n.outside.Dial(t.Context(), "tcp", netip.AddrPortFrom(nodeV4, 30000).String()))(t)
	defer outside.Close()
	udp := must.Get(n.node.Dial(t.Context(), "udp", netip.AddrPortFrom(local, 53).String()))(t)
	defer udp.Close()
	must.Get(udp.Write([]byte("x")))(t)
	flows := func(want lb.FlowFilter) (all []lb.FlowStatus) {
		t.Helper()
		p.call("Flows", want, &all)
		return all
	}
	var got []lb.FlowStatus
	labtest.Until(t, "three flows", func() error {
		got = flows(lb.FlowFilter{State: lb.FlowEstablished})
		return labtest.ErrorIf(len(got) != 3, "%+v", got)
	})
	at := func(a any) netip.AddrPort { return netip.MustParseAddrPort(a.(interface{ String() string }).String()) }
	want := map[string]lb.FlowStatus{
		"test/self": {Scope: lb.ScopeInside, Client: at(tcp.LocalAddr()), Address: self, Port: 80, Protocol: lb.TCP,
			Backend: pod.at(true, 8080)},
		"test/local": {Scope: lb.ScopeInside, Client: at(udp.LocalAddr()), Address: local, Port: 53, Protocol: lb.UDP,
			Backend: n.pods["p2"].at(true, 5353)},
		"test/np": {Scope: lb.ScopeNode, Client: at(outside.LocalAddr()), Address: nodeV4, Port: 30000,
			Protocol: lb.TCP, Backend: n.pods["q1"].at(true, 8080)},
	}
	for _, f := range got {
		must.True(t, f.Idle >= 0 && f.Idle < 60, "idle for %f s", f.Idle)
		// Endpoints see the Service, if the client is its own endpoint, or this node's address on their link.
		source := map[string]netip.Addr{
			"test/self": self, "test/local": n.pods["p2"].v4.Prev(), "test/np": nodeV4,
		}[f.Service]
		must.Row(t, f.Service+": source", source, f.Source.Addr())
		w := want[f.Service]
		w.Service, w.Forward, w.State = f.Service, lb.MethodNAT, lb.FlowEstablished
		f.Idle, f.Source = 0, netip.AddrPort{}
		must.Row(t, f.Service, w, f)
	}
	must.Equal(t, 1, len(flows(lb.FlowFilter{Service: "test/np"})))
	must.Equal(t, 1, len(flows(lb.FlowFilter{Limit: 1})))
	must.Equal(t, 0, len(flows(lb.FlowFilter{State: lb.FlowClosed})))
	tcp.Close()
	labtest.Within(t, 10*time.Second, "the closed flow is listed", func() error {
		closed := flows(lb.FlowFilter{State: lb.FlowClosed})
		return labtest.ErrorIf(len(closed) != 1 || closed[0].Service != "test/self", "%+v", closed)
	})
}
