package kube

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// A pool can consist of the nodes' own addresses. Its Services share all of them, and each has its ports at every node
// that serves it. For the allocator such a pool has one address of each family, allNodes, so a port belongs to one
// Service, and another one that requests it waits.
//
// The status has an address of each serving node: in each family its first ExternalIP or, without one, its first
// InternalIP. Under Cluster, all nodes serve that are ready and not excluded; under Local, those of them that have a
// ready endpoint. If there is no such node, the next larger set serves, because an empty status would not help clients.
// The leader writes the status again when nodes or endpoints change. A status has at most lb.VIPsPerNodeMax nodes.
//
// No announcer is involved: the service proxy of each node serves the Services' ports at the node's own addresses. It
// leaves out ports that the node itself uses (Options.PortUser), because only that node knows them.

// NodeRanges is lb.Pool.Ranges of a pool of the nodes' addresses. No Service has these addresses in its status.
var NodeRanges = []lb.AddrRange{
	{From: netip.IPv4Unspecified(), To: netip.IPv4Unspecified()},
	{From: netip.IPv6Unspecified(), To: netip.IPv6Unspecified()},
}

// allNodes stands for the addresses of all nodes in the family of a.
func allNodes(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// nodeShare is the share key of all Services in a pool of nodes.
const nodeShare = "node"

// poolNode is a node whose addresses may be in a status.
type poolNode struct {
	name  string
	addrs []netip.Addr // at most one of each family
	ready bool
}

// poolNodeOf returns a node with its addresses.
func poolNodeOf(n *core.Node) poolNode {
	out := poolNode{name: n.Name, ready: slices.ContainsFunc(n.Status.Conditions, func(c core.NodeCondition) bool {
		return c.Type == core.NodeReady && c.Status == core.ConditionTrue
	})}
	for _, a := range append(addressesOfType(n, core.NodeExternalIP), nodeAddresses(n)...) {
		if isHost(a) && !slices.ContainsFunc(out.addrs, func(o netip.Addr) bool { return o.Is4() == a.Is4() }) {
			out.addrs = append(out.addrs, a)
		}
	}
	return out
}

// portInUseError says that another Service has a port of the nodes.
type portInUseError string

func (e portInUseError) Error() string { return string(e) }

// onNodes reports whether a Service gets the nodes' addresses: it names the pool, or has no other address and the first
// pool for it is the nodes'. It keeps addresses of nodes when another pool becomes the first.
func (a *assigner) onNodes(s *core.Service) bool {
	if s.Spec.LoadBalancerIP != "" || annotation(s, wantAddresses) != "" {
		return false
	}
	has, named := statusAddresses(s), annotation(s, wantPool)
	if named == "" && slices.ContainsFunc(has, func(x netip.Addr) bool { return poolOf(a.pools, x) != nil }) {
		return false
	}
	for _, p := range a.pools {
		switch {
		case !p.serves(s) || named != "" && p.Name != named || named == "" && !p.AutoAssign:
		case p.Nodes:
			return true
		case !slices.ContainsFunc(has, a.isNode):
			return false
		}
	}
	return false
}

// isNode reports whether an address is a node's.
func (a *assigner) isNode(x netip.Addr) bool {
	return slices.ContainsFunc(a.poolNodes, func(n poolNode) bool { return slices.Contains(n.addrs, x) })
}

// holder is like the function of this name, but with the share key of the nodes' pool.
func (a *assigner) holder(s *core.Service) lb.Holder { return a.inPool(s, holder(s)) }

// has is like holds, but with the share key of the nodes' pool.
func (a *assigner) has(s *core.Service) lb.Holder { return a.inPool(s, holds(s)) }

func (a *assigner) inPool(s *core.Service, h lb.Holder) lb.Holder {
	if a.onNodes(s) {
		h.ShareKey = nodeShare
	}
	return h
}

// requestNodes completes the request of a Service for the nodes' addresses.
func (a *assigner) requestNodes(r *lb.Request) error {
	if len(r.Ports) > sharedPortsMax {
		return fmt.Errorf("a Service at the nodes' addresses can have at most %d ports", sharedPortsMax)
	}
	r.PerFamily = 1
	r.Families = slices.DeleteFunc(r.Families, func(f lb.FamilyRequest) bool {
		return !slices.ContainsFunc(a.poolNodes, func(n poolNode) bool {
			return slices.ContainsFunc(n.addrs, func(x netip.Addr) bool { return lb.FamilyOf(x) == f.Family })
		})
	})
	if len(r.Families) == 0 {
		return errors.New("no node has an address for this Service: see spec.ipFamilies; nodes with the label " +
			labelExclude + " do not count, unless ignore_exclude_label = true in [kubernetes]")
	}
	for _, f := range r.Families {
		for _, p := range NodeRanges {
			if lb.FamilyOf(p.From) == f.Family {
				r.Addresses = append(r.Addresses, p.From)
			}
		}
	}
	return nil
}

// expand replaces allNodes by the addresses of the nodes that serve a Service.
func (a *assigner) expand(s *core.Service, addrs []netip.Addr) (all []netip.Addr) {
	serving := a.poolNodes
	narrow := func(to func(poolNode) bool) {
		if slices.ContainsFunc(serving, to) {
			serving = slices.DeleteFunc(slices.Clone(serving), func(n poolNode) bool { return !to(n) })
		}
	}
	narrow(func(n poolNode) bool { return n.ready })
	if isLocal(s) && a.readyOn != nil {
		on := a.readyOn(nameOf(s))
		narrow(func(n poolNode) bool { return on[n.name] })
	}
	for _, addr := range addrs {
		if !addr.IsUnspecified() {
			all = append(all, addr)
			continue
		}
		most := len(all) + lb.VIPsPerNodeMax
		for _, n := range serving {
			for _, x := range n.addrs {
				if allNodes(x) == addr && len(all) < most {
					all = append(all, x)
				}
			}
		}
	}
	return all
}

// given returns the addresses that the allocator has given to a Service.
func (a *assigner) given(s *core.Service) []netip.Addr {
	given := a.alloc.Given(nameOf(s))
	if slices.ContainsFunc(given, netip.Addr.IsUnspecified) {
		return statusAddresses(s)
	}
	return given
}

// explainNodes says that another Service has a port of the nodes.
func explainNodes(e *lb.AssignError) error {
	return portInUseError(fmt.Sprintf("port %s of the nodes belongs to %s; the Service waits until it is free",
		portText(e.Port), e.Service))
}

// setPoolNodes sets the nodes whose addresses a pool may have.
func (a *Allocator) setPoolNodes(all []poolNode) {
	slices.SortFunc(all, func(x, y poolNode) int { return strings.Compare(x.name, y.name) })
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.poolNodes != nil && slices.EqualFunc(a.poolNodes, all, poolNode.equal) {
		return
	}
	if a.poolNodes = all; a.term != nil {
		a.term.locked(func() {
			if a.term.assigner.poolNodes = all; hasNodes(a.term.assigner.pools) {
				a.term.queueAll()
			}
		})
	}
}

func (n poolNode) equal(o poolNode) bool {
	return n.name == o.name && n.ready == o.ready && slices.Equal(n.addrs, o.addrs)
}

func hasNodes(pools []Pool) bool {
	return slices.ContainsFunc(pools, func(p Pool) bool { return p.Nodes })
}

// needAnnouncer reports whether a pool has addresses that must be announced.
func needAnnouncer(pools []Pool) bool {
	return slices.ContainsFunc(pools, func(p Pool) bool { return !p.Nodes })
}
