package lb

import "net/netip"

// NoLocalEndpoint is the WithholdReason of a service that other nodes serve.
const NoLocalEndpoint = "externalTrafficPolicy is Local, and no ready endpoint is on this node"

// NoEndpoint is the WithholdReason of a service without a usable endpoint: it is scaled to zero or not ready yet.
const NoEndpoint = "the Service has no ready endpoints"

// NoEndpointHere is the LowerPreference of a service that nodes with endpoints should receive. If none of these has a
// session with a router, the other nodes receive it.
const NoEndpointHere = "steelyard.dev/announce-from names nodes with endpoints, and no ready endpoint is on this node"

// intended reports whether a VIP of the service is withheld through no fault of this node.
func (s *Service) intended(vip netip.Addr) bool {
	return s.WithholdIntended || s.WithholdReason == "" && s.PerVIP[vip].WithholdIntended
}

// markIntended marks the routes that an operator or the cluster does not want to be announced, or not preferred.
func (e *Engine) markIntended(routes []RouteStatus) {
	for i := range routes {
		r := &routes[i]
		r.Intended = len(r.Services) > 0
		for _, name := range r.Services {
			en := e.services[name]
			r.Intended = r.Intended && en != nil && (r.Announced && en.service.LowerPreference == NoEndpointHere ||
				!r.Announced && (e.drains.reason(name) != "" || en.service.intended(r.Address)))
		}
	}
}
