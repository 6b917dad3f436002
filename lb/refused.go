package lb

import (
	"net/netip"
	"slices"
)

// RefusedVIP is an address that a service requests but does not get, because it belongs to this machine or its network.
type RefusedVIP struct {
	VIP    netip.Addr
	Reason string
}

// Refuse returns s without the VIPs that are taken, which move to Refused, or s itself if there are none. taken says
// what an address is, or returns "".
func (s *Service) Refuse(taken func(netip.Addr) string) *Service {
	if !slices.ContainsFunc(s.VIPs, func(a netip.Addr) bool { return taken(a) != "" }) {
		return s
	}
	out := *s
	out.VIPs, out.Refused = nil, slices.Clone(s.Refused)
	for _, a := range s.VIPs {
		if what := taken(a); what != "" {
			out.Refused = append(out.Refused, RefusedVIP{a, "refused: " + a.String() + " is " + what})
		} else {
			out.VIPs = append(out.VIPs, a)
		}
	}
	return &out
}

// addRefused adds the refused VIPs of a service to a status.
func (out *Status) addRefused(s *Service) {
	for _, r := range s.Refused {
		for _, p := range s.Ports {
			out.Services = append(out.Services, ServiceStatus{
				Service: s.Name, Address: r.VIP, Port: p.Port.Port, LastPort: p.Last, Protocol: p.Protocol,
				Policy: s.Policy, Forward: s.forward(), Algorithm: s.Algorithm, Backends: []BackendStatus{},
				State: StateUnhealthy, Reason: r.Reason,
			})
		}
		i, found := slices.BinarySearchFunc(out.Routes, r.VIP, func(x RouteStatus, a netip.Addr) int {
			return x.Address.Compare(a)
		})
		if found {
			out.Routes[i].Services = append(out.Routes[i].Services, s.Name)
			continue
		}
		route := RouteStatus{Address: r.VIP, Services: []string{s.Name}, Reason: r.Reason}
		out.Routes = slices.Insert(out.Routes, i, route)
	}
}
