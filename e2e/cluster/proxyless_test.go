package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// proxyHealth: an agent that is the service proxy of its node serves /healthz and /livez on port 10256, as kube-proxy
// does.
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
	labtest.Until(t, 5*time.Second, "/healthz", answers("/healthz", 200, true))
	labtest.Until(t, 5*time.Second, "/livez", answers("/livez", 200, nil))
	c.patchNode(t, node, deletionTaint)
	labtest.Until(t, 5*time.Second, "/healthz of a node that will be deleted", answers("/healthz", 503, false))
	labtest.Until(t, 5*time.Second, "/livez of a node that will be deleted", answers("/livez", 200, nil))
	c.waitRouted(t, vips, 0, 1)
	c.patchNode(t, node, noTaint)
	labtest.Until(t, 5*time.Second, "/healthz of a node without the taint", answers("/healthz", 200, true))
	c.waitRouted(t, vips, 0, 1, 2)
}

// nodePortAnswer is the body that kube-proxy sends on a health check node port
// (pkg/proxy/healthcheck/service_health.go).
const nodePortAnswer = `{
	"service": {
		"namespace": "default",
		"name": "web"
	},
	"localEndpoints": %d,
	"serviceProxyHealthy": true
}`

// TestKubernetesWithoutProxy: without a service proxy the agent serves the health check node ports, and its own probes
// use them.
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
	labtest.Until(t, 5*time.Second, "node 0 has an endpoint", answers(0, 200, 1))
	labtest.Until(t, 5*time.Second, "node 1 has none", answers(1, 503, 0))
	c.setEndpoints(t, "web", a, b)
	c.waitRouted(t, vips, 0, 1)
	labtest.Until(t, 5*time.Second, "node 1 has one", answers(1, 200, 1))
	b.terminating = true
	c.setEndpoints(t, "web", a, b)
	c.waitRouted(t, vips, 0)
	labtest.Until(t, 5*time.Second, "a terminating endpoint does not count", answers(1, 503, 0))
	b.terminating = false
	d := c.startPod(t, "pod-d", 2)
	c.setEndpoints(t, "web", a, b, d)
	c.waitRouted(t, vips, 0, 1, 2)
	labtest.Until(t, 5*time.Second, "a node whose agent is the service proxy responds, too", answers(2, 200, 1))
	c.proxyHealth(t, 2, vips)
	c.updateService(t, "web", func(s *core.Service) {
		s.Spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyCluster
	})
	c.waitRouted(t, vips, 0, 1, 2)
	labtest.Until(t, 5*time.Second, "the port is closed", func() error {
		_, err := c.Client().Get(t.Context(), at(0))
		return labtest.ErrorIf(err == nil, "it responds")
	})
	c.waitAnswered(t, vips...)
}
