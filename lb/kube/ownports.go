package kube

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// This file serves Services at this node's own addresses, for pools of the nodes' addresses (nodepool.go).

// usedEvery is the time between checks for ports that the node has begun or ceased to use. A process that starts to
// listen at a Service's port gets the port: it may be sshd, which was being restarted when the Service was created.
const usedEvery = 15 * time.Second

// ofNodes reports whether an address in a Service's status is left to the node that has it.
func ofNodes(pools []Pool, s *core.Service, a netip.Addr) bool {
	return poolOf(pools, a) == nil && slices.ContainsFunc(pools, func(p Pool) bool { return p.Nodes && p.serves(s) })
}

// ownAddresses returns all addresses of a node. Clients may arrive at any of them: a cloud may translate the
// ExternalIP, which is in the status, to the InternalIP.
func ownAddresses(n *core.Node) []netip.Addr {
	if n == nil {
		return nil
	}
	return slices.DeleteFunc(append(nodeAddresses(n), addressesOfType(n, core.NodeExternalIP)...),
		func(a netip.Addr) bool { return !isHost(a) })
}

// atNode separates the addresses in a Service's status. own lists this node's addresses if the Service has one of them,
// in the same families. Other nodes serve theirs themselves, without the ports that they use.
func atNode(s *core.Service, vips, node []netip.Addr, pools []Pool) (others, own []netip.Addr) {
	if len(node) == 0 || !hasNodes(pools) {
		return vips, nil
	}
	var has []bool // families: whether IPv4
	for _, a := range vips {
		switch {
		case !ofNodes(pools, s, a):
			others = append(others, a)
		case slices.Contains(node, a):
			has = append(has, a.Is4())
		}
	}
	for _, a := range node {
		if slices.Contains(has, a.Is4()) {
			own = append(own, a)
		}
	}
	return others, own
}

// withoutUsed marks the rules for ports that this node uses itself.
func (s *Source) withoutUsed(rules []nodeRule) []nodeRule {
	if s.o.PortUser == nil {
		return rules
	}
	for i := range rules {
		if r := &rules[i]; r.kind == ruleNode {
			r.inUse = s.o.PortUser(netip.AddrPortFrom(r.Addr, r.Port), r.Protocol)
		}
	}
	return rules
}

// tellUsed reports the ports of a Service that this node does not serve because it uses them.
func (s *Source) tellUsed(name string, rules []nodeRule) {
	var all []string
	told := map[lb.Port]bool{}
	delete(s.passed.atNode, name)
	for _, r := range rules {
		if r.kind != ruleNode {
			continue
		}
		s.passed.atNode[name] = true
		if p := (lb.Port{Port: r.Port, Protocol: r.Protocol}); r.inUse != "" && !told[p] {
			told[p] = true
			all = append(all, fmt.Sprintf("the node %s does not serve port %s: %s", s.o.Node, portText(p), r.inUse))
		}
	}
	s.o.Boundary.Report(lb.PartPort, name, strings.Join(all, "; "))
}

// passUsed passes on the rules of Services at this node's addresses again, because the node may use other ports now.
func (s *Source) passUsed() {
	s.queue.AddAfter(usedPorts, usedEvery)
	s.passChanged(slices.Collect(maps.Keys(s.passed.atNode))...)
}
