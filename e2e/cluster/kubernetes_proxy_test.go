package cluster

import (
	"cmp"
	"net/netip"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// takesOver makes a node's agent its service proxy and gives that back to kube-proxy, while clients have connections
// and make requests.
func takesOver(t *testing.T, c *cluster, pods ...*pod) {
	const node = 0
	n, agent := c.Balancers[node], c.Agents[node]
	s := c.createService(t, "takeover", func(s *core.Service) { s.Spec.Type = core.ServiceTypeNodePort })
	t.Cleanup(func() { c.deleteService(t, "takeover") })
	c.setEndpoints(t, "takeover", pods...)
	clients := func(port int) map[*lab.Host]netip.AddrPort {
		p := s.Spec.Ports[port]
		inside := netip.AddrPortFrom(netip.MustParseAddr(s.Spec.ClusterIP), uint16(p.Port))
		return map[*lab.Host]netip.AddrPort{
			n.Host: inside, pods[node].Host: inside, c.Clients[0].Host: netip.AddrPortFrom(n.V4, uint16(p.NodePort)),
		}
	}
	const http, echo = 0, 1
	serves := func(when string) {
		t.Helper()
		for from, to := range clients(http) {
			load := traffic.Load{URL: "http://" + to.String() + "/", Requests: 200}
			if err := traffic.From(from).Load(t.Context(), load).Err(); err != nil {
				t.Errorf("%s, from %s: %v", when, from, err)
			}
		}
	}
	connect := func() (all []*traffic.Conns) {
		for from, to := range clients(echo) {
			all = append(all, labtest.Connect(t, traffic.From(from), to, 5))
		}
		return all
	}
	proxy := func(command, want string) {
		t.Helper()
		out, err := agent.CLI(t.Context(), "proxy", command)
		if err != nil || !strings.Contains(out, want) {
			t.Errorf("steelyard proxy %s: %v\n%s\nwant %q", command, err, out, want)
		}
	}
	labtest.Until(t, "kube-proxy serves", func() error {
		load := traffic.Load{URL: "http://" + clients(http)[n.Host].String() + "/", Requests: 1}
		return traffic.From(n.Host).Load(t.Context(), load).Err()
	})
	older := connect()
	config := c.Config[node].TOML()
	kubeconfig := must.Get(n.ReadFile(kube.KubeconfigPath))(t)
	defer c.restartAgent(t, node, kubeconfig, config)
	c.restartAgent(t, node, kubeconfig, strings.Replace(config, `proxy = "auto"`, `proxy = "replace"`, 1))
	proxy("status", "theirs:")
	serves("before")
	proxy("take", "both:")
	serves("beside kube-proxy")
	if _, err := agent.CLI(t.Context(), "proxy", "take"); err == nil {
		t.Error("rules are removed while kube-proxy runs")
	}
	c.stopProxy(n)
	labtest.Until(t, "kube-proxy has stopped", func() error {
		_, err := agent.CLI(t.Context(), "proxy", "take")
		return err
	})
	serves("without kube-proxy")
	newer := connect()
	for _, all := range [][]*traffic.Conns{older, newer} {
		for _, conns := range all {
			labtest.Exchange(t, conns, "without kube-proxy")
		}
	}
	if _, err := agent.CLI(t.Context(), "proxy", "give-back"); err == nil {
		t.Error("the node is given back to nobody")
	}
	c.startProxy(t, n)
	labtest.Until(t, "kube-proxy has rules", func() error {
		_, err := agent.CLI(t.Context(), "proxy", "give-back")
		return err
	})
	serves("after giving back")
	for _, all := range [][]*traffic.Conns{older, newer} {
		for _, conns := range all {
			labtest.Exchange(t, conns, "after giving back")
			conns.Close()
		}
	}
	proxy("status", "drain:")
	labtest.Until(t, "the flows have ended", func() error {
		out, err := agent.CLI(t.Context(), "proxy", "status")
		return cmp.Or(err, labtest.ErrorIf(!strings.Contains(out, "theirs:"), "%s", out))
	})
	serves("with kube-proxy alone")
}
