package kube

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// Kubernetes takes most of a minute to notice that a node has lost power. So each node probes the nodes to which it
// sends clients, through the tunnel that carries the clients' packets, with an echo request to a VIP. The other node's
// datapath answers, whether its agent runs or not. A node that does not answer receives no new connections until it
// does. Nothing else changes: neither routes nor the state of Kubernetes.
//
// Each node decides for itself, because only its own path to the other node matters to its clients.

// nodeProbe is the service of the nodes' checks; no Service has this name.
const nodeProbe = "node/tunnel"

const (
	nodeProbeFall = 3 // probes in a row that change the state of a node
	// nodeProbesPerSecond is the limit for all probes of this node: with more nodes, each is probed less often.
	nodeProbesPerSecond = 200
	// nodeProbeDelay is how long to wait for more changes of services before the nodes to probe are chosen again.
	nodeProbeDelay = time.Second
)

// nodeProbes tracks which nodes answer. A node that has never answered does not count as lost, because it may not have
// the VIP yet.
type nodeProbes struct {
	o       Options
	changed func() // nodes are lost, or answer again

	mu      sync.Mutex                // guards all below
	vips    map[netip.Addr]netip.Addr // the VIP at which each node is probed
	results map[netip.Addr]lb.Health  // of nodes that have answered once
}

func newNodeProbes(o Options, changed func()) *nodeProbes {
	return &nodeProbes{o: o, changed: changed, vips: map[netip.Addr]netip.Addr{}, results: map[netip.Addr]lb.Health{}}
}

func (n *nodeProbes) on() bool {
	return n.o.NodeProbe > 0 && n.o.Forward == lb.MethodTunnel && n.o.Prober != nil
}

// targets holds the other nodes to which a service sends packets, or would if they answered, with the families of their
// endpoints.
type targets map[netip.Addr]families

type families struct{ v4, v6 bool }

// has reports whether the family of an address is among them.
func (f families) has(a netip.Addr) bool { return a.Is4() && f.v4 || a.Is6() && f.v6 }

// add adds the nodes of endpoints of one family.
func (t targets) add(use []endpoint, is4 bool, top topology) {
	for _, e := range use {
		node := top.nodes[e.node]
		if !node.IsValid() || e.isLocal(top) {
			continue
		}
		was := t[node]
		t[node] = families{was.v4 || is4, was.v6 || !is4}
	}
}

// follow probes the targets of these services. A node keeps its VIP as long as it has an endpoint of that VIP, because
// it may learn of a new VIP later than this node.
func (n *nodeProbes) follow(services map[string]*lb.Service, of map[string]targets) {
	vips, first := map[netip.Addr]netip.Addr{}, map[netip.Addr]netip.Addr{}
	n.mu.Lock()
	for name, s := range services {
		if !s.NodeForwarding.Enabled {
			continue
		}
		for node, families := range of[name] {
			for _, vip := range s.VIPs {
				if !families.has(vip) {
					continue
				}
				if n.vips[node] == vip {
					vips[node] = vip
				}
				if old, known := first[node]; !known || vip.Less(old) {
					first[node] = vip
				}
			}
		}
	}
	for node, vip := range first {
		if !vips[node].IsValid() {
			vips[node] = vip
		}
	}
	known := len(n.results)
	maps.DeleteFunc(n.results, func(node netip.Addr, _ lb.Health) bool { return !vips[node].IsValid() })
	forgotten := len(n.results) < known
	n.vips = vips
	n.mu.Unlock()
	if forgotten { // a lost node may return
		n.changed()
	}
	every := max(n.o.NodeProbe, time.Duration(len(vips))*time.Second/nodeProbesPerSecond)
	checks := make([]lb.Check, 0, len(vips))
	for node, vip := range vips {
		at := netip.AddrPortFrom(node, 0)
		checks = append(checks, lb.Check{
			Key: lb.CheckKey{Service: nodeProbe, Backend: at}, Target: at, VIP: vip,
			Method: lb.MethodTunnel, Encap: lb.EncapGUE,
			Spec: lb.CheckSpec{
				Type: lb.CheckEcho, Interval: every, Timeout: min(every, time.Second),
				Rise: nodeProbeFall, Fall: nodeProbeFall,
			},
		})
	}
	n.o.Prober.Put(nodeProbe, checks)
}

// probeSoon schedules the choice of probes of other nodes, at once if nodes are probed at a VIP that the service has
// lost, which does not answer.
func (s *Source) probeSoon(old *lb.Service, v *view) {
	if !s.probes.on() {
		return
	}
	delay := nodeProbeDelay
	if old != nil && (v == nil || !slices.Equal(old.VIPs, v.service.VIPs)) && s.probes.usesOne(old.VIPs) {
		delay = 0
	}
	if v != nil {
		s.targets[v.service.Name] = v.targets
	}
	s.queue.AddAfter(probedNodes, delay)
}

// usesOne reports whether a node is probed at one of these VIPs.
func (n *nodeProbes) usesOne(vips []netip.Addr) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, vip := range n.vips {
		if slices.Contains(vips, vip) {
			return true
		}
	}
	return false
}

func (n *nodeProbes) health(h lb.Health) {
	node := h.Key.Backend.Addr()
	n.mu.Lock()
	was, known := n.results[node]
	if !n.vips[node].IsValid() || h.State == lb.StateUnknown || !known && h.State != lb.StateHealthy {
		n.mu.Unlock()
		return
	}
	n.results[node] = h
	n.mu.Unlock()
	switch {
	case known && was.State == h.State:
		return
	case !known:
	case h.State == lb.StateHealthy:
		n.o.Log.Info("node answers through the tunnel again", "address", node)
	default:
		n.o.Log.Warn("node does not answer through the tunnel", "address", node, "reason", h.Reason)
	}
	n.changed()
}

// lost returns the nodes that do not answer, and whether to avoid them. If more than half of several nodes do not
// answer, the fault is probably on this node, and none is avoided.
func (n *nodeProbes) lost() (nodes map[netip.Addr]bool, avoid bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	nodes = map[netip.Addr]bool{}
	for node, h := range n.results {
		if h.State != lb.StateHealthy {
			nodes[node] = true
		}
	}
	return nodes, len(n.results) == 1 || 2*len(nodes) <= len(n.results)
}

// Health records a check result from Options.Prober.
func (s *Source) Health(h lb.Health) {
	if h.Key.Service == nodeProbe {
		s.probes.health(h)
		return
	}
	s.conditions.health(h)
}

// unanswering reports the nodes that do not answer.
func (s *Source) unanswering() []lb.Finding {
	nodes, avoid := s.probes.lost()
	if len(nodes) == 0 {
		return nil
	}
	var names []string
	for _, x := range s.nodes.List() {
		n := x.(*core.Node)
		if all := nodeAddresses(n); len(all) > 0 && nodes[all[0]] {
			names = append(names, fmt.Sprintf("%s (%s)", n.Name, all[0]))
		}
	}
	slices.Sort(names)
	text := strings.Join(names[:min(len(names), 5)], ", ")
	if more := len(names) - 5; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	if avoid {
		return []lb.Finding{lb.FoundNodeUnreachable.About("", "%s: no answer through the tunnel", text)}
	}
	const all = "%d nodes do not answer through the tunnel: %s"
	return []lb.Finding{lb.FoundNodesUnreachable.About("", all, len(names), text)}
}
