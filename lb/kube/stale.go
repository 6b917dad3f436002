package kube

import (
	"maps"
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
// their flows, and a client that keeps its source port (UDP) is balanced anew at once.
func (s *Source) addStale(name string, old, now *lb.Service) {
	stale := s.stale[name]
	maps.DeleteFunc(stale, func(_ netip.AddrPort, until time.Time) bool { return time.Now().After(until) })
	if old != nil {
		for _, p := range old.Ports {
			for _, b := range p.Backends {
				if _, known := stale[b.ID()]; b.Deleted || known {
					continue
				}
				if stale == nil {
					stale = map[netip.AddrPort]time.Time{}
					s.stale[name] = stale
				}
				stale[b.ID()] = time.Now().Add(staleEndpointTTL)
			}
		}
	}
	present := s.present(name)
	maps.DeleteFunc(stale, func(at netip.AddrPort, _ time.Time) bool { return present[at] })
	for i := range now.Ports {
		for _, at := range slices.SortedFunc(maps.Keys(stale), netip.AddrPort.Compare) {
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
