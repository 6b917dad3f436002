package datapath

import (
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
)

// Flows to a backend that was removed while no agent ran end with the first plan, where the plan knows all backends.
func TestFlowsOfBackendsThatAreGoneEndAtAStart(t *testing.T) {
	each(t, func(t *testing.T, h hook, v6 bool) {
		fx := newFixture(t, h, v6, nil)
		for name, tt := range map[string]struct {
			kept func(at netip.AddrPort) []netip.AddrPort
			ends bool
		}{
			"removed":   {func(netip.AddrPort) []netip.AddrPort { return []netip.AddrPort{} }, true},
			"exists":    {func(at netip.AddrPort) []netip.AddrPort { return []netip.AddrPort{at} }, false},
			"not known": {func(netip.AddrPort) []netip.AddrPort { return nil }, false},
		} {
			fx.reset()
			fx.service(lb.UDP, "b1")
			fx.run(udp(fx).Frame())
			fx.reply(0)
			was := fx.last.Dst
			fx.close()
			fx.open()
			fx.serve(func(s *lb.Service) {
				s.Ports[0].Protocol, s.Ports[0].Kept = lb.UDP, tt.kept(was)
			}, "b2")
			if r := fx.run(udp(fx).Frame()); r.reason != "forwarded" || (r.out.Dst != was) != tt.ends {
				t.Errorf("%s: %s %s, to %s; it was at %s", name, r.did, r.reason, r.out.Dst, was)
			}
		}
	})
}
