package cluster

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// stolenAddress: anybody who can create a Service can write any address into its externalIPs.
func stolenAddress(t *testing.T, c *cluster, pods ...*pod) {
	c.createService(t, "thief-before", func(s *core.Service) {
		s.Spec.Type, s.Spec.ExternalIPs = core.ServiceTypeClusterIP, []string{"203.0.113.210"}
	})
	t.Cleanup(func() { c.deleteService(t, "thief-before") })
	c.setEndpoints(t, "thief-before", pods[1])
	vips := c.startService(t, "victim", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	c.createService(t, "thief", func(s *core.Service) {
		s.Spec.Type, s.Spec.ExternalIPs = core.ServiceTypeClusterIP, texts(vips)
	})
	t.Cleanup(func() { c.deleteService(t, "thief") })
	c.setEndpoints(t, "thief", pods[1])
	c.updateService(t, "thief-before", func(s *core.Service) { s.Spec.ExternalIPs = texts(vips) })
	c.updateService(t, "victim", func(s *core.Service) { s.Labels = map[string]string{"changed": "yes"} })
	for _, a := range c.Agents {
		labtest.Until(t, 5*time.Second, "the thieves are refused", func() error {
			out, err := a.CLI(t.Context(), "services")
			if n := strings.Count(out, "belongs to default/victim"); err == nil && n < 2 {
				err = fmt.Errorf("%d refused:\n%s", n, out)
			}
			return err
		})
	}
	for _, vip := range vips {
		if r := c.allAnswered(t, vip, 60); r.Servers[pods[0].name] != 60 {
			t.Errorf("%s: %s; want all from the pod of the victim", vip, r)
		}
	}
	if again := c.waitAddresses(t, "victim"); !slices.Equal(again, vips) {
		t.Errorf("the victim had %v and has %v", vips, again)
	}
}

func texts(addrs []netip.Addr) (list []string) {
	for _, a := range addrs {
		list = append(list, a.String())
	}
	return list
}

// foreignStatus: what another controller or an administrator writes into the status is adopted or left alone, and never
// written over.
func foreignStatus(t *testing.T, c *cluster, pods ...*pod) {
	c.startService(t, "foreign", func(*core.Service) {}, []int{0, 1, 2}, pods[0])
	api := c.api.CoreV1().Services("default")
	write := func(ips ...string) *core.Service {
		var s *core.Service
		labtest.Until(t, 5*time.Second, "the status is written", func() (err error) {
			if s, err = api.Get(t.Context(), "foreign", meta.GetOptions{}); err != nil {
				return err
			}
			s.Status.LoadBalancer.Ingress = nil
			for _, ip := range ips {
				s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, core.LoadBalancerIngress{IP: ip})
			}
			s, err = api.UpdateStatus(t.Context(), s, meta.UpdateOptions{FieldManager: "other"})
			return err
		})
		return s
	}
	written := write("192.0.2.77", "2001:db8:77::1")
	labtest.Until(t, 10*time.Second, "an Event says whose the address is", func() error {
		of := meta.ListOptions{FieldSelector: "involvedObject.name=foreign,reason=ForeignAddress"}
		list, err := c.api.CoreV1().Events("default").List(t.Context(), of)
		if err == nil && (len(list.Items) == 0 || !strings.Contains(list.Items[0].Message, "was written by other")) {
			err = fmt.Errorf("%+v", list.Items)
		}
		return err
	})
	now, err := api.Get(t.Context(), "foreign", meta.GetOptions{})
	if err != nil || now.ResourceVersion != written.ResourceVersion {
		t.Errorf("%v; the Service was written again: %+v", err, now.Status)
	}
	// Restored from a backup: addresses of the pool that are free are served.
	restored := []netip.Addr{netip.MustParseAddr("203.0.113.222"), netip.MustParseAddr("2001:db8:1::222")}
	write(texts(restored)...)
	c.waitRouted(t, restored, 0, 1, 2)
	c.waitAnswered(t, restored...)
	// Without an address the Service gets one again.
	write()
	labtest.Until(t, 10*time.Second, "addresses are assigned again", func() error {
		s, err := api.Get(t.Context(), "foreign", meta.GetOptions{})
		if err == nil && len(s.Status.LoadBalancer.Ingress) != 2 {
			err = fmt.Errorf("%+v", s.Status)
		}
		return err
	})
}
