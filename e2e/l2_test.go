package e2e

import (
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// TestAnnouncesByARPAndNDP: without BGP, neighbours on the segment resolve the VIPs by ARP and NDP.
func TestAnnouncesByARPAndNDP(t *testing.T) {
	for _, mode := range []string{"tc", "xdp"} {
		t.Run(mode, func(t *testing.T) {
			links := lab.LinkOptions{SoftwareChecksums: mode == "xdp"}
			topology := labtest.Topology(t, lab.Shape{Clients: 1, Servers: 3, Links: links})
			s := &site{Topology: topology}
			for _, n := range s.Servers {
				s.web = append(s.web, labtest.HTTP(t, n, 8080))
			}
			// The prefixes of the VIPs are on the segment, so that the router resolves the VIPs there.
			for _, p := range []string{"203.0.113.1/24", "2001:db8:1::1/64"} {
				if err := topology.Router.AddAddress("segment", netip.MustParsePrefix(p)); err != nil {
					t.Fatal(err)
				}
			}
			b := topology.Balancers[0]
			c := lab.AgentConfig{
				Name: "lb1", Address: b.V4, Interfaces: []string{"eth0"}, Mode: mode,
				L2: []string{"eth0"}, Services: s.services(3),
			}
			a := labtest.Agent(t, b.Host, binary, c)
			for _, vip := range vips {
				labtest.Until(t, 15*time.Second, "the VIP replies to ping", func() error {
					return s.client().Ping(t.Context(), vip)
				})
				r := s.load(t, vip, 1000)
				if r.Err() != nil {
					t.Fatal(r.Err())
				}
				checkEven(t, r, 3)
			}
			if err := a.Terminate(t.Context(), 10*time.Second); err != nil {
				t.Fatal(err)
			}
		})
	}
}
