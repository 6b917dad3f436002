package kube

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// This file limits the pairs of endpoint and port of one Service, to leave space for other Services on every node.

// pairs are the endpoints of a Service by port and family.
type pairs struct {
	of map[portFamily][]endpoint
	n  int // the total number of pairs
	// share is how many endpoints each port and family may use, or 0 for all.
	share int
	// some means that not all pairs were expanded.
	some bool
}

type portFamily struct {
	port int // index in spec.ports
	is4  bool
}

// expandedMax limits how many pairs are expanded before choosing among them, as a multiple of those in use.
const expandedMax = 10

// findPairs returns all pairs of a Service. If there are more than most, each port and family gets an equal share. If
// there are too many to expand at each change, for example from 15,000 ports and 300 endpoints, it expands only the
// best endpoints of each slice.
func findPairs(s *core.Service, endpoints []*endpointSlice, most int) pairs {
	p := pairs{of: map[portFamily][]endpoint{}}
	from, n := findPorts(s, endpoints)
	if n/expandedMax > most {
		p.some, p.share = true, max(most/len(from), 1)
		from, _ = findPorts(s, best(endpoints, p.share))
	}
	for key, ports := range from {
		if p.some { // the better slices come first
			ports = ports[:min(len(ports), p.share)]
		}
		p.of[key] = endpointsOf(ports)
		p.n += len(p.of[key])
	}
	switch {
	case p.some:
		p.n = n
	case p.n > most:
		p.share = max(most/len(p.of), 1)
	}
	return p
}

// findPorts returns, for each port of a Service that has endpoints, its ports in slices, and the number of pairs. An
// endpoint in two slices counts twice.
func findPorts(s *core.Service, endpoints []*endpointSlice) (from map[portFamily][]portIn, n int) {
	from = map[portFamily][]portIn{}
	ports := byPort(endpoints)
	for i, port := range s.Spec.Ports {
		for _, is4 := range []bool{true, false} {
			family := discovery.AddressTypeIPv6
			if is4 {
				family = discovery.AddressTypeIPv4
			}
			for _, x := range ports[portOf{port.Name, protocolOf(&port.Protocol), family}] {
				if len(x.endpoints) > 0 {
					from[portFamily{i, is4}] = append(from[portFamily{i, is4}], x)
					n += len(x.endpoints)
				}
			}
		}
	}
	return from, n
}

// best returns each slice reduced to its n best endpoints, best slices first.
func best(all []*endpointSlice, n int) (some []*endpointSlice) {
	for _, s := range all {
		if len(s.endpoints) > 0 {
			c := *s
			c.endpoints = bestOf(s.endpoints, n)
			some = append(some, &c)
		}
	}
	slices.SortStableFunc(some, func(a, b *endpointSlice) int {
		return cmp.Compare(a.endpoints[0].score(), b.endpoints[0].score())
	})
	return some
}

// within returns the endpoints of a port and family to use. If there are too many, serving ones come first, then those
// with the lowest hash (rendezvous hashing). Every node chooses the same ones for all ports, and a change of one
// endpoint replaces at most one other.
func (p pairs) within(all []endpoint) []endpoint {
	if p.share == 0 || len(all) <= p.share {
		return all
	}
	some := bestOf(all, p.share)
	slices.SortFunc(some, func(a, b endpoint) int { return a.at.Compare(b.at) })
	return some
}

// bestOf returns the n endpoints with the lowest scores.
func bestOf(all []endpoint, n int) []endpoint {
	type scored struct {
		endpoint
		score uint64
	}
	list := make([]scored, len(all))
	for i, e := range all {
		list[i] = scored{e, e.score()}
	}
	slices.SortFunc(list, func(a, b scored) int { return cmp.Or(cmp.Compare(a.score, b.score), a.at.Compare(b.at)) })
	some := make([]endpoint, min(n, len(all)))
	for i := range some {
		some[i] = list[i].endpoint
	}
	return some
}

// score is a 63-bit hash of the address. The highest bit is set for an endpoint that does not serve.
func (e endpoint) score() uint64 {
	h := fnv.New64a()
	b := e.at.Addr().As16()
	h.Write(b[:])
	score := binary.BigEndian.Uint64(h.Sum(nil)) * 0x9e3779b97f4a7c15 >> 1
	if !e.ready && !e.serving {
		score |= 1 << 63
	}
	return score
}

// Services with more than portsFew frontends (ports times addresses) may have at most portsMax together, the size of
// the kernel's table, and a quarter of that per namespace. Otherwise the plans and the status of many large Services
// that do not fit would fill the memory, and one namespace could use up the table and delay other namespaces' changes
// by seconds.
const portsFew, portsMax, portsOfNamespace = 100, 65_536, 65_536 / 4

// fits reports whether a Service may have n frontends. If it now has fewer, fits queues the Services that did not fit.
func (s *Source) fits(name string, n int) bool {
	had, total, own := s.wide[name], n, n
	delete(s.wide, name)
	if n > portsFew {
		namespace, _, _ := strings.Cut(name, "/")
		for other, has := range s.wide {
			total += has
			if strings.HasPrefix(other, namespace+"/") {
				own += has
			}
		}
		if total > portsMax || own > portsOfNamespace {
			n = 0
		}
		s.wide[name] = n
	}
	if had > n {
		for other, has := range s.wide {
			if has == 0 && other != name {
				s.queue.Add(other)
			}
		}
	}
	return n > 0 || total == 0
}

// placesOf returns how many entries these ports need in the kernel's tables, at one address.
func placesOf(ports []lb.ServicePort) (n int) {
	for _, p := range ports {
		if n++; p.Last != 0 {
			n += rangePlaces - 1
		}
	}
	return n
}

// bound refuses a Service with too many pairs of endpoint and port, or too many ports. A Service that is already served
// keeps its addresses, and its view has only as many pairs or ports as are permitted.
func (s *Source) bound(v *view) {
	name, most := v.service.Name, s.o.MaxEndpoints
	if n := len(v.service.VIPs) * placesOf(v.service.Ports); !s.fits(name, n) {
		few := min(max(portsFew/len(v.service.VIPs), 1), len(v.ports))
		v.ports, v.service.Ports = v.ports[:few], v.service.Ports[:few]
		for i := range v.service.Ports {
			v.service.Ports[i].Last = 0
		}
		what := fmt.Sprintf("%d pairs of address and port (a range counts %d times), but Services with more than %d "+
			"can have at most %d together, and %d in a namespace", n, rangePlaces, portsFew, portsMax, portsOfNamespace)
		if s.inForce(v.service) {
			s.o.Boundary.Report(lb.PartEndpoints, name, "only its first ports are served, without ranges: it has "+what)
			return
		}
		s.refuse(v, what)
		return
	}
	if v.pairs <= most {
		what := ""
		if v.unranged {
			what = "its port ranges are not served: another Service has a port at its address"
		}
		s.o.Boundary.Report(lb.PartEndpoints, name, what)
		return
	}
	what := fmt.Sprintf("%d pairs of endpoint and port, but kubernetes.max_endpoints_per_service is %d", v.pairs, most)
	if s.inForce(v.service) {
		s.o.Boundary.Report(lb.PartEndpoints, name, "some of its endpoints get no new connections: it has "+what)
		return
	}
	s.refuse(v, what)
}

// refuse removes a Service's addresses and endpoints from its view, because of what the Service has.
func (s *Source) refuse(v *view, what string) {
	s.o.Boundary.Report(lb.PartEndpoints, v.service.Name, "refused: it has "+what)
	for _, vip := range v.service.VIPs {
		v.service.Refused = append(v.service.Refused, lb.RefusedVIP{VIP: vip, Reason: "refused: it has " + what})
	}
	v.service.VIPs, v.service.UnrestrictedVIPs, v.readyLocal = nil, nil, 0
	for i := range v.service.Ports {
		p := &v.service.Ports[i]
		p.Backends, p.Nodes, p.Kept, p.DropWhenEmpty = nil, nil, nil, nil
	}
}

// inForce reports whether this node serves endpoints of a Service, or did before the agent started. A node that knows
// nothing of previous agents counts every Service that it finds at its start, because other nodes may serve it.
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
