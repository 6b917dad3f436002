package lb

// NoLocalEndpoint is the WithholdReason of a service that other nodes serve.
const NoLocalEndpoint = "externalTrafficPolicy is Local, and no ready endpoint is on this node"

// NoEndpoint is the WithholdReason of a service that nothing serves: it is scaled to zero, or not ready yet.
const NoEndpoint = "the Service has no ready endpoints"

// markIntended marks the routes that are not announced because an operator or the cluster wants it so.
func (e *Engine) markIntended(routes []RouteStatus) {
	for i := range routes {
		r := &routes[i]
		r.Intended = !r.Announced && len(r.Services) > 0
		for _, name := range r.Services {
			en := e.services[name]
			r.Intended = r.Intended && en != nil && (e.drains.reason(name) != "" || en.service.WithholdIntended)
		}
	}
}
