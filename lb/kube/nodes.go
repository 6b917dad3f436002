package kube

import (
	"maps"
	"net/netip"
	"slices"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/steelyard-lb/steelyard/lb"
)

// In this file, the source reads Nodes. It ignores most of their fields, because most changes are heartbeats.

// sourcesRetry is the delay before the tunnel sources are set again after an error.
const sourcesRetry = 10 * time.Second

// node returns this node's Node object, or nil if the API server has none.
func (s *Source) node() *core.Node {
	x, ok, err := s.nodes.GetByKey(s.o.Node)
	if err != nil || !ok {
		return nil
	}
	return x.(*core.Node)
}

// Eligible reports whether external load balancers may send traffic to this node (pkg/proxy/node.go): it exists, is not
// being deleted, and is not about to be removed by the autoscaler. It may be called from any goroutine.
func (s *Source) Eligible() bool {
	n := s.node()
	return n != nil && removal(n) == ""
}

// zoneOf returns the zone of a node, or "" if n is nil.
func zoneOf(n *core.Node) string {
	if n == nil {
		return ""
	}
	return labels.Set(n.Labels).Get(core.LabelTopologyZone)
}

// topology returns this node's zone and, with tunnels, the addresses of all nodes.
func (s *Source) topology(own *core.Node) topology {
	top := topology{node: s.o.Node, zone: zoneOf(own)}
	if s.o.Forward != lb.MethodTunnel {
		return top
	}
	if lost, avoid := s.probes.lost(); avoid {
		top.lost = lost
	}
	top.nodes = map[string]netip.Addr{}
	for _, x := range s.nodes.List() {
		n := x.(*core.Node)
		if addrs := nodeAddresses(n); len(addrs) > 0 {
			top.nodes[n.Name] = addrs[0]
		}
	}
	return top
}

// nodeAddresses returns the InternalIPs of a node. Tunnels from other nodes lead to the first one.
func nodeAddresses(n *core.Node) []netip.Addr { return addressesOfType(n, core.NodeInternalIP) }

func addressesOfType(n *core.Node, kind core.NodeAddressType) (addrs []netip.Addr) {
	for _, a := range n.Status.Addresses {
		if addr, err := netip.ParseAddr(a.Address); err == nil && a.Type == kind {
			addrs = append(addrs, addr)
		}
	}
	return addrs
}

// sameNode reports whether two versions of a node are equal in the fields that are read. For other nodes these are the
// addresses and the label that excludes the node.
func (s *Source) sameNode(old, now *core.Node) bool {
	if !slices.Equal(nodeAddresses(old), nodeAddresses(now)) || hasExcludeLabel(old) != hasExcludeLabel(now) {
		return false
	}
	return now.Name != s.o.Node ||
		maps.Equal(old.Labels, now.Labels) && slices.Equal(ownAddresses(old), ownAddresses(now)) &&
			s.conditions.excluded(old) == s.conditions.excluded(now)
}

// readNodes updates the state of the nodes. It returns the names of nodes whose tunnel address changed, or that were
// lost or answer again, and whether this node changed in a way that affects every service.
func (s *Source) readNodes() (changed map[string]bool, all bool) {
	was, old := s.top, s.own
	s.own = s.node()
	if s.o.NodeLabels != nil && s.own != nil && (old == nil || !maps.Equal(old.Labels, s.own.Labels)) {
		s.o.NodeLabels(maps.Clone(s.own.Labels))
	}
	s.top = s.topology(s.own)
	s.excluded.Store(int64(s.allExcluded()))
	changed = map[string]bool{}
	for name, addr := range s.top.nodes {
		if was.nodes[name] != addr || was.lost[addr] != s.top.lost[addr] {
			changed[name] = true
		}
	}
	for name := range was.nodes {
		if _, ok := s.top.nodes[name]; !ok {
			changed[name] = true
		}
	}
	return changed, was.zone != s.top.zone || s.conditions.excluded(old) != s.conditions.excluded(s.own)
}

// followNodes reconciles the services that depend on node changes: those with an endpoint on a changed node.
func (s *Source) followNodes(sink lb.Sink) {
	changed, all := s.readNodes()
	s.setTunnelSources()
	switch {
	case all:
		s.reconcileAll(sink)
	case len(changed) > 0:
		for _, name := range s.servicesOn(changed) {
			s.reconcile(name, sink)
		}
	}
	if s.passed.zone != s.top.zone || !slices.Equal(s.passed.own, ownAddresses(s.own)) {
		s.passAll()
	}
}

// servicesOn returns the services with an endpoint on one of these nodes.
func (s *Source) servicesOn(nodes map[string]bool) []string {
	names := map[string]bool{}
	for _, x := range s.slices.List() {
		slice := x.(*endpointSlice)
		if slices.ContainsFunc(slice.endpoints, func(e endpoint) bool { return nodes[e.node] }) {
			names[slice.service] = true
		}
	}
	return slices.Sorted(maps.Keys(names))
}

// setTunnelSources passes on the addresses of all nodes, the allowed sources of tunnel packets, if they changed. It is
// called again after an error.
func (s *Source) setTunnelSources() {
	if s.o.TunnelSources == nil || s.o.Forward != lb.MethodTunnel && !s.o.FollowNodes {
		return
	}
	addrs := []netip.Addr{}
	for _, x := range s.nodes.List() {
		addrs = append(addrs, nodeAddresses(x.(*core.Node))...)
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	if s.tunnelSources != nil && slices.Equal(addrs, s.tunnelSources) {
		return
	}
	if err := s.o.TunnelSources(addrs); err != nil {
		s.o.Log.Error("tunnel sources not set", "err", err)
		s.queue.AddAfter(anyNode, sourcesRetry)
		return
	}
	s.tunnelSources = addrs
}
