package kube

import (
	"net/netip"
	"slices"
	"time"

	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// staleEndpointTTL is how long a removed endpoint stays in its service as a deleted backend. The engine merges updates,
// so one update alone may never reach the datapath.
const staleEndpointTTL = time.Minute

// addStale adds the endpoints that a service had and no longer has to now, as deleted backends. The datapath then ends
// their flows, and a client that keeps its source port (UDP) is balanced anew at once. An endpoint counts in any
// condition: most are terminating before they are removed, and have no new flows then.
func (s *Source) addStale(name string, now *lb.Service) {
	seen := s.endpoints[name]
	if seen == nil {
		seen = map[netip.AddrPort]time.Time{}
		s.endpoints[name] = seen
	}
	present := s.present(name)
	for at, until := range seen {
		switch {
		case present[at]:
		case until.IsZero():
			seen[at] = time.Now().Add(staleEndpointTTL)
		case time.Now().After(until):
			delete(seen, at)
		}
	}
	for at := range present {
		seen[at] = time.Time{}
	}
	var stale []netip.AddrPort
	for at, until := range seen {
		if !until.IsZero() {
			stale = append(stale, at)
		}
	}
	slices.SortFunc(stale, netip.AddrPort.Compare)
	for i := range now.Ports {
		for _, at := range stale {
			deleted := lb.Backend{Addr: at.Addr(), Port: at.Port(), Deleted: true}
			now.Ports[i].Backends = append(now.Ports[i].Backends, deleted)
		}
	}
}

// present returns the endpoints in the slices of a service, whatever their conditions.
func (s *Source) present(name string) map[netip.AddrPort]bool {
	at := map[netip.AddrPort]bool{}
	found, _ := s.slices.ByIndex(serviceOf, name) // the index exists
	for _, x := range found {
		slice := x.(*discovery.EndpointSlice)
		for _, p := range slice.Ports {
			if p.Port == nil {
				continue
			}
			for _, e := range slice.Endpoints {
				if x, ok := toEndpoint(e, uint16(*p.Port)); ok {
					at[x.at] = true
				}
			}
		}
	}
	return at
}
