package kube

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// staleEndpointTTL is how long a removed endpoint stays in its service as a deleted backend. The engine merges updates,
// so one update alone may never reach the datapath.
const staleEndpointTTL = time.Minute

// seen are the endpoints of a service, in any condition.
type seen struct {
	present []netip.AddrPort             // in its slices at last, sorted
	removed map[netip.AddrPort]time.Time // from them, and until when they are passed on as deleted; nil: none
}

// addStale adds the endpoints that a service had and no longer has to now, as deleted backends. The datapath then ends
// their flows, and a client that keeps its source port (UDP) is balanced anew at once. An endpoint counts in any
// condition: most are terminating before they are removed, and have no new flows then.
func (s *Source) addStale(name string, now *lb.Service) {
	before, x := s.endpoints[name], seen{present: s.present(name)}
	keep := func(at netip.AddrPort, until time.Time) {
		if _, present := slices.BinarySearchFunc(x.present, at, netip.AddrPort.Compare); present {
			return
		}
		if x.removed == nil {
			x.removed = map[netip.AddrPort]time.Time{}
		}
		x.removed[at] = until
	}
	for at, until := range before.removed {
		if !time.Now().After(until) {
			keep(at, until)
		}
	}
	earlier := len(x.removed)
	for _, at := range before.present {
		keep(at, time.Now().Add(staleEndpointTTL))
	}
	if len(x.removed) > earlier { // nothing else may change the service for long
		s.queue.AddAfter(name, staleEndpointTTL+time.Second)
	}
	s.endpoints[name] = x
	for _, at := range slices.SortedFunc(maps.Keys(x.removed), netip.AddrPort.Compare) {
		deleted := lb.Backend{Addr: at.Addr(), Port: at.Port(), Deleted: true}
		for i := range now.Ports {
			now.Ports[i].Backends = append(now.Ports[i].Backends, deleted)
		}
	}
}

// present returns the endpoints in the slices of a service, whatever their conditions.
func (s *Source) present(name string) (all []netip.AddrPort) {
	found, _ := s.slices.ByIndex(serviceOf, name) // the index exists
	for _, x := range found {
		slice := x.(*endpointSlice)
		all = slices.Grow(all, len(slice.ports)*len(slice.endpoints))
		for _, p := range slice.ports {
			for _, e := range slice.endpoints {
				all = append(all, e.on(p).at)
			}
		}
	}
	slices.SortFunc(all, netip.AddrPort.Compare)
	return slices.Compact(all)
}
