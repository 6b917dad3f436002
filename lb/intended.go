package lb

import "net/netip"

// NoLocalEndpoint is the WithholdReason of a service that other nodes serve.
const NoLocalEndpoint = "externalTrafficPolicy is Local, and no ready endpoint is on this node"

// NoEndpoint is the WithholdReason of a service without a usable endpoint: it is scaled to zero or not ready yet.
const NoEndpoint = "the Service has no ready endpoints"

// intended reports whether a VIP of the service is withheld through no fault of this node.
func (s *Service) intended(vip netip.Addr) bool {
	return s.WithholdIntended || s.WithholdReason == "" && s.PerVIP[vip].WithholdIntended
}

// markIntended marks the routes that an operator or the cluster does not want to be announced.
func (e *Engine) markIntended(routes []RouteStatus) {
	for i := range routes {
		r := &routes[i]
		r.Intended = !r.Announced && len(r.Services) > 0
		for _, name := range r.Services {
			en := e.services[name]
			r.Intended = r.Intended && en != nil && (e.drains.reason(name) != "" || en.service.intended(r.Address))
		}
	}
}
