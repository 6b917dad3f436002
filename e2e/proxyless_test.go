package e2e

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
)

// proxyHealth: an agent that is the service proxy of its node answers as one at port 10256.
func (c *cluster) proxyHealth(t *testing.T, node int, vips []netip.Addr) {
	t.Helper()
	says := func(path string, status int, eligible any) func() error {
		return func() error {
			got, err := c.client().Get(t.Context(), fmt.Sprintf("http://%s%s", netip.AddrPortFrom(c.Balancers[node].V4, 10256), path))
			if err != nil {
				return err
			}
			var body map[string]any
			if err := json.Unmarshal([]byte(got.Body), &body); err != nil || got.Status != status || body["nodeEligible"] != eligible || body["healthy"] != true || body["lastUpdated"] == nil {
				return fmt.Errorf("%d %s (%v)", got.Status, got.Body, err)
			}
			return nil
		}
	}
	labtest.Until(t, 5*time.Second, "/healthz", says("/healthz", 200, true))
	labtest.Until(t, 5*time.Second, "/livez", says("/livez", 200, nil))
	c.patchNode(t, node, deletionTaint)
	labtest.Until(t, 5*time.Second, "/healthz of a node that goes", says("/healthz", 503, false))
	labtest.Until(t, 5*time.Second, "/livez of a node that goes", says("/livez", 200, nil))
	c.waitRouted(t, 5*time.Second, vips, 0, 1)
	c.patchNode(t, node, noTaint)
	labtest.Until(t, 5*time.Second, "/healthz of a node that stays", says("/healthz", 200, true))
	c.waitRouted(t, 5*time.Second, vips, 0, 1, 2)
}

// Where no service proxy answers at health check node ports, the agent does, and asks itself.
func TestKubernetesWithoutProxy(t *testing.T) {
	c := newCluster(t, "nat", false)
	a, b := c.startPod(t, "pod-a", 0), c.startPod(t, "pod-b", 1)
	vips := c.startService(t, "web", local, []int{0}, a)
	c.checkClientAddress(t, a)
	s, err := c.api.CoreV1().Services("default").Get(t.Context(), "web", meta.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	at := func(node int) string {
		return fmt.Sprintf("http://%s/", netip.AddrPortFrom(c.Balancers[node].V4, uint16(s.Spec.HealthCheckNodePort)))
	}
	says := func(node, status, endpoints int) func() error {
		return func() error {
			want := fmt.Sprintf("{\n\t\"service\": {\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t},\n\t\"localEndpoints\": %d,\n\t\"serviceProxyHealthy\": true\n}", endpoints)
			got, err := c.client().Get(t.Context(), at(node))
			if err == nil && (got.Status != status || got.Body != want) {
				err = fmt.Errorf("%d %s", got.Status, got.Body)
			}
			return err
		}
	}
	labtest.Until(t, 5*time.Second, "node 0 has an endpoint", says(0, 200, 1))
	labtest.Until(t, 5*time.Second, "node 1 has none", says(1, 503, 0))
	c.setEndpoints(t, "web", a, b)
	c.waitRouted(t, 10*time.Second, vips, 0, 1)
	labtest.Until(t, 5*time.Second, "node 1 has one", says(1, 200, 1))
	b.terminating = true
	c.setEndpoints(t, "web", a, b)
	c.waitRouted(t, 5*time.Second, vips, 0)
	labtest.Until(t, 5*time.Second, "one that terminates does not count", says(1, 503, 0))
	b.terminating = false
	d := c.startPod(t, "pod-d", 2)
	c.setEndpoints(t, "web", a, b, d)
	c.waitRouted(t, 10*time.Second, vips, 0, 1, 2)
	labtest.Until(t, 5*time.Second, "a node whose agent is the proxy answers, too", says(2, 200, 1))
	c.proxyHealth(t, 2, vips)
	c.updateService(t, "web", func(s *core.Service) { s.Spec.ExternalTrafficPolicy = core.ServiceExternalTrafficPolicyCluster })
	c.waitRouted(t, 10*time.Second, vips, 0, 1, 2)
	labtest.Until(t, 5*time.Second, "the port is closed", func() error {
		if _, err := c.client().Get(t.Context(), at(0)); err == nil {
			return errors.New("it answers")
		}
		return nil
	})
	c.waitAnswered(t, vips...)
}
