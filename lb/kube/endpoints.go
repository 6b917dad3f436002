package kube

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// place is where this node is, as far as the choice of endpoints is concerned.
type place struct {
	node, zone string
	nodes      map[string]netip.Addr // by name, for tunnels; nil: there are none
}

// endpoint is one address of an EndpointSlice that serves one port.
type endpoint struct {
	at                          netip.AddrPort
	node                        string
	ready, serving, terminating bool
	forNodes, forZones          []string
}

func (e endpoint) here(p place) bool { return e.node == p.node && p.node != "" }

// endpointsOf returns what serves a port of a service, in one family: matched by port name and protocol, only the first address
// of each (the others are promised to be the same), and each once although slices may overlap while they are rewritten
// (pkg/proxy/endpointslicecache.go).
func endpointsOf(slices_ []*discovery.EndpointSlice, port core.ServicePort, is4 bool) []endpoint {
	family := discovery.AddressTypeIPv6
	if is4 {
		family = discovery.AddressTypeIPv4
	}
	byAddr := map[netip.AddrPort]endpoint{}
	for _, s := range slices_ {
		if s.AddressType != family {
			continue
		}
		for _, p := range s.Ports {
			if p.Name == nil || p.Port == nil || *p.Port == 0 || *p.Name != port.Name || protocolOf(p.Protocol) != protocolOf(&port.Protocol) {
				continue
			}
			for _, e := range s.Endpoints {
				if x, ok := toEndpoint(e, uint16(*p.Port)); ok {
					if old, twice := byAddr[x.at]; !twice || !old.ready && x.ready {
						byAddr[x.at] = x
					}
				}
			}
		}
	}
	all := make([]endpoint, 0, len(byAddr))
	for _, e := range byAddr {
		all = append(all, e)
	}
	slices.SortFunc(all, func(a, b endpoint) int { return a.at.Compare(b.at) })
	return all
}

func protocolOf(p *core.Protocol) core.Protocol {
	if p == nil || *p == "" {
		return core.ProtocolTCP
	}
	return *p
}

// toEndpoint reads conditions as the API defines them: nil ready is true, nil serving is ready, nil terminating is false.
func toEndpoint(e discovery.Endpoint, port uint16) (x endpoint, ok bool) {
	if len(e.Addresses) == 0 {
		return x, false
	}
	addr, err := netip.ParseAddr(e.Addresses[0])
	if err != nil {
		return x, false
	}
	x.at = netip.AddrPortFrom(addr, port)
	x.ready = e.Conditions.Ready == nil || *e.Conditions.Ready
	x.serving = x.ready
	if e.Conditions.Serving != nil {
		x.serving = *e.Conditions.Serving
	}
	x.terminating = e.Conditions.Terminating != nil && *e.Conditions.Terminating
	if e.NodeName != nil {
		x.node = *e.NodeName
	}
	if e.Hints != nil {
		for _, n := range e.Hints.ForNodes {
			x.forNodes = append(x.forNodes, n.Name)
		}
		for _, z := range e.Hints.ForZones {
			x.forZones = append(x.forZones, z.Name)
		}
	}
	return x, true
}

// choice is what of the endpoints may be used (pkg/proxy/topology.go, CategorizeEndpoints).
type choice struct {
	cluster, local []endpoint // for the policies Cluster and Local; the fallback is taken for each by itself
	readyHere      int
	anywhere       bool // some endpoint is usable somewhere
	ours           bool // hints make cluster our own choice, and others have another
}

func choose(all []endpoint, at place) choice {
	var c choice
	here := func(e endpoint) bool { return e.here(at) }
	ready := filter(all, func(e endpoint) bool { return e.ready })
	leaving := filter(all, func(e endpoint) bool { return e.serving && e.terminating })
	c.local = filter(ready, here)
	c.readyHere = len(c.local)
	if len(c.local) == 0 {
		c.local = filter(leaving, here)
	}
	c.cluster = near(ready, at)
	c.ours = len(c.cluster) < len(ready)
	if len(c.cluster) == 0 {
		c.cluster = leaving
	}
	c.anywhere = len(ready)+len(leaving) > 0
	return c
}

// near follows the hints, if every ready endpoint has one and one is for us: those for nodes before those for zones.
func near(ready []endpoint, at place) []endpoint {
	for _, hint := range []struct {
		mine  string
		hints func(endpoint) []string
	}{{at.node, func(e endpoint) []string { return e.forNodes }}, {at.zone, func(e endpoint) []string { return e.forZones }}} {
		if hint.mine == "" || slices.ContainsFunc(ready, func(e endpoint) bool { return len(hint.hints(e)) == 0 }) {
			continue
		}
		if mine := filter(ready, func(e endpoint) bool { return slices.Contains(hint.hints(e), hint.mine) }); len(mine) > 0 {
			return mine
		}
	}
	return ready
}

func filter(all []endpoint, keep func(endpoint) bool) (some []endpoint) {
	for _, e := range all {
		if keep(e) {
			some = append(some, e)
		}
	}
	return some
}

// nodesOf returns the nodes that have endpoints, in any condition. Nodes without ready endpoints come first: a flow that
// arrives at another node than before most likely belongs to one of them.
func nodesOf(all []endpoint, at place) []lb.Node {
	ready := map[lb.Node]int{}
	for _, e := range all {
		if n := (lb.Node{Addr: at.nodes[e.node], Local: e.here(at)}); n.Addr.IsValid() {
			ready[n] += 0
			if e.ready {
				ready[n] = 1
			}
		}
	}
	return slices.SortedFunc(maps.Keys(ready), func(a, b lb.Node) int {
		return cmp.Or(cmp.Compare(ready[a], ready[b]), a.Addr.Compare(b.Addr))
	})
}

// reachable leaves out endpoints on nodes that are not known, or no longer: their slices often outlive a node. When there are no
// others it leaves out none.
func reachable(use []endpoint, at place) []endpoint {
	some := filter(use, func(e endpoint) bool { return at.nodes == nil || e.node == "" || at.nodes[e.node].IsValid() })
	if len(some) == 0 {
		return use
	}
	return some
}

func backendsFor(chosen []endpoint, at place) []lb.Backend {
	out := make([]lb.Backend, 0, len(chosen))
	for _, e := range chosen {
		out = append(out, lb.Backend{Addr: e.at.Addr(), Port: e.at.Port(), Weight: 1, Local: e.here(at), Node: at.nodes[e.node]})
	}
	return out
}
