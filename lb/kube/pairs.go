package kube

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// This file bounds the pairs of endpoint and port of one Service, so that every node has room for those of others.

// pairs are the endpoints of a Service by port and family.
type pairs struct {
	of map[portFamily][]endpoint
	n  int // of all
	// share is how many endpoints each port and family gets; 0: all.
	share int
}

type portFamily struct {
	port int // index in spec.ports
	is4  bool
}

// findPairs returns all pairs of a Service. Of more than most, each port and family gets an equal share.
func findPairs(s *core.Service, endpoints []*endpointSlice, most int) pairs {
	p := pairs{of: map[portFamily][]endpoint{}}
	for i, port := range s.Spec.Ports {
		for _, is4 := range []bool{true, false} {
			if all := endpointsOf(endpoints, port, is4); len(all) > 0 {
				p.of[portFamily{i, is4}] = all
				p.n += len(all)
			}
		}
	}
	if p.n > most {
		p.share = max(most/len(p.of), 1)
	}
	return p
}

// within returns the endpoints of a port and family that are used: of too many those that serve, and of these the ones
// with the lowest hash (rendezvous hashing). Every node chooses the same, for all ports, and a change of one endpoint
// replaces at most one other.
func (p pairs) within(all []endpoint) []endpoint {
	if p.share == 0 || len(all) <= p.share {
		return all
	}
	type scored struct {
		endpoint
		score uint64
	}
	list := make([]scored, len(all))
	for i, e := range all {
		list[i] = scored{e, score(e.at.Addr())}
		if !e.ready && !e.serving {
			list[i].score |= 1 << 63
		}
	}
	slices.SortFunc(list, func(a, b scored) int { return cmp.Or(cmp.Compare(a.score, b.score), a.at.Compare(b.at)) })
	some := make([]endpoint, p.share)
	for i := range some {
		some[i] = list[i].endpoint
	}
	slices.SortFunc(some, func(a, b endpoint) int { return a.at.Compare(b.at) })
	return some
}

// score is a hash of 63 bits.
func score(a netip.Addr) uint64 {
	h := fnv.New64a()
	b := a.As16()
	h.Write(b[:])
	return binary.BigEndian.Uint64(h.Sum(nil)) * 0x9e3779b97f4a7c15 >> 1
}

// bound refuses a Service with too many pairs of endpoint and port. One that is in force keeps its addresses: its view
// has as many pairs as are permitted.
func (s *Source) bound(v *view) {
	name, most := v.service.Name, s.o.MaxEndpoints
	if v.pairs <= most {
		s.o.Boundary.Report(lb.PartEndpoints, name, "")
		return
	}
	what := fmt.Sprintf("%d pairs of endpoint and port, and kubernetes.max_endpoints_per_service is %d", v.pairs, most)
	if s.inForce(v.service) {
		s.o.Boundary.Report(lb.PartEndpoints, name, "some of its endpoints get no new connections: it has "+what)
		return
	}
	s.o.Boundary.Report(lb.PartEndpoints, name, "refused: it has "+what)
	for _, vip := range v.service.VIPs {
		v.service.Refused = append(v.service.Refused, lb.RefusedVIP{VIP: vip, Reason: "refused: it has " + what})
	}
	v.service.VIPs, v.service.UnrestrictedVIPs, v.readyLocal = nil, nil, 0
	for i := range v.service.Ports {
		p := &v.service.Ports[i]
		p.Backends, p.Nodes, p.Kept, p.DropWhenEmpty = nil, nil, nil, nil
	}
}

// inForce reports whether this node serves endpoints of a Service, or has before the agent was started. A node that
// knows nothing of earlier agents counts the Services that it finds at its start: they may be in force elsewhere.
func (s *Source) inForce(service *lb.Service) bool {
	if old := s.put[service.Name]; old != nil {
		serves := func(p lb.ServicePort) bool { return len(p.Backends) > 0 }
		return len(old.VIPs) > 0 && slices.ContainsFunc(old.Ports, serves)
	}
	if s.complete || len(s.o.Held) == 0 {
		return !s.complete
	}
	for _, vip := range service.VIPs {
		for _, p := range service.Ports {
			if slices.Contains(s.o.Held, p.On(vip)) {
				return true
			}
		}
	}
	return false
}
