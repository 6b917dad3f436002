package e2e

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// An uplink that is taken out and put back, as when a driver is loaded anew, is used again.
func TestInterfaceComesBack(t *testing.T) {
	for _, mode := range []string{"tc", "xdp"} {
		t.Run(mode, func(t *testing.T) {
			s := newSite(t, lab.BIRD, mode, 1, 3)
			balancer, router := s.Balancers[0], s.Topology.Router
			s.answered(t, 20)
			if out, err := balancer.Run(t.Context(), "ip", "link", "delete", "eth0"); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			attached := func(want string) func() error {
				return func() error {
					out, err := s.agents[0].CLI(t.Context(), "status")
					if err == nil && !strings.Contains(out, want) {
						err = errors.New(out)
					}
					return err
				}
			}
			labtest.Until(t, 5*time.Second, "status tells that it is gone", attached("gone"))
			on := func(a netip.Addr, bits int) netip.Prefix { return netip.PrefixFrom(a, bits) }
			err := s.Link(
				lab.End{Host: balancer.Host, Name: "eth0", Addresses: []netip.Prefix{on(balancer.V4, 30), on(balancer.V6, 64)}},
				lab.End{Host: router, Name: balancer.Port, Addresses: []netip.Prefix{on(balancer.Gateway4, 30), on(balancer.Gateway6, 64)}},
				lab.LinkOptions{SoftwareChecksums: mode == "xdp"})
			if err := errors.Join(err, balancer.AddRoute(lab.Default, balancer.Gateway4), balancer.AddRoute(lab.Default6, balancer.Gateway6)); err != nil {
				t.Fatal(err)
			}
			labtest.Until(t, 5*time.Second, "it is attached again", attached(mode+" (tcx)"))
			s.waitRoutes(t, 60*time.Second, s.Balancers...)
			s.settles(t)
		})
	}
}
