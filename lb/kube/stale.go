package kube

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
	"unique"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// staleEndpointTTL is how long a removed endpoint stays in its service as a deleted backend. The engine merges updates,
// so a single update may never reach the datapath.
const staleEndpointTTL = time.Minute

// portKey identifies a port of a Service in its EndpointSlices.
type portKey struct {
	name     string
	protocol core.Protocol
}

// served is the address at which an endpoint serves a port.
type served struct {
	at   netip.AddrPort
	port unique.Handle[portKey]
}

func (a served) compare(b served) int {
	p, q := a.port.Value(), b.port.Value()
	return cmp.Or(a.at.Compare(b.at), strings.Compare(p.name, q.name), cmp.Compare(p.protocol, q.protocol))
}

// seen holds the endpoints of a service, whatever their conditions.
type seen struct {
	present []served             // last seen in its slices, sorted
	removed map[served]time.Time // no longer there, and until when they are passed on as deleted; may be nil
}

// addStale adds endpoints that a service's port no longer has as deleted backends. The datapath then ends their flows,
// and a client that keeps its source port (UDP) is rebalanced immediately. The conditions of an endpoint do not matter:
// most endpoints are terminating before they are removed, and receive no new flows then. If a service has too many
// endpoints to examine, its flows end by themselves.
func (s *Source) addStale(v *view) {
	name := v.service.Name
	if v.some {
		delete(s.endpoints, name)
		return
	}
	before, x := s.endpoints[name], seen{present: s.present(name)}
	keep := func(e served, until time.Time) {
		if _, present := slices.BinarySearchFunc(x.present, e, served.compare); present {
			return
		}
		if x.removed == nil {
			x.removed = map[served]time.Time{}
		}
		x.removed[e] = until
	}
	for e, until := range before.removed {
		if !time.Now().After(until) {
			keep(e, until)
		}
	}
	earlier := len(x.removed)
	for _, e := range before.present {
		keep(e, time.Now().Add(staleEndpointTTL))
	}
	if len(x.removed) > earlier { // there may be no other change for a long time
		s.queue.AddAfter(name, staleEndpointTTL+time.Second)
	}
	s.endpoints[name] = x
	for _, e := range slices.SortedFunc(maps.Keys(x.removed), served.compare) {
		if i := slices.Index(v.ports, e.port.Value()); i >= 0 {
			deleted := lb.Backend{Addr: e.at.Addr(), Port: e.at.Port(), Deleted: true}
			v.service.Ports[i].Backends = append(v.service.Ports[i].Backends, deleted)
		}
	}
}

// present returns the endpoints in the slices of a service, whatever their conditions.
func (s *Source) present(name string) (all []served) {
	for _, slice := range s.slicesIn(name) {
		all = slices.Grow(all, len(slice.ports)*len(slice.endpoints))
		for _, p := range slice.ports {
			port := unique.Make(portKey{p.name, p.protocol})
			for _, e := range slice.endpoints {
				all = append(all, served{e.on(p).at, port})
			}
		}
	}
	slices.SortFunc(all, served.compare)
	return slices.Compact(all)
}
