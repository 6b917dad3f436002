package kube

import (
	"iter"
	"net/netip"
	"slices"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// withholdFamilies withholds the VIPs of each family that this node does not serve.
func (v *view) withholdFamilies() {
	for _, vip := range v.service.VIPs {
		family, ok := v.unserved[lb.FamilyOf(vip)]
		if !ok || v.service.WithholdReason != "" {
			continue
		}
		rule, ok := v.service.PerVIP[vip]
		if !ok {
			rule.Announce = v.service.Announce
		}
		if rule.WithholdReason == "" {
			rule.WithholdReason, rule.WithholdIntended = family.reason, family.intended
		}
		if v.service.PerVIP == nil {
			v.service.PerVIP = map[netip.Addr]lb.VIPRule{}
		}
		v.service.PerVIP[vip] = rule
	}
}

// spreads reports whether one node receives all of a Service's packets and spreads them although the policy is Local.
func (s *Source) spreads(service *core.Service, vips []netip.Addr) bool {
	if s.o.SpreadLocal == nil || !isLocal(service) || s.o.Forward != lb.MethodTunnel || len(vips) == 0 {
		return false
	}
	var announce []lb.AnnouncerKind
	if p := poolOf(s.o.Pools, vips[0]); p != nil {
		announce = p.Announce
	}
	return s.o.SpreadLocal(announce)
}

// shares reports whether another Service has an address of this one.
func (s *Source) shares(service *core.Service) bool {
	for range s.sharing(service) {
		return true
	}
	return false
}

// touchSharing queues the Services that share an address with x, a Service before or after a change, or have its
// ClusterIP in their status.
func (s *Source) touchSharing(x any) {
	if service, ok := x.(*core.Service); ok {
		for name := range s.sharing(service, service.Spec.ClusterIPs...) {
			s.queue.Add(name)
		}
	}
}

// sharing returns the names of other Services that have one of this Service's addresses or one of ips, once per shared
// address.
func (s *Source) sharing(service *core.Service, ips ...string) iter.Seq[string] {
	ips = slices.Clip(ips)
	for _, a := range append(addressesOf(service), externalIPsOf(service)...) {
		ips = append(ips, a.String())
	}
	return func(yield func(string) bool) {
		for _, ip := range ips {
			found, _ := s.services.ByIndex(withAddress, ip) // the index exists
			for _, x := range found {
				if name := nameOf(x.(*core.Service)); name != nameOf(service) && !yield(name) {
					return
				}
			}
		}
	}
}
