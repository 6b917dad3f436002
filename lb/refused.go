package lb

import (
	"net/netip"
	"slices"
)

// RefusedVIP is an address that a service requests but does not get, because it belongs to this node or its network.
type RefusedVIP struct {
	VIP    netip.Addr
	Reason string
}

// Refuse returns a copy of s whose taken VIPs are moved to Refused, or s itself if none is taken. taken says what an
// address already is, or returns "".
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

// refusedRows is about how many rows a status has for a service's refused addresses. A service may have thousands of
// ports.
const refusedRows = 100

// addRefused adds the refused VIPs of services to a status.
func (out *Status) addRefused(services []*Service) {
	if len(services) == 0 {
		return
	}
	at := map[netip.Addr]int{} // indexes of routes
	for i, r := range out.Routes {
		at[r.Address] = i
	}
	for _, s := range services {
		ports := s.Ports[:min(len(s.Ports), max(refusedRows/len(s.Refused), 1))]
		for _, r := range s.Refused {
			for _, p := range ports {
				out.Services = append(out.Services, ServiceStatus{
					Service: s.Name, Address: r.VIP, Port: p.Port.Port, LastPort: p.Last, Protocol: p.Protocol,
					Policy: s.Policy, Forward: s.forward(), Algorithm: s.Algorithm, Backends: []BackendStatus{},
					State: StateUnhealthy, Reason: r.Reason,
				})
			}
			if i, found := at[r.VIP]; found {
				out.Routes[i].Services = append(out.Routes[i].Services, s.Name)
				continue
			}
			at[r.VIP] = len(out.Routes)
			out.Routes = append(out.Routes, RouteStatus{Address: r.VIP, Services: []string{s.Name}, Reason: r.Reason})
		}
	}
	slices.SortFunc(out.Routes, func(a, b RouteStatus) int { return a.Address.Compare(b.Address) })
}
