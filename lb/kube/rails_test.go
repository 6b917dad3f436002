package kube

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// Whatever is written to Services, no address outside of the pools is served, none in spec.externalIPs without leave
// of its pool, and each by the announcers of its pool.
func TestRails(t *testing.T) {
	rng := rand.New(rand.NewPCG(12, 12))
	address := func() string {
		switch rng.IntN(8) {
		case 0:
			return fmt.Sprintf("2001:db8::%x", rng.IntN(8))
		case 1:
			odd := []string{"0.0.0.0", "::", "127.0.0.1", "fe80::1", "224.0.0.1", "::ffff:203.0.113.2", "x", ""}
			return odd[rng.IntN(len(odd))]
		}
		return fmt.Sprintf("203.0.113.%d", rng.IntN(16))
	}
	inside, outside := 0, 0
	for range 2000 {
		pool := func(name, from, to string, by ...lb.AnnouncerKind) Pool {
			r := lb.AddrRange{From: netip.MustParseAddr(from), To: netip.MustParseAddr(to)}
			return Pool{
				Pool:        lb.Pool{Name: name, AutoAssign: true, Ranges: []lb.AddrRange{r}, Announce: by},
				ExternalIPs: rng.IntN(2) == 0,
			}
		}
		pools := []Pool{
			pool("bgp", "203.0.113.4", "203.0.113.7", lb.AnnounceBGP),
			pool("l2", "203.0.113.8", "203.0.113.9", lb.AnnounceL2),
			pool("six", "2001:db8::1", "2001:db8::3"),
		}
		f := newFixture(t, func(o *Options) { o.Pools = pools })
		f.have(t, node("n1", "192.0.2.1"))
		var names []string
		for n := range 1 + rng.IntN(4) {
			s := aService(func(s *core.Service) {
				s.Name, s.Status = fmt.Sprintf("s%d", n), core.ServiceStatus{}
				s.Spec.Type = []core.ServiceType{
					core.ServiceTypeLoadBalancer, core.ServiceTypeClusterIP, core.ServiceTypeNodePort,
				}[rng.IntN(3)]
				for range rng.IntN(4) {
					ingress := core.LoadBalancerIngress{IP: address()}
					s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, ingress)
				}
				for range rng.IntN(3) {
					s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, address())
				}
				s.Spec.LoadBalancerIP = address()
				s.Annotations = map[string]string{wantAddresses[0]: address(), perNode[0]: "true", wantShare[0]: "x"}
			})
			f.have(t, s)
			names = append(names, nameOf(s))
		}
		for _, name := range names {
			f.reconcile(name, fakeSink{f.recorded})
		}
		for _, name := range names {
			served := f.put[name]
			if served == nil {
				continue
			}
			x, _, _ := f.services.GetByKey(name)
			inStatus := addressesOf(x.(*core.Service))
			for _, vip := range served.VIPs {
				rule, known := served.PerVIP[vip]
				if !known {
					rule.Announce = served.Announce
				}
				switch p := poolOf(pools, vip); {
				case p == nil:
					t.Fatalf("%s serves %s, which is in no pool", name, vip)
				case !slices.Equal(rule.Announce, p.Announce):
					t.Fatalf("%s announces %s by %v", name, vip, rule.Announce)
				case !slices.Contains(inStatus, vip) && !p.ExternalIPs:
					t.Fatalf("%s announces %s of spec.externalIPs", name, vip)
				default:
					inside++
				}
			}
			for _, r := range served.Refused {
				if poolOf(pools, r.VIP) == nil {
					outside++
				}
			}
		}
	}
	if inside < 1000 || outside < 1000 {
		t.Errorf("%d addresses inside of pools, and %d outside", inside, outside)
	}
}
