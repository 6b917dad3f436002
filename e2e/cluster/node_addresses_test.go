package cluster

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// newNodesCluster creates a cluster of two nodes without kube-proxy and announcers, whose Services get the addresses of
// the nodes, with the configuration in the manifest.
func newNodesCluster(t *testing.T) *cluster {
	c := startCluster(t, 2, "tunnel")
	c.apply(t, "", "--pool", "node")
	m := must.Get(c.api.CoreV1().ConfigMaps("steelyard").Get(t.Context(), "steelyard", meta.GetOptions{}))(t)
	const section = "[kubernetes]\n"
	config := strings.Replace(m.Data["steelyard.toml"], section,
		section+fmt.Sprintf("kubeconfig = %q\n", kube.KubeconfigPath), 1)
	kubeconfig := c.kubeconfigOf(t, "steelyard")
	for i, b := range c.Balancers {
		c.join(t, i)
		c.register(t, i)
		c.setReady(t, i, core.ConditionTrue)
		a := lab.AgentConfig{
			Name: b.Name(), Address: b.V4, Interfaces: []string{"eth0"}, Mode: "tc", LogLevel: "debug",
			Env: []string{"POD_NAMESPACE=steelyard"}, Extra: config,
		}
		must.Do(t, b.WriteFile(kube.KubeconfigPath, kubeconfig, 0o600))
		c.Config = append(c.Config, a)
		if i == 0 {
			c.startAllocators(t)
		}
		c.Agents = append(c.Agents, labtest.Agent(t, b.Host, binary, a))
	}
	return c
}

// setReady sets the condition that the kubelet, or the controller manager without it, sets.
func (c *cluster) setReady(t *testing.T, node int, status core.ConditionStatus) {
	t.Helper()
	c.patchNode(t, node, fmt.Sprintf(`{"status":{"conditions":[{"type":"Ready","status":%q}]}}`, status), "status")
}

// TestNodeAddresses covers a pool of the nodes' own addresses: clients reach a Service at each node, and processes of
// the node at the others of its ports. A port that another Service or a process of the node has is refused. The address
// of a node that is no longer ready leaves the status.
func TestNodeAddresses(t *testing.T) {
	c := newNodesCluster(t)
	pods := []*pod{c.startPod(t, "pod-a", 0), c.startPod(t, "pod-b", 1)}
	first, second := c.Balancers[0], c.Balancers[1]
	create := func(name string, port int32, change func(*core.Service)) {
		c.createService(t, name, func(s *core.Service) {
			s.Spec.Ports = s.Spec.Ports[:1]
			s.Spec.Ports[0].Port = port
			change(s)
		})
		t.Cleanup(func() { c.deleteService(t, name) })
		c.setEndpoints(t, name, pods...)
	}
	has := func(name string, want ...netip.Addr) {
		t.Helper()
		labtest.Until(t, fmt.Sprintf("%s has %v", name, want), func() error {
			s, err := c.api.CoreV1().Services("default").Get(t.Context(), name, meta.GetOptions{})
			if err != nil {
				return err
			}
			var all []netip.Addr
			for _, i := range s.Status.LoadBalancer.Ingress {
				all = append(all, netip.MustParseAddr(i.IP))
			}
			return labtest.ErrorIf(!slices.Equal(all, want), "it has %v", all)
		})
	}
	// answers waits until requests to a port are answered by exactly these servers.
	answers := func(from *lab.Host, at netip.Addr, port uint16, servers ...string) {
		t.Helper()
		to := netip.AddrPortFrom(at, port)
		labtest.Until(t, fmt.Sprintf("%s answers %s", to, from.Name()), func() error {
			r := traffic.From(from).Load(t.Context(), traffic.Load{URL: "http://" + to.String() + "/", Requests: 60})
			for _, s := range servers {
				if r.Servers[s] == 0 {
					return fmt.Errorf("%s: %s", s, r)
				}
			}
			return labtest.ErrorIf(r.Err() != nil || len(r.Servers) != len(servers), "%s", r)
		})
	}
	all := []netip.Addr{first.V4, second.V4, first.V6, second.V6}
	same := func(*core.Service) {}
	create("web", 80, same)
	has("web", all...)
	labtest.HTTP(t, first, 8081) // such as sshd or the API server
	for _, at := range all {
		answers(c.Clients[0].Host, at, 80, "pod-a", "pod-b")
	}
	answers(first.Host, first.V4, 80, "pod-a", "pod-b")
	answers(pods[0].Host, second.V4, 80, "pod-a", "pod-b")
	answers(c.Clients[0].Host, first.V4, 8081, first.Name())

	// A port of a process stays its own on that node, and is the Service's on the other one.
	create("used", 8081, same)
	has("used", all...)
	c.waitSaid(t, "used", "PortInUse", "8081/TCP")
	answers(c.Clients[0].Host, second.V4, 8081, "pod-a", "pod-b")
	for _, from := range []*lab.Host{c.Clients[0].Host, second.Host, pods[0].Host, pods[1].Host} {
		answers(from, first.V4, 8081, first.Name())
	}
	out, _ := c.Agents[0].CLI(t.Context(), "status")
	must.True(t, strings.Contains(out, "does not serve port 8081/TCP: a process of the node listens on"), "%s", out)

	create("late", 80, same)
	c.waitSaid(t, "late", "PortInUse", "port 80/TCP of the nodes belongs to default/web")
	has("late")

	create("local", 82, local)
	has("local", all...)
	c.setEndpoints(t, "local", pods[1])
	has("local", second.V4, second.V6)
	answers(c.Clients[0].Host, second.V4, 82, "pod-b")

	c.setReady(t, 1, core.ConditionFalse)
	has("web", first.V4, first.V6)
	c.setReady(t, 1, core.ConditionTrue)
	has("web", all...)
	c.deleteService(t, "web")
	has("late", all...)
	must.Do(t, c.api.CoreV1().Nodes().Delete(t.Context(), second.Name(), meta.DeleteOptions{}))
	has("late", first.V4, first.V6)
	answers(c.Clients[0].Host, first.V4, 80, "pod-a", "pod-b")
}
