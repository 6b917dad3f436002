package cluster

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// routeEvents: a Service has Events of the nodes that begin and cease to announce its addresses, and of no others.
func routeEvents(t *testing.T, c *cluster, pods ...*pod) {
	vips := c.startService(t, "events", local, []int{0}, pods[0])
	// The Events may be more than these, as when a session is lost for a moment, but only of these nodes.
	events := func(nodes int, want []string) {
		t.Helper()
		labtest.Until(t, 30*time.Second, strings.Join(want, "; "), func() error {
			of := meta.ListOptions{FieldSelector: "involvedObject.kind=Service,involvedObject.name=events"}
			list, err := c.api.CoreV1().Events("default").List(t.Context(), of)
			if err != nil {
				return err
			}
			var got []string
			for _, e := range list.Items {
				if e.Reason != "Announced" && e.Reason != "NotAnnounced" {
					continue
				}
				got = append(got, e.Type+" "+e.Message)
				for _, b := range c.Balancers[nodes:] {
					if e.Source.Host == b.Name() {
						return lab.Permanent(fmt.Errorf("%s has no endpoint: %s", b.Name(), e.Message))
					}
				}
			}
			for _, w := range want {
				if !slices.ContainsFunc(got, func(e string) bool { return strings.Contains(e, w) }) {
					return fmt.Errorf("events %q", got)
				}
			}
			return nil
		})
	}
	var want []string
	add := func(node int, text string, kind string) {
		for _, vip := range vips {
			want = append(want, fmt.Sprintf("%s %s %s from node %s", kind, vip, text, c.Balancers[node].Name()))
		}
	}
	add(0, "is announced", core.EventTypeNormal)
	events(1, want)
	c.setEndpoints(t, "events", pods[1])
	c.waitRouted(t, vips, 1)
	add(1, "is announced", core.EventTypeNormal)
	for _, vip := range vips {
		// The reason is that of the withdrawal: of the family whose slice changes first, that it has no backend.
		want = append(want, fmt.Sprintf(" %s is no longer announced from node %s: ", vip, c.Balancers[0].Name()))
	}
	events(2, want)
}
