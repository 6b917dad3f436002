package cluster

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab"
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

// proxyTraces checks that one trace of a node whose agent is its service proxy shows a connection of a pod to the
// ClusterIP, and one of a client to a VIP.
func (c *cluster) proxyTraces(t *testing.T, node int, s *core.Service, p *pod, vip netip.Addr) {
	t.Helper()
	trace := must.Get(c.Balancers[node].Host.Start(lab.Command{Path: binary, Args: []string{"trace"}}))(t)
	labtest.Until(t, "the trace begins", func() error {
		must.Need(t, trace.Running(), "the trace ended with %v:\n%s", trace.Ended(), trace.Log.Tail(10))
		return labtest.ErrorIf(!trace.Log.Contains("tracing"), "%s", trace.Log.Tail(10))
	})
	ip := netip.MustParseAddr(s.Spec.ClusterIP)
	line := func(hook string, from, to netip.Addr) *regexp.Regexp {
		return regexp.MustCompile(fmt.Sprintf(` %s: forward: %s:\d+ > %s:80 tcp SYN => \S+ > \S+:8080 tcp SYN .*; `+
			`service default/web, backend \S+, nat, request`, hook, from, to))
	}
	for _, x := range []struct {
		from traffic.Client
		to   netip.Addr
		want *regexp.Regexp
	}{
		{traffic.From(p.Host), ip, line("proxy", p.v4, ip)},
		{c.Client(), vip, line("(tc|xdp)", c.Clients[0].V4, vip)}, // routers choose the node by the port
	} {
		labtest.Until(t, "the trace shows "+x.want.String(), func() error {
			if _, err := x.from.Get(t.Context(), "http://"+x.to.String()+"/"); err != nil {
				return err
			}
			shown := slices.ContainsFunc(trace.Log.Lines(), x.want.MatchString)
			return labtest.ErrorIf(!shown, "the trace shows\n%s", trace.Log.Tail(10))
		})
	}
	must.Do(t, trace.Signal(syscall.SIGINT))
	must.Do(t, trace.Wait(t.Context()))
}
