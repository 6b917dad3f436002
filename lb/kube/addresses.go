package kube

import (
	"cmp"
	"net/netip"
	"slices"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// vipsOf returns the addresses of a Service that this node serves: those in its status, and those of its externalIPs
// that are in a pool for it. ExternalIPs work with every type of Service.
func (s *Source) vipsOf(service *core.Service) (vips, external []netip.Addr) {
	if matchesClass(service, s.o.Class) {
		vips = addressesOf(service)
	}
	for _, a := range externalIPsOf(service) {
		if p := poolOf(s.o.Pools, a); p != nil && p.serves(service) && !slices.Contains(vips, a) {
			vips, external = append(vips, a), append(external, a)
		}
	}
	return vips, external
}

// pooled sets the announcers of a service from its pool. An address in no pool is withheld, whoever assigned it.
func (s *Source) pooled(service *lb.Service) {
	if len(s.o.Pools) == 0 {
		return
	}
	for i, vip := range service.VIPs {
		p := poolOf(s.o.Pools, vip)
		switch {
		case p == nil:
			service.WithholdReason = cmp.Or(service.WithholdReason, vip.String()+" is in no pool")
		case i == 0:
			service.Announce = p.Announce
		}
	}
}

// shares reports whether another Service has an address of this one.
func (s *Source) shares(service *core.Service) bool {
	return len(s.sharing(service)) > 0
}

// touchSharing adds to the queue the Services that share an address with x, a Service before or after a change.
func (s *Source) touchSharing(x any) {
	if service, ok := x.(*core.Service); ok {
		for _, name := range s.sharing(service) {
			s.queue.Add(name)
		}
	}
}

// sharing returns the names of other Services that have an address of this one.
func (s *Source) sharing(service *core.Service) (names []string) {
	for _, a := range append(addressesOf(service), externalIPsOf(service)...) {
		found, _ := s.services.ByIndex(withAddress, a.String()) // the index exists
		for _, x := range found {
			if name := nameOf(x.(*core.Service)); name != nameOf(service) {
				names = append(names, name)
			}
		}
	}
	return names
}
