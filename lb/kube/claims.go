package kube

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// Two Services can have one address without permission to share it: anybody may write any address into the
// spec.externalIPs of a Service of theirs, and statuses can be written by others than us. All nodes must then serve the
// same one, whatever they saw first, so the rule uses only what is in the objects.

// claim is an address in the status or in the externalIPs of a Service.
type claim struct {
	service  *core.Service
	external bool // only in the externalIPs
	holder   lb.Holder
}

func newClaim(s *core.Service, external bool) claim { return claim{s, external, holder(s)} }

// compareClaims orders claims of one address: those in a status first, then of Services that share it as was agreed
// the last one, then the older Service, then the lower UID.
func compareClaims(a, b claim) int {
	return cmp.Or(
		compareBool(a.external, b.external),
		cmp.Compare(b.holder.Agreed, a.holder.Agreed),
		a.service.CreationTimestamp.Compare(b.service.CreationTimestamp.Time),
		strings.Compare(string(a.service.UID), string(b.service.UID)),
		strings.Compare(nameOf(a.service), nameOf(b.service)),
	)
}

// canShare reports whether two Services may have one address: they have the same key and no port in common. The
// allocator has decided about addresses in statuses, so these need no key.
func (c claim) canShare(d claim) bool {
	a, b := c.holder, d.holder
	if (c.external || d.external) && (a.ShareKey == "" || a.ShareKey != b.ShareKey) {
		return false
	}
	for _, p := range a.Ports {
		if slices.ContainsFunc(b.Ports, p.Overlaps) {
			return false
		}
	}
	return true
}

// claimOf returns the claim of a Service for an address; false: it has none. A status counts only if nodes serve it:
// controllers of other classes may write any address. An address of its externalIPs counts only if a pool permits it.
func (s *Source) claimOf(service *core.Service, addr netip.Addr) (claim, bool) {
	if matchesClass(service, s.o.Class) && slices.Contains(addressesOf(service), addr) {
		return newClaim(service, false), true
	}
	if !slices.Contains(externalIPsOf(service), addr) || !permitsExternal(s.o.Pools, service, addr) {
		return claim{}, false
	}
	return newClaim(service, true), true
}

// permitsExternal reports whether a Service may have addr as one of its externalIPs.
func permitsExternal(pools []Pool, service *core.Service, addr netip.Addr) bool {
	p := poolOf(pools, addr)
	return p != nil && p.ExternalIPs && p.serves(service)
}

// owner returns the Service that has an address of c and does not share it, nil if there is none.
func (s *Source) owner(c claim, addr netip.Addr) (first *core.Service) {
	found, _ := s.services.ByIndex(withAddress, addr.String()) // the index exists
	for _, x := range found {
		service := x.(*core.Service)
		if nameOf(service) == c.holder.Service || first != nil && nameOf(service) > nameOf(first) {
			continue
		}
		if other, ok := s.claimOf(service, addr); ok && compareClaims(other, c) < 0 && !c.canShare(other) {
			first = service
		}
	}
	return first
}

// addresses are those of a Service on this node.
type addresses struct {
	vips     []netip.Addr
	external []netip.Addr    // those of vips that are externalIPs
	refused  []lb.RefusedVIP // that it asks for and does not get
}

// addressesFor returns the addresses of a Service that this node serves: those in its status, and those of its
// externalIPs that a pool permits, unless another Service has them. ExternalIPs work with every type of Service.
func (s *Source) addressesFor(service *core.Service) (a addresses) {
	c := newClaim(service, false)
	add := func(addr netip.Addr, external bool) {
		c.external = external
		if owner := s.owner(c, addr); owner != nil {
			reason := "refused: " + addr.String() + " belongs to " + nameOf(owner)
			a.refused = append(a.refused, lb.RefusedVIP{VIP: addr, Reason: reason})
			return
		}
		if a.vips = append(a.vips, addr); external {
			a.external = append(a.external, addr)
		}
	}
	if matchesClass(service, s.o.Class) {
		for _, addr := range addressesOf(service) {
			add(addr, false)
		}
	}
	for _, addr := range externalIPsOf(service) {
		if !slices.Contains(a.vips, addr) && permitsExternal(s.o.Pools, service, addr) {
			add(addr, true)
		}
	}
	if ips := service.Spec.ExternalIPs; len(ips) > maxExternalIPs {
		if addr, err := netip.ParseAddr(ips[maxExternalIPs]); err == nil && permitsExternal(s.o.Pools, service, addr) {
			reason := fmt.Sprintf("refused: only the first %d externalIPs of a Service are used", maxExternalIPs)
			a.refused = append(a.refused, lb.RefusedVIP{VIP: addr, Reason: reason})
		}
	}
	return a
}
