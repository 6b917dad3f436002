package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	coordination "k8s.io/api/coordination/v1"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

var (
	vip4 = netip.MustParseAddr("203.0.113.10")
	vips = []netip.Addr{vip4, netip.MustParseAddr("2001:db8:1::10")}
)

// slow is a check interval for nodes that share two CPUs with everything else.
const slow = 300 * time.Millisecond

// ofNodes returns an appliance's service for a cluster's Service. Its backends are the nodes. port is the check's port,
// or 0 for the default.
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

// TestApplianceInFrontOfACluster covers a load balancer without credentials for the cluster that forwards to the nodes.
// It follows their health check node ports, or for a Service without one, the health of their service proxy. kube-proxy
// serves both.
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
	// Wait until a line of "backends" contains all of these words.
	backend := func(words ...string) {
		t.Helper()
		labtest.Until(t, strings.Join(words, " "), func() error {
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
	for _, vip := range vips { // each pod gets a quarter, because a node's weight is its number of endpoints
		labtest.CheckEven(t, c.allAnswered(t, vip, 1600), 4)
	}
	status := must.Get(a.CLI(t.Context(), "status"))(t)
	must.True(t, strings.HasPrefix(status, "OK"), "status:\n%s", status)

	t.Run("a node drains", func(t *testing.T) {
		conns := labtest.Connect(t, c.Client(), netip.AddrPortFrom(vip4, 9000), 40)
		pods[3].terminating = true
		c.setEndpoints(t, "local", pods...)
		backend("local ", on(1), "draining", "HTTP 503")
		r := c.allAnswered(t, vip4, 200)
		must.True(t, r.Servers["pod-d"] == 0, "the node that drains got new requests: %s", r)
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
		r := c.allAnswered(t, vip4, 100)
		must.True(t, r.Servers["pod-d"] == 100, "%s; want all by the other node", r)
	})
	t.Run("no node has an endpoint", func(t *testing.T) {
		c.setEndpoints(t, "local")
		c.waitRouted(t, vips)
		c.waitRouted(t, second, 0)
	})
}

// proxyHealth checks that an agent that is its node's service proxy serves /healthz and /livez on port 10256, like
// kube-proxy.
func (c *cluster) proxyHealth(t *testing.T, node int, vips []netip.Addr) {
	t.Helper()
	answers := func(path string, status int, eligible any) func() error {
		return func() error {
			at := netip.AddrPortFrom(c.Balancers[node].V4, 10256)
			got, err := c.Client().Get(t.Context(), fmt.Sprintf("http://%s%s", at, path))
			if err != nil {
				return err
			}
			var body map[string]any
			err = json.Unmarshal([]byte(got.Body), &body)
			healthy := body["healthy"] == true && body["lastUpdated"] != nil
			return labtest.ErrorIf(err != nil || got.Status != status || body["nodeEligible"] != eligible || !healthy,
				"%d %s (%v)", got.Status, got.Body, err)
		}
	}
	labtest.Until(t, "/healthz", answers("/healthz", 200, true))
	labtest.Until(t, "/livez", answers("/livez", 200, nil))
	c.patchNode(t, node, deletionTaint)
	labtest.Until(t, "/healthz of a node that will be deleted", answers("/healthz", 503, false))
	labtest.Until(t, "/livez of a node that will be deleted", answers("/livez", 200, nil))
	c.waitRouted(t, vips, 0, 1)
	c.patchNode(t, node, noTaint)
	labtest.Until(t, "/healthz of a node without the taint", answers("/healthz", 200, true))
	c.waitRouted(t, vips, 0, 1, 2)
}

// nodePortAnswer is kube-proxy's response on a health check node port (pkg/proxy/healthcheck/service_health.go).
const nodePortAnswer = `{
	"service": {
		"namespace": "default",
		"name": "web"
	},
	"localEndpoints": %d,
	"serviceProxyHealthy": true
}`

// TestKubernetesWithoutProxy checks that without a service proxy, the agent serves the health check node ports, and its
// own probes use them.
func TestKubernetesWithoutProxy(t *testing.T) {
	c := newCluster(t, "nat", false)
	a, b := c.startPod(t, "pod-a", 0), c.startPod(t, "pod-b", 1)
	vips := c.startService(t, "web", local, []int{0}, a)
	c.checkClientAddress(t, a)
	s := must.Get(c.api.CoreV1().Services("default").Get(t.Context(), "web", meta.GetOptions{}))(t)
	at := func(node int) string {
		return fmt.Sprintf("http://%s/", netip.AddrPortFrom(c.Balancers[node].V4, uint16(s.Spec.HealthCheckNodePort)))
	}
	answers := func(node, status, endpoints int) func() error {
		return func() error {
			want := fmt.Sprintf(nodePortAnswer, endpoints)
			got, err := c.Client().Get(t.Context(), at(node))
			return errors.Join(err, labtest.ErrorIf(got.Status != status || got.Body != want,
				"%d %s", got.Status, got.Body))
		}
	}
	labtest.Until(t, "node 0 has an endpoint", answers(0, 200, 1))
	labtest.Until(t, "node 1 has none", answers(1, 503, 0))
	c.setEndpoints(t, "web", a, b)
	c.waitRouted(t, vips, 0, 1)
	labtest.Until(t, "node 1 has one", answers(1, 200, 1))
	b.terminating = true
	c.setEndpoints(t, "web", a, b)
	c.waitRouted(t, vips, 0)
	labtest.Until(t, "a terminating endpoint does not count", answers(1, 503, 0))
	b.terminating = false
	d := c.startPod(t, "pod-d", 2)
	c.setEndpoints(t, "web", a, b, d)
	c.waitRouted(t, vips, 0, 1, 2)
	labtest.Until(t, "a node whose agent is the service proxy also responds", answers(2, 200, 1))
	c.proxyHealth(t, 2, vips)
	c.proxyMetrics(t, 2, 0)
	s = must.Get(c.api.CoreV1().Services("default").Get(t.Context(), "web", meta.GetOptions{}))(t)
	c.proxyExplains(t, 2, s)
	c.proxyTraces(t, 2, s, d, vips[0])
	c.updateService(t, "web", func(s *core.Service) {
		s.Spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyCluster
	})
	c.waitRouted(t, vips, 0, 1, 2)
	labtest.Until(t, "the port is closed", func() error {
		_, err := c.Client().Get(t.Context(), at(0))
		return labtest.ErrorIf(err == nil, "it responds")
	})
	c.waitAnswered(t, vips...)
	sourceRules(t, c, a, b, d)
}

// rights checks that an attacker who takes over a node can read Services and endpoints, but can change neither their
// addresses nor anything else in the cluster. An attacker who takes over the allocator cannot change where a Service
// sends traffic.
func rights(t *testing.T, c *cluster, _ ...*pod) {
	c.createService(t, "rights", func(*core.Service) {})
	t.Cleanup(func() { c.deleteService(t, "rights") })
	c.waitAddresses(t, "rights")
	dry, merge := meta.PatchOptions{DryRun: []string{meta.DryRunAll}}, types.MergePatchType
	patchService := func(api kubernetes.Interface, sub ...string) error {
		_, err := api.CoreV1().Services("default").Patch(t.Context(), "rights", merge, []byte(`{}`), dry, sub...)
		return err
	}
	requests := []struct {
		name            string
		node, allocator bool // whether permitted
		send            func(api kubernetes.Interface) error
	}{
		{"list Services", true, true, func(api kubernetes.Interface) error {
			_, err := api.CoreV1().Services("").List(t.Context(), meta.ListOptions{})
			return err
		}},
		{"patch the status of a Service", false, true, func(api kubernetes.Interface) error {
			return patchService(api, "status")
		}},
		{"patch a Service", false, false, func(api kubernetes.Interface) error { return patchService(api) }},
		{"patch a Node", false, false, func(api kubernetes.Interface) error {
			_, err := api.CoreV1().Nodes().Patch(t.Context(), c.Balancers[0].Name(), merge, []byte(`{}`), dry)
			return err
		}},
		{"read the keys of the tunnels", true, true, func(api kubernetes.Interface) error {
			_, err := api.CoreV1().Secrets("steelyard").Get(t.Context(), "steelyard-tunnel-keys", meta.GetOptions{})
			return err
		}},
		{"change the keys of the tunnels", false, false, func(api kubernetes.Interface) error { // only by update
			secrets := api.CoreV1().Secrets("steelyard")
			_, err := secrets.Patch(t.Context(), "steelyard-tunnel-keys", merge, []byte(`{}`), dry)
			return err
		}},
		{"create a Secret", false, false, func(api kubernetes.Interface) error { // it could be another account's token
			secret := &core.Secret{ObjectMeta: meta.ObjectMeta{Name: "token"}}
			_, err := api.CoreV1().Secrets("steelyard").Create(t.Context(), secret,
				meta.CreateOptions{DryRun: []string{meta.DryRunAll}})
			return err
		}},
		{"list Secrets", false, false, func(api kubernetes.Interface) error {
			_, err := api.CoreV1().Secrets("").List(t.Context(), meta.ListOptions{})
			return err
		}},
		{"change the configuration of the nodes", false, false, func(api kubernetes.Interface) error {
			m := &core.ConfigMap{ObjectMeta: meta.ObjectMeta{Name: "steelyard"}}
			_, err := api.CoreV1().ConfigMaps("steelyard").Update(t.Context(), m,
				meta.UpdateOptions{DryRun: []string{meta.DryRunAll}})
			return err
		}},
		{"create a Lease", false, true, func(api kubernetes.Interface) error {
			_, err := api.CoordinationV1().Leases("steelyard").Create(t.Context(),
				&coordination.Lease{ObjectMeta: meta.ObjectMeta{Name: "test"}},
				meta.CreateOptions{DryRun: []string{meta.DryRunAll}})
			return err
		}},
		{"patch an EndpointSlice", false, false, func(api kubernetes.Interface) error {
			_, err := api.DiscoveryV1().EndpointSlices("default").Patch(t.Context(), "x", merge, []byte(`{}`), dry)
			return err
		}},
	}
	for _, account := range []string{"steelyard", "steelyard-allocator"} {
		api := c.apiOf(t, account)
		for _, r := range requests {
			permitted := r.node
			if account == "steelyard-allocator" {
				permitted = r.allocator
			}
			switch err := r.send(api); {
			case permitted && err != nil:
				t.Errorf("%s: %s: %v", account, r.name, err)
			case !permitted && !apierrors.IsForbidden(err):
				t.Errorf("%s: %s: error %v; want forbidden", account, r.name, err)
			}
		}
	}
}
