package e2e

import (
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// A Local service is announced from the nodes that have a ready endpoint, and from them only; its pods see the client.
func TestKubernetesLocal(t *testing.T) {
	c := newCluster(t)
	c.service(t, "web", local)
	vips := c.addresses(t, "web")
	a, b := c.run(t, "pod-a", 0), c.run(t, "pod-b", 1)
	c.publish(t, "web", a, b)
	c.routed(t, 30*time.Second, vips, 0, 1)
	for _, vip := range vips {
		if r := c.load(t, vip, 300); r.Err() != nil || len(r.Servers) != 2 {
			t.Errorf("%s: %s, %v", vip, r, r.Err())
		}
	}
	c.sawTheClient(t, a, b)

	moved := c.run(t, "pod-c", 2)
	c.publish(t, "web", a, moved)
	took := c.routed(t, 5*time.Second, vips, 0, 2)
	t.Logf("the routes had moved %s after the endpoints", took)
	if took > probeBound+time.Second {
		t.Errorf("the routes moved after %s", took)
	}
	for _, vip := range vips {
		labtest.Until(t, 5*time.Second, "requests are answered", func() error { return c.load(t, vip, 100).Err() })
	}
	c.sawTheClient(t, a, moved)
}
