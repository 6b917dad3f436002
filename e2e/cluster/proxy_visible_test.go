package cluster

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// proxyMetrics checks that the agent that is its node's service proxy, and no other, serves what programs of the node
// ask kube-proxy for.
func (c *cluster) proxyMetrics(t *testing.T, node, other int) {
	t.Helper()
	get := func(node int, path string) (string, error) {
		a, err := traffic.From(c.Balancers[node].Host).Get(t.Context(), "http://127.0.0.1:10249"+path)
		return a.Body, err
	}
	for path, want := range map[string]string{"/proxyMode": "steelyard", "/healthz": "ok"} {
		got := must.Get(get(node, path))(t)
		must.Row(t, path, want, got)
	}
	labtest.Until(t, "the metrics are those of kube-proxy", func() error {
		text, err := get(node, "/metrics")
		for _, want := range []string{
			"\nkubeproxy_sync_proxy_rules_duration_seconds_count ",
			"\nkubeproxy_sync_proxy_rules_last_timestamp_seconds 1",
			"\nkubeproxy_sync_proxy_rules_last_queued_timestamp_seconds 1",
			"\nkubeproxy_network_programming_duration_seconds_count ", "\nprocess_resident_memory_bytes ",
		} {
			if err == nil && !strings.Contains(text, want) {
				err = fmt.Errorf("no %q in %s", want, text)
			}
		}
		return err
	})
	_, err := get(other, "/metrics")
	must.True(t, err != nil, "an agent that is no service proxy listens")
}

// proxyExplains checks that the agent of a node that is its service proxy explains and lists connections to ClusterIPs.
func (c *cluster) proxyExplains(t *testing.T, node int, s *core.Service) {
	t.Helper()
	host, agent := c.Balancers[node], c.Agents[node]
	ip := netip.MustParseAddr(s.Spec.ClusterIP)
	explained := must.Get(agent.CLI(t.Context(), "explain", host.V4.String(),
		netip.AddrPortFrom(ip, 80).String()))(t)
	for _, want := range []string{
		"forward (forwarded)", "is a ClusterIP of default/web:http", "to one of 3 endpoints",
	} {
		must.True(t, strings.Contains(explained, want), "no %q in:\n%s", want, explained)
	}
	dns := netip.AddrPortFrom(ip, 5353)
	must.Do(t, traffic.From(host.Host).UDP(t.Context(), dns, 1, 20, 10*time.Second).Err())
	flows := must.Get(agent.CLI(t.Context(), "flows", "--scope", "inside", "--service", "default/web"))(t)
	rules := must.Get(agent.CLI(t.Context(), "services", "--inside"))(t)
	must.True(t, strings.Contains(rules, dns.String()+"/udp"), "the ClusterIP is not listed:\n%s", rules)
	must.True(t, strings.Contains(flows, dns.String()+"/udp"), "the flow is not listed:\n%s", flows)
}
