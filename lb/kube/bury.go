package kube

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// mourning is for how long the engine is told of an endpoint that is no more, so that it surely hears of it.
const mourning = time.Minute

// bury adds the endpoints to a service that it had and has no more: their flows are to end, so that clients that go on
// sending (UDP) find another at once.
func (s *Source) bury(name string, old, now *lb.Service) {
	gone := s.gone[name]
	for at, until := range gone {
		if time.Now().After(until) {
			delete(gone, at)
		}
	}
	if old != nil {
		for _, p := range old.Ports {
			for _, b := range p.Backends {
				if !b.Deleted {
					if gone == nil {
						gone = map[netip.AddrPort]time.Time{}
						s.gone[name] = gone
					}
					if _, known := gone[b.ID()]; !known {
						gone[b.ID()] = time.Now().Add(mourning)
					}
				}
			}
		}
	}
	here := s.known(name)
	for at := range gone {
		if here[at] {
			delete(gone, at) // it is still there, ready or not
		}
	}
	for i := range now.Ports {
		for _, at := range slices.SortedFunc(maps.Keys(gone), netip.AddrPort.Compare) {
			now.Ports[i].Backends = append(now.Ports[i].Backends, lb.Backend{Addr: at.Addr(), Port: at.Port(), Deleted: true})
		}
	}
}

// known returns the addresses that some slice of a service has, in whatever condition.
func (s *Source) known(name string) map[netip.AddrPort]bool {
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
