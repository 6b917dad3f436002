package cluster

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// TestAddressPerNodeOfACluster: a Service with the annotation gets an address of each family per node, on different
// nodes, and one again without it.
func TestAddressPerNodeOfACluster(t *testing.T) {
	t.Parallel()
	s := newSegmentCluster(t)
	before := s.m.VIPs
	annotate := func(value string) {
		t.Helper()
		api := s.api.CoreV1().Services("default")
		labtest.Until(t, 10*time.Second, "the Service is changed", func() error {
			service, err := api.Get(t.Context(), "first", meta.GetOptions{})
			if err != nil {
				return err
			}
			service.Annotations = map[string]string{"steelyard.dev/address-per-node": value}
			_, err = api.Update(t.Context(), service, meta.UpdateOptions{})
			return err
		})
	}
	wait := func(n int) (vips []netip.Addr) {
		t.Helper()
		labtest.Until(t, 30*time.Second, fmt.Sprintf("the Service has %d addresses", n), func() error {
			service, err := s.api.CoreV1().Services("default").Get(t.Context(), "first", meta.GetOptions{})
			if err != nil {
				return err
			}
			vips = nil
			for _, i := range service.Status.LoadBalancer.Ingress {
				vips = append(vips, netip.MustParseAddr(i.IP))
			}
			if len(vips) != n {
				return fmt.Errorf("it has %v", vips)
			}
			return nil
		})
		return vips
	}
	annotate("true")
	s.m.VIPs = wait(2 * len(s.Agents))
	if !slices.Equal(s.m.VIPs[:2], before[:2]) {
		t.Errorf("addresses %v; want those of before first: %v", s.m.VIPs, before[:2])
	}
	second := before[2:]
	s.deleteService(t, "second")
	s.m.Apart(t, s.Agents...)
	s.waitAnswered(t, s.m.VIPs...)
	annotate("false")
	if got := wait(2); !slices.Equal(got, before[:2]) {
		t.Errorf("addresses %v; want %v", got, before[:2])
	}
	s.m.VIPs = before[:2]
	s.createService(t, "second", func(*core.Service) {})
	if got := s.waitAddresses(t, "second"); len(got) != len(second) {
		t.Errorf("addresses of the other Service: %v", got)
	}
}
