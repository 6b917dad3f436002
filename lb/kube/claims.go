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

// Two Services can claim the same address and port: any user may write any address into the spec.externalIPs of their
// own Service, other controllers can write statuses, and a Service that shares an address may be changed to use another
// one's port. All nodes must then serve the same Service, whatever they saw first, so the rule depends only on the
// contents of the objects.

// claim is an address in a Service's status or externalIPs.
type claim struct {
	service  *core.Service
	external bool // only in the externalIPs
}

// compareClaims orders claims to one address: claims in a status first, then the older Service, then the lower UID.
func compareClaims(a, b claim) int {
	return cmp.Or(
		compareBool(a.external, b.external),
		a.service.CreationTimestamp.Compare(b.service.CreationTimestamp.Time),
		strings.Compare(string(a.service.UID), string(b.service.UID)),
		strings.Compare(nameOf(a.service), nameOf(b.service)),
	)
}

// hasPort reports whether a takes precedence over b for a port: the one whose status has it, otherwise the first by
// compareClaims.
func (a claim) hasPort(p lb.Port, b claim) bool {
	aHas, bHas := slices.Contains(holds(a.service).Ports, p), slices.Contains(holds(b.service).Ports, p)
	return cmp.Or(compareBool(!aHas, !bHas), compareClaims(a, b)) < 0
}

// joins reports whether a may share an address with b when it is an externalIP of at least one of them: they have no
// port in common and the same key, valid for a's namespace or for all namespaces.
func (a claim) joins(b claim, across bool) bool {
	x, y := holder(a.service), holder(b.service)
	return x.ShareKey != "" && x.ShareKey == y.ShareKey && (across || y.SharesWith(x.Namespace)) && // few ports
		!slices.ContainsFunc(x.Ports, func(p lb.Port) bool { return slices.Contains(y.Ports, p) })
}

// claimOf returns a Service's claim to an address, or false if it has none. A status counts only if nodes serve its
// addresses, because controllers of other classes may write any address. An externalIP counts only if a pool permits
// it.
func (s *Source) claimOf(service *core.Service, addr netip.Addr) (claim, bool) {
	if matchesClass(service, s.o.Classes...) && slices.Contains(s.served(service), addr) {
		return claim{service, false}, true
	}
	if !slices.Contains(externalIPsOf(service), addr) || !permitsExternal(s.o.Pools, service, addr) {
		return claim{}, false
	}
	return claim{service, true}, true
}

// permitsExternal reports whether a Service may use addr as an externalIP.
func permitsExternal(pools []Pool, service *core.Service, addr netip.Addr) bool {
	p := poolOf(pools, addr)
	return p != nil && p.ExternalIPs && p.serves(service)
}

// others returns the claims of other Services to addr, an address of c, by name.
func (s *Source) others(c claim, addr netip.Addr) (all []claim) {
	found, _ := s.services.ByIndex(withAddress, addr.String()) // the index exists
	for _, x := range found {
		if other, ok := s.claimOf(x.(*core.Service), addr); ok && nameOf(other.service) != nameOf(c.service) {
			all = append(all, other)
		}
	}
	slices.SortFunc(all, func(a, b claim) int { return strings.Compare(nameOf(a.service), nameOf(b.service)) })
	return all
}

// owner returns the Service that has addr instead of c, because it does not share addr or has all ports of c, or nil if
// c has addr. taken lists c's ports that other Services have, if not all are taken.
func (s *Source) owner(c claim, addr netip.Addr) (first *core.Service, taken []lb.Port) {
	all := s.others(c, addr)
	if len(all) == 0 {
		return nil, nil
	}
	p := poolOf(s.o.Pools, addr)
	across := p != nil && p.ShareAcross
	ports := holder(c.service).Ports
	for _, other := range all {
		if c.external || other.external { // the allocator decides who shares an address in a status
			if compareClaims(other, c) < 0 && !c.joins(other, across) {
				return other.service, nil
			}
			continue
		}
		theirs := holder(other.service).Ports
		for _, p := range ports {
			if slices.Contains(theirs, p) && !slices.Contains(taken, p) && other.hasPort(p, c) {
				taken = append(taken, p)
				first = cmp.Or(first, other.service)
			}
		}
	}
	if len(taken) < len(ports) {
		return nil, taken
	}
	return first, nil
}

// sharesPorts reports whether another Service has a port at one of a Service's addresses.
func (s *Source) sharesPorts(service *core.Service, vips []netip.Addr) bool {
	for _, addr := range vips {
		for _, other := range s.others(claim{service: service}, addr) {
			if owner, _ := s.owner(other, addr); owner == nil {
				return true
			}
		}
	}
	return false
}

// addresses are a Service's addresses on this node.
type addresses struct {
	vips     []netip.Addr
	external []netip.Addr    // the vips that are externalIPs
	refused  []lb.RefusedVIP // addresses that the Service requests but does not get
	taken    []lb.Port       // ports of the Service that others have at one of vips
}

// addressesFor returns the addresses of a Service that this node serves: those in its status, and the externalIPs that
// a pool permits, unless another Service has them. ExternalIPs work with every type of Service. ExternalIPs that are in
// no pool are served only by the node's service proxy.
func (s *Source) addressesFor(service *core.Service) (a addresses) {
	add := func(addr netip.Addr, external bool) {
		owner, taken := s.owner(claim{service, external}, addr)
		if owner != nil {
			reason := "refused: " + addr.String() + " belongs to " + nameOf(owner)
			a.refused = append(a.refused, lb.RefusedVIP{VIP: addr, Reason: reason})
			return
		}
		a.taken = append(a.taken, taken...)
		if a.vips = append(a.vips, addr); external {
			a.external = append(a.external, addr)
		}
	}
	if matchesClass(service, s.o.Classes...) {
		vips := addressesOf(service)
		for _, addr := range statusAddresses(service) {
			why := s.refusal(addr)
			switch {
			case ofNodes(s.o.Pools, service, addr):
				continue
			case slices.Contains(vips, addr):
			case isReleased(service) || len(s.o.Pools) == 0: // another controller's, if there are no pools
				continue
			default:
				why = "has ipMode Proxy"
			}
			if why != "" {
				if by := managers(service, addressField); len(by) > 0 && !isOurs(service) {
					why += fmt.Sprintf("; %s wrote it: %s", strings.Join(by, ", "), textOthers)
				}
				a.refused = append(a.refused, lb.RefusedVIP{VIP: addr, Reason: "refused: " + addr.String() + " " + why})
				continue
			}
			add(addr, false)
		}
	}
	for _, addr := range externalIPsOf(service) {
		refused := func(r lb.RefusedVIP) bool { return r.VIP == addr }
		switch p := poolOf(s.o.Pools, addr); {
		case p == nil || slices.Contains(a.vips, addr) || slices.ContainsFunc(a.refused, refused):
		case permitsExternal(s.o.Pools, service, addr):
			add(addr, true)
		default:
			reason := fmt.Sprintf("refused: the pool %q does not permit %s in spec.externalIPs", p.Name, addr)
			a.refused = append(a.refused, lb.RefusedVIP{VIP: addr, Reason: reason})
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

// withoutPorts returns a Service without some of its ports.
func withoutPorts(service *core.Service, taken []lb.Port) *core.Service {
	if len(taken) == 0 {
		return service
	}
	out := *service
	out.Spec.Ports = slices.DeleteFunc(slices.Clone(service.Spec.Ports), func(p core.ServicePort) bool {
		return slices.ContainsFunc(taken, func(t lb.Port) bool {
			return portText(t) == fmt.Sprintf("%d/%s", p.Port, protocolOf(&p.Protocol))
		})
	})
	return &out
}

// externalOfNamespace limits the externalIPs that a namespace's Services have together to a quarter of the default of
// max_routes, because each takes a route, and no quota of Kubernetes limits them.
const externalOfNamespace = 250

// boundExternal refuses those externalIPs of a Service for which its namespace has no room. If the Service now has
// fewer, boundExternal queues the namespace's other Services with externalIPs.
func (s *Source) boundExternal(name string, a *addresses) {
	namespace, _, _ := strings.Cut(name, "/")
	had, room := s.external[name], externalOfNamespace
	delete(s.external, name)
	var others []string
	for other, n := range s.external {
		if strings.HasPrefix(other, namespace+"/") {
			room, others = room-n, append(others, other)
		}
	}
	n := min(len(a.external), room)
	if len(a.external) > 0 {
		s.external[name] = n
	}
	for _, addr := range a.external[n:] {
		reason := fmt.Sprintf("refused: the Services of a namespace can have at most %d externalIPs together",
			externalOfNamespace)
		a.refused = append(a.refused, lb.RefusedVIP{VIP: addr, Reason: reason})
		a.vips = slices.DeleteFunc(a.vips, func(v netip.Addr) bool { return v == addr })
	}
	if a.external = a.external[:n]; n < had {
		for _, other := range others {
			s.queue.Add(other)
		}
	}
}
