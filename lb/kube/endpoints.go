package kube

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// topology is what the choice of endpoints depends on: this node, its zone, and the nodes' addresses.
type topology struct {
	node, zone string
	nodes      map[string]netip.Addr // tunnel addresses by node name, or nil without tunnels
	lost       map[netip.Addr]bool   // nodes that do not answer through the tunnel
	own        []netip.Addr          // of this node, at which it serves Services of a pool of nodes
}

// endpointSlice is the part of a discovery.EndpointSlice that is kept. Endpoints take most memory in a large cluster.
type endpointSlice struct {
	meta.ObjectMeta        // name and version
	service         string // nameOf the Service
	family          discovery.AddressType
	ports           []slicePort
	endpoints       []endpoint // without a port yet
	changed         time.Time  // changedAt
	ignored         netip.Addr // an endpoint without a host address of its own, or zero
	unreadable      bool       // only the service is known
}

type slicePort struct {
	name     string
	protocol core.Protocol
	port     uint16 // ≥ 1
}

// endpoint is one address of an EndpointSlice that serves one port.
type endpoint struct {
	at                          netip.AddrPort
	node                        string
	ready, serving, terminating bool
	hints                       *hints // nil if there are none
}

// hints are the nodes and zones that should use an endpoint.
type hints struct{ nodes, zones []string }

// isLocal reports whether the endpoint is on this node.
func (e endpoint) isLocal(top topology) bool { return e.node == top.node && top.node != "" }

// isLost reports whether the endpoint is on a node that does not answer.
func (top topology) isLost(e endpoint) bool { return top.lost[top.nodes[e.node]] }

// sliceKey returns the service that an EndpointSlice belongs to.
func sliceKey(x any) string { return x.(*endpointSlice).service }

// slimSlice drops endpoints without a host address, and ports without a number.
func slimSlice(s *discovery.EndpointSlice) *endpointSlice {
	out := &endpointSlice{
		ObjectMeta: meta.ObjectMeta{Name: s.Name, Namespace: intern(s.Namespace), ResourceVersion: s.ResourceVersion},
		service:    s.Namespace + "/" + s.Labels[discovery.LabelServiceName],
		family:     discovery.AddressType(intern(string(s.AddressType))), changed: changedAt(s),
		ports: make([]slicePort, 0, len(s.Ports)), endpoints: make([]endpoint, 0, len(s.Endpoints)),
	}
	for _, p := range s.Ports {
		if p.Port == nil || *p.Port == 0 {
			continue
		}
		port := slicePort{protocol: core.Protocol(intern(string(protocolOf(p.Protocol)))), port: uint16(*p.Port)}
		if p.Name != nil {
			port.name = intern(*p.Name)
		}
		out.ports = append(out.ports, port)
	}
	for _, e := range s.Endpoints {
		if x, ok := toEndpoint(e); ok {
			out.endpoints = append(out.endpoints, x)
		} else if x.at.IsValid() {
			out.ignored = x.at.Addr()
		}
	}
	return out
}

// on returns the endpoint at a port of its slice.
func (e endpoint) on(p slicePort) endpoint {
	e.at = netip.AddrPortFrom(e.at.Addr(), p.port)
	return e
}

// portOf identifies a Service port in EndpointSlices.
type portOf struct {
	name     string
	protocol core.Protocol
	family   discovery.AddressType
}

// portIn is a port of an EndpointSlice.
type portIn struct {
	*endpointSlice
	port slicePort
}

// byPort groups the ports of slices.
func byPort(all []*endpointSlice) map[portOf][]portIn {
	ports := map[portOf][]portIn{}
	for _, s := range all {
		for _, p := range s.ports {
			key := portOf{p.name, p.protocol, s.family}
			ports[key] = append(ports[key], portIn{s, p})
		}
	}
	return ports
}

// endpointsOf returns the endpoints of a port of a Service in one family, ordered by address. Only the first address of
// an endpoint counts, as the API defines. Each address occurs once, although slices may overlap while the controller
// moves endpoints between them (pkg/proxy/endpointslicecache.go).
func endpointsOf(ports []portIn) []endpoint {
	byAddr := map[netip.AddrPort]endpoint{}
	for _, p := range ports {
		for _, e := range p.endpoints {
			x := e.on(p.port)
			if old, twice := byAddr[x.at]; !twice || !old.ready && x.ready {
				byAddr[x.at] = x
			}
		}
	}
	return slices.SortedFunc(maps.Values(byAddr), func(a, b endpoint) int { return a.at.Compare(b.at) })
}

func protocolOf(p *core.Protocol) core.Protocol {
	if p == nil || *p == "" {
		return core.ProtocolTCP
	}
	return *p
}

// toEndpoint applies the API's defaults to the conditions: ready and serving are true, terminating is false. It returns
// false for an endpoint without the address of a host.
func toEndpoint(e discovery.Endpoint) (x endpoint, ok bool) {
	if len(e.Addresses) == 0 {
		return x, false
	}
	addr, err := netip.ParseAddr(e.Addresses[0])
	addr = addr.Unmap() // the API server accepts "::ffff:192.0.2.1" as IPv4
	x.at = netip.AddrPortFrom(addr, 0)
	if err != nil || !isHost(addr) {
		return x, false
	}
	x.ready = e.Conditions.Ready == nil || *e.Conditions.Ready
	x.serving = e.Conditions.Serving == nil || *e.Conditions.Serving
	x.terminating = e.Conditions.Terminating != nil && *e.Conditions.Terminating
	if e.NodeName != nil {
		x.node = intern(*e.NodeName)
	}
	if e.Hints != nil {
		x.hints = &hints{}
		for _, n := range e.Hints.ForNodes {
			x.hints.nodes = append(x.hints.nodes, intern(n.Name))
		}
		for _, z := range e.Hints.ForZones {
			x.hints.zones = append(x.hints.zones, intern(z.Name))
		}
	}
	return x, true
}

// choice holds the endpoints that may receive traffic (pkg/proxy/topology.go, CategorizeEndpoints).
type choice struct {
	// Under the policies Cluster and Local. Each falls back to terminating endpoints independently.
	cluster, local []endpoint
	anywhere       []endpoint // cluster without hints
	readyLocal     int        // number of ready endpoints in local: all or none
	usable         bool       // the cluster has an endpoint that is ready, or serves while it terminates
	hinted         bool       // hints have restricted cluster, so other nodes may choose differently
}

func choose(all []endpoint, top topology) choice {
	var c choice
	isLocal := func(e endpoint) bool { return e.isLocal(top) }
	ready := filter(all, func(e endpoint) bool { return e.ready })
	terminating := filter(all, func(e endpoint) bool { return e.serving && e.terminating })
	c.local = filter(ready, isLocal)
	c.readyLocal = len(c.local)
	if len(c.local) == 0 {
		c.local = filter(terminating, isLocal)
	}
	c.cluster = byHints(ready, top)
	c.hinted = len(c.cluster) < len(ready)
	c.anywhere = ready
	if len(ready) == 0 {
		c.cluster, c.anywhere = terminating, terminating
	}
	c.usable = len(ready)+len(terminating) > 0
	return c
}

// byHints returns the endpoints with a hint for this node, otherwise those with a hint for its zone, otherwise all. A
// kind of hint counts only if every ready endpoint has one (KEP-2433).
func byHints(ready []endpoint, top topology) []endpoint {
	for _, hint := range []struct {
		own   string
		hints func(hints) []string
	}{
		{top.node, func(h hints) []string { return h.nodes }},
		{top.zone, func(h hints) []string { return h.zones }},
	} {
		without := func(e endpoint) bool { return e.hints == nil || len(hint.hints(*e.hints)) == 0 }
		if hint.own == "" || slices.ContainsFunc(ready, without) {
			continue
		}
		own := filter(ready, func(e endpoint) bool { return slices.Contains(hint.hints(*e.hints), hint.own) })
		if len(own) > 0 {
			return own
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

// byServing separates endpoints that serve from those that do not.
func byServing(all []endpoint) (serving, others []endpoint) {
	serves := func(e endpoint) bool { return e.serving || e.ready }
	return filter(all, serves), filter(all, func(e endpoint) bool { return !serves(e) })
}

// ended returns the endpoints that do not serve while others in the cluster do, under either policy
// (pkg/proxy/conntrack/cleanup.go). Their UDP flows end, because a client cannot notice that nothing answers.
func ended(all []endpoint) (out []lb.Backend) {
	serving, others := byServing(all)
	if len(serving) == 0 {
		return nil
	}
	for _, e := range others {
		out = append(out, lb.Backend{Addr: e.at.Addr(), Port: e.at.Port(), Deleted: true})
	}
	return out
}

// withFlows returns the endpoints that may have UDP flows: all except those in ended.
func withFlows(all []endpoint) []endpoint {
	if serving, _ := byServing(all); len(serving) > 0 {
		return serving
	}
	return all
}

// others returns the addresses of unused endpoints.
func others(all, use []endpoint) (at []netip.AddrPort) {
	used := map[netip.AddrPort]bool{}
	for _, e := range use {
		used[e.at] = true
	}
	for _, e := range all {
		if !used[e.at] {
			at = append(at, e.at)
		}
	}
	return at
}

// nodesOf returns the nodes that have endpoints, whatever their conditions. Nodes with terminating endpoints come
// first, because a flow that was on another node most likely belongs to one of them. Nodes whose endpoints do not serve
// come last, because they may be down.
func nodesOf(all []endpoint, top topology) []lb.Node {
	const terminating, ready, down = 0, 1, 2
	order := map[lb.Node]int{}
	for _, e := range all {
		n := lb.Node{Addr: top.nodes[e.node], Local: e.isLocal(top)}
		was, known := order[n]
		switch {
		case !n.Addr.IsValid() || was == ready && known:
		case top.lost[n.Addr]:
			order[n] = down
		case e.ready:
			order[n] = ready
		case e.serving:
			order[n] = terminating
		case !known:
			order[n] = down
		}
	}
	nodes := slices.AppendSeq(make([]lb.Node, 0, len(order)), maps.Keys(order))
	slices.SortFunc(nodes, func(a, b lb.Node) int {
		// Two nodes may briefly have the same address.
		return cmp.Or(cmp.Compare(order[a], order[b]), a.Addr.Compare(b.Addr), compareBool(a.Local, b.Local))
	})
	return nodes
}

// reachable removes endpoints on unknown nodes, because slices often outlive a deleted node, and endpoints on lost
// nodes. If no others are left, it removes none.
func reachable(use []endpoint, top topology) []endpoint {
	known := filter(use, func(e endpoint) bool {
		return top.nodes == nil || e.node == "" || top.nodes[e.node].IsValid() && !top.isLost(e)
	})
	if len(known) == 0 {
		return use
	}
	return known
}

func backendsFor(chosen []endpoint, top topology) []lb.Backend {
	out := make([]lb.Backend, 0, len(chosen))
	for _, e := range chosen {
		out = append(out, lb.Backend{
			Addr: e.at.Addr(), Port: e.at.Port(), Weight: 1, Local: e.isLocal(top), Node: top.nodes[e.node],
		})
	}
	return out
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case b:
		return -1
	}
	return 1
}

// slicesIn returns the EndpointSlices of a service, sorted by name. It may be called from any goroutine.
func (s *Source) slicesIn(service string) []*endpointSlice {
	found, err := s.slices.ByIndex(serviceOf, service)
	if err != nil {
		s.o.Log.Error("endpoints not found", "service", service, "err", err)
	}
	endpoints := make([]*endpointSlice, 0, len(found))
	for _, x := range found {
		endpoints = append(endpoints, x.(*endpointSlice))
	}
	slices.SortFunc(endpoints, func(a, b *endpointSlice) int { return strings.Compare(a.Name, b.Name) })
	return endpoints
}

// slicesOf is slicesIn without endpoints that are VIPs.
func (s *Source) slicesOf(service string) []*endpointSlice {
	endpoints := s.slicesIn(service)
	for i, x := range endpoints {
		endpoints[i] = s.withoutVIPs(x)
	}
	return endpoints
}
