package cluster

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

var (
	vip4 = netip.MustParseAddr("203.0.113.10")
	vips = []netip.Addr{vip4, netip.MustParseAddr("2001:db8:1::10")}
)

// slow is an interval in which nodes respond that share two CPUs with all else.
const slow = 300 * time.Millisecond

// ofNodes is the service of an appliance for a Service of a cluster: its backends are the nodes. port is that of the
// check; 0: the default.
func ofNodes(s *core.Service, addrs []netip.Addr, nodes []lab.Node, port int32) lab.AgentService {
	out := lab.AgentService{Name: s.Name, Addresses: addrs, Backends: lab.Backends(nodes...), Check: lab.AgentCheck{
		Type: "health-check-node-port", Port: int(port), Interval: slow, Timeout: slow, Rise: 1, Fall: 8,
	}}
	for _, p := range s.Spec.Ports {
		text := fmt.Sprintf("%d:%d/%s", p.Port, p.NodePort, strings.ToLower(string(p.Protocol)))
		out.Ports = append(out.Ports, text)
	}
	return out
}

// TestApplianceInFrontOfACluster: a balancer without credentials for the cluster forwards to the nodes. It follows
// their health check node ports, and for a Service without one the health of their service proxy. Both are those of
// kube-proxy.
func TestApplianceInFrontOfACluster(t *testing.T) {
	c := startCluster(t, 4, "nat")
	nodes := c.Balancers[1:]
	for i := range nodes {
		c.join(t, i+1)
		c.register(t, i+1)
		c.startProxy(t, nodes[i])
	}
	// Three pods on the first node, one on the second, none on the third.
	pods := []*pod{c.startPod(t, "pod-a", 1), c.startPod(t, "pod-b", 1), c.startPod(t, "pod-c", 1),
		c.startPod(t, "pod-d", 2)}
	byLocal := c.createService(t, "local", local)
	byCluster := c.createService(t, "cluster", func(*core.Service) {})
	c.setEndpoints(t, "local", pods...)
	c.setEndpoints(t, "cluster", pods...)
	second := []netip.Addr{netip.MustParseAddr("203.0.113.20"), netip.MustParseAddr("2001:db8:1::20")}
	config := lab.BGPAgent(c.Balancers[0], labtest.ASN, labtest.RouterASN,
		ofNodes(byLocal, vips, nodes, byLocal.Spec.HealthCheckNodePort), ofNodes(byCluster, second, nodes, 0))
	config.Mode = "tc"
	a := labtest.Agent(t, c.Balancers[0].Host, binary, config)
	c.waitRouted(t, vips, 0)
	c.waitRouted(t, second, 0)
	// Waits until a line of "backends" has all of these words.
	backend := func(words ...string) {
		t.Helper()
		labtest.Until(t, 20*time.Second, strings.Join(words, " "), func() error {
			out, err := a.CLI(t.Context(), "backends")
			if err != nil {
				return err
			}
			for line := range strings.Lines(out) {
				found := true
				for _, w := range words {
					found = found && strings.Contains(line, w)
				}
				if found {
					return nil
				}
			}
			return fmt.Errorf("no such line in\n%s", out)
		})
	}
	on := func(node int) string { return nodes[node].V4.String() }
	backend("local ", on(0), "healthy", "HTTP 200, 3 endpoints")
	backend("local ", on(1), "healthy", "HTTP 200, 1 endpoints")
	backend("local ", on(2), "draining", "HTTP 503")
	for node := range nodes {
		backend("cluster ", on(node), "healthy", "HTTP 200")
	}
	c.waitAnswered(t, vips...)
	c.waitAnswered(t, second...)
	for _, vip := range vips { // each pod gets a quarter: the weight of a node is the number of its endpoints
		labtest.CheckEven(t, c.allAnswered(t, vip, 1600), 4)
	}
	if out, err := a.CLI(t.Context(), "status"); err != nil || !strings.HasPrefix(out, "OK") {
		t.Errorf("status: %v\n%s", err, out)
	}

	t.Run("a node drains", func(t *testing.T) {
		conns := labtest.Connect(t, c.Client(), netip.AddrPortFrom(vip4, 9000), 40)
		pods[3].terminating = true
		c.setEndpoints(t, "local", pods...)
		backend("local ", on(1), "draining", "HTTP 503")
		if r := c.allAnswered(t, vip4, 200); r.Servers["pod-d"] > 0 {
			t.Errorf("the node that drains got new requests: %s", r)
		}
		labtest.Exchange(t, conns, "while a node drains")
		pods[3].terminating = false
		c.setEndpoints(t, "local", pods...)
		backend("local ", on(1), "healthy", "HTTP 200, 1 endpoints")
		labtest.Exchange(t, conns, "after it")
	})
	t.Run("a node will be deleted", func(t *testing.T) {
		conns := labtest.Connect(t, c.Client(), netip.AddrPortFrom(second[0], 9000), 40)
		c.patchNode(t, 3, deletionTaint)
		backend("cluster ", on(2), "draining", "HTTP 503")
		labtest.Exchange(t, conns, "while it drains")
		c.allAnswered(t, second[0], 100)
		c.patchNode(t, 3, noTaint)
		backend("cluster ", on(2), "healthy", "HTTP 200")
	})
	t.Run("the service proxy of a node ends", func(t *testing.T) {
		c.stopProxy(nodes[0])
		backend("local ", on(0), "unhealthy", "connection refused")
		if r := c.allAnswered(t, vip4, 100); r.Servers["pod-d"] != 100 {
			t.Errorf("%s; want all by the other node", r)
		}
	})
	t.Run("no node has an endpoint", func(t *testing.T) {
		c.setEndpoints(t, "local")
		c.waitRouted(t, vips)
		c.waitRouted(t, second, 0)
	})
}
