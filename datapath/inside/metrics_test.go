package inside

import (
	"errors"
	"net/netip"
	"syscall"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Metrics count connections that were opened or rejected, and flows.
func TestMetrics(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	p := startProxy(t, n.node, "eth0")
	http := netip.AddrPortFrom(clusterIP(true, 1), 80)
	nodePort := n.rule("a:np", netip.IPv4Unspecified(), 30000, lb.TCP, "p2")
	nodePort.Outside = &nodePort.Inside
	p.apply(n.rule("a:http", http.Addr(), 80, lb.TCP, "p2"), n.rule("b:http", clusterIP(true, 2), 80, lb.TCP), nodePort)
	pod := n.pods["p1"]
	for range 2 {
		defer must.Get(pod.Dial(t.Context(), "tcp", http.String()))(t).Close()
	}
	defer must.Get(n.outside.Dial(t.Context(), "tcp", netip.AddrPortFrom(nodeV4, 30000).String()))(t).Close()
	defer must.Get(n.node.Dial(t.Context(), "tcp", http.String()))(t).Close() // translated at connect(2): no flow
	for range 3 {
		_, err := pod.Dial(t.Context(), "tcp", netip.AddrPortFrom(clusterIP(true, 2), 80).String())
		must.True(t, errors.Is(err, syscall.ECONNREFUSED), "a Service without endpoints: %v", err)
	}
	p.call("Sweep", true, new(int))
	var got map[string]float64
	p.call("Metrics", true, &got)
	must.Equal(t, map[string]float64{
		"steelyard_proxy_connections_total":                 4,
		"steelyard_proxy_rejected_packets_total no_backend": 3,
		"steelyard_proxy_flows inside":                      2,
		"steelyard_proxy_flows node":                        1,
		"steelyard_proxy_max_flows inside":                  1 << 19,
		"steelyard_proxy_max_flows node":                    1 << 18,
	}, got)
}
