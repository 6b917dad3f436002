package e2e

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// Connections live as long as the pod that they are on, whatever happens to the nodes that they pass.
func TestKubernetesConnectionsLive(t *testing.T) {
	c := newCluster(t, "tunnel", true)
	var pods []*pod
	for i := range 3 {
		pods = append(pods, c.run(t, fmt.Sprintf("pod-%d", i), i))
	}
	more := c.run(t, "pod-more", 1)
	t.Run("the set of targets changes under load", func(t *testing.T) {
		vips := c.offer(t, "changes", func(*core.Service) {}, []int{0, 1, 2}, pods[0], pods[1])
		four, six := labtest.Connect(t, c.client(), netip.AddrPortFrom(vips[0], 9000), 150), labtest.Connect(t, c.client(), netip.AddrPortFrom(vips[1], 9000), 150)
		traffic := c.client().Traffic(t.Context(), url(vips[0]), 5*time.Millisecond, 2*time.Second)
		for _, set := range [][]*pod{{pods[0], pods[1], pods[2]}, {pods[0], pods[1], more}, {pods[0], pods[1], pods[2], more}, {pods[0], pods[1]}} {
			c.publish(t, "changes", set...)
			time.Sleep(500 * time.Millisecond)
			exchange(t, four, fmt.Sprintf("with %d pods", len(set)))
			exchange(t, six, fmt.Sprintf("with %d pods", len(set)))
		}
		traffic.Stop()
		if r := traffic.Between(time.Time{}, time.Time{}); r.Err() != nil {
			t.Errorf("%v", r.Err())
		}
	})
	t.Run("rolling update under load", func(t *testing.T) {
		vips := c.offer(t, "rolling", local, []int{0, 1}, pods[0], pods[1])
		next := []*pod{c.run(t, "next-0", 0), c.run(t, "next-1", 1)}
		done := make(chan error, 1)
		go func() {
			r := c.load(t, vips[0], 20_000)
			done <- r.Err()
		}()
		time.Sleep(300 * time.Millisecond)
		c.publish(t, "rolling", pods[0], pods[1], next[0], next[1])
		time.Sleep(500 * time.Millisecond)
		pods[0].leaving, pods[1].leaving = true, true
		c.publish(t, "rolling", pods[0], pods[1], next[0], next[1])
		time.Sleep(time.Second)
		c.publish(t, "rolling", next...)
		pods[0].leaving, pods[1].leaving = false, false
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Run("an ingress node is killed", func(t *testing.T) {
		vips := c.offer(t, "killed-node", func(*core.Service) {}, []int{0, 1, 2}, pods[1], pods[2])
		conns := labtest.Connect(t, c.client(), netip.AddrPortFrom(vips[0], 9000), 300)
		if err := c.Balancers[0].PowerOff(); err != nil { // it has no pod of the Service
			t.Fatal(err)
		}
		// Its sessions end when nothing is heard of it any more; until then the router sends packets to nobody.
		c.routed(t, 15*time.Second, vips, 1, 2)
		exchange(t, conns, "after the router has noticed")
	})
}
