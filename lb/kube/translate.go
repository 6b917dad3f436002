package kube

import (
	"cmp"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	netutils "k8s.io/utils/net"

	"github.com/steelyard-lb/steelyard/lb"
)

// Labels of Services that another proxy serves, and of headless ones (pkg/proxy/apis/well_known_labels.go).
const (
	labelProxyName = "service.kubernetes.io/service-proxy-name"
	labelHeadless  = "service.kubernetes.io/headless"
)

// handled reports whether nodes serve a Service: it has ports, is not headless, and has no other proxy.
func handled(s *core.Service) bool {
	_, proxied := s.Labels[labelProxyName]
	_, headless := s.Labels[labelHeadless]
	return !proxied && !headless && len(s.Spec.Ports) > 0 &&
		s.Spec.ClusterIP != core.ClusterIPNone && s.Spec.Type != core.ServiceTypeExternalName
}

// classOf returns the spec.loadBalancerClass of a Service, or "" if it has none.
func classOf(s *core.Service) string {
	if s.Spec.LoadBalancerClass == nil {
		return ""
	}
	return *s.Spec.LoadBalancerClass
}

// matchesClass reports whether a Service gets addresses from this agent: its type is LoadBalancer, and its class is one
// of these. Without classes, the Service must have none either.
func matchesClass(s *core.Service, classes ...string) bool {
	return s.Spec.Type == core.ServiceTypeLoadBalancer &&
		(slices.Contains(classes, classOf(s)) || len(classes) == 0 && classOf(s) == "")
}

// addressesOf returns the addresses in a Service's status that nodes serve: those with ipMode VIP, the default. If a
// Service is being deleted and lacks our finalizer, its addresses may be assigned to another one.
func addressesOf(s *core.Service) (vips []netip.Addr) {
	if isReleased(s) {
		return nil
	}
	for _, i := range s.Status.LoadBalancer.Ingress {
		if i.IPMode != nil && *i.IPMode != core.LoadBalancerIPModeVIP {
			continue
		}
		if a, err := netip.ParseAddr(i.IP); err == nil && !slices.Contains(vips, a.Unmap()) {
			vips = append(vips, a.Unmap())
		}
	}
	return vips
}

// maxExternalIPs is how many spec.externalIPs are read. A Service can contain 100,000. At each change these would have
// to be compared with each other and with the addresses of all Services that have one of them.
const maxExternalIPs = 100

// externalIPsOf returns the first maxExternalIPs of spec.externalIPs.
func externalIPsOf(s *core.Service) (addrs []netip.Addr) {
	for _, text := range s.Spec.ExternalIPs[:min(len(s.Spec.ExternalIPs), maxExternalIPs)] {
		if a, err := netip.ParseAddr(text); err == nil && !slices.Contains(addrs, a.Unmap()) {
			addrs = append(addrs, a.Unmap())
		}
	}
	return addrs
}

func isLocal(s *core.Service) bool {
	return s.Spec.ExternalTrafficPolicy == core.ServiceExternalTrafficPolicyLocal
}

func policyOf(s *core.Service) lb.Policy {
	if isLocal(s) {
		return lb.PolicyLocal
	}
	return lb.PolicyCluster
}

// view is a Service as one node serves it.
type view struct {
	service    *lb.Service
	ports      []portKey // of service.Ports
	readyLocal int       // number of addresses of ready endpoints on this node, in the family with more
	spread     bool
	noEndpoint bool                   // no usable endpoint on any node
	unserved   map[lb.Family]withheld // families that are withheld individually
	announced  bool                   // by this node until now, as far as that depends on the node
	pairs      int                    // number of pairs of endpoint and port in the whole cluster
	kept       bool                   // the endpoints are from before an interruption
	some       bool                   // there are too many pairs to examine all
	targets    targets
	settings   settings
	unranged   bool // another Service has a port at one of the addresses, so port ranges are not served
}

// withheld says why the addresses of a family are not announced. intended means that this node is not at fault.
type withheld struct {
	reason   string
	intended bool
}

// translate returns the view of s with these VIPs from top's node. shared means that another Service has one of the
// VIPs, so packets may arrive at a node without an endpoint of s, under either policy. spread means that one node
// receives all packets and spreads them over the nodes with endpoints although the policy is Local. If there are more
// than most pairs of endpoint and port, translate uses some of them.
func translate(
	s *core.Service, set settings, vips []netip.Addr, endpoints []*endpointSlice, top topology, shared, spread bool,
	most int,
) *view {
	local := isLocal(s) && !spread
	out := &lb.Service{
		Name: nameOf(s), Source: Name, VIPs: vips, Method: lb.MethodNAT, Policy: policyOf(s), Affinity: affinityOf(s),
		Algorithm:  cmp.Or(set.algorithm, lb.AlgorithmMaglev),
		MinHealthy: 1, Check: lb.CheckSpec{Type: lb.CheckNone}, Allow: allowed(s), VIPPerNode: isPerNode(s),
	}
	// With affinity or source-hash, all nodes select the same node for a client, because a router may send its
	// connections to several nodes.
	agree := (out.Affinity != 0 || set.algorithm == lb.AlgorithmSourceHash) && top.nodes[top.node].IsValid()
	readyLocal := map[bool]map[netip.Addr]struct{}{true: {}, false: {}} // by whether IPv4
	var ports []portKey
	to := targets{}
	found := findPairs(s, endpoints, most)
	usable, hinted := map[bool]bool{}, false // hinted: hints or lost nodes have restricted the choice for any port
	for i, p := range s.Spec.Ports {
		number, ok := portOfSpec(p)
		if !ok {
			continue
		}
		port := lb.ServicePort{Port: number, Kept: []netip.AddrPort{}}
		port.Last, port.Target = set.ranges[number], number.Port
		var both []endpoint // for both families
		for _, is4 := range []bool{true, false} {
			all := found.of[portFamily{i, is4}]
			if more := port.End() - number.Port; more > 0 {
				all = filter(all, func(e endpoint) bool { return e.at.Port() <= math.MaxUint16-more })
			}
			c := choose(found.within(all), top)
			use := c.cluster
			switch {
			case isLocal(s) && (agree || spread):
				// Endpoints that are not on a known node would not see the client's address.
				use = filter(c.anywhere, func(e endpoint) bool { return top.nodes[e.node].IsValid() })
			case agree:
				use = c.anywhere
			case local && (len(c.local) > 0 || !shared || top.nodes == nil):
				use = c.local
			}
			hinted = hinted || slices.ContainsFunc(use, top.isLost)
			to.add(use, is4, top)
			use = reachable(use, top)
			port.Backends = append(port.Backends, backendsFor(use, top)...)
			if port.Protocol == lb.UDP {
				port.Backends = append(port.Backends, ended(all)...)
				all = reachable(withFlows(all), top) // a datagram goes first to the node that may have its flow
			}
			port.Kept = append(port.Kept, others(all, use)...)
			both = append(both, all...)
			usable[is4] = usable[is4] || c.usable
			hinted = hinted || c.hinted
			// Under Local, if usable endpoints exist only on other nodes, packets are dropped: the client retries, and
			// the router may select another node. If the cluster has no usable endpoint, connections are refused.
			if local && len(use) == 0 && c.usable {
				port.DropWhenEmpty = append(port.DropWhenEmpty, family(is4))
			}
			for _, e := range c.local[:c.readyLocal] {
				readyLocal[is4][e.at.Addr()] = struct{}{}
			}
		}
		port.Nodes = nodesOf(both, top)
		out.Ports = append(out.Ports, port)
		ports = append(ports, portKey{p.Name, protocolOf(&p.Protocol)})
	}
	if top.nodes != nil && everyNodeKnown(out.Ports) {
		out.NodeForwarding = lb.NodeForwarding{Enabled: true, AnyNode: !agree && (isLocal(s) || hinted)}
	} else {
		for i := range out.Ports {
			out.Ports[i].Nodes = nil
		}
	}
	v := &view{
		service: out, ports: ports, spread: spread, pairs: found.n, some: found.some, targets: to, settings: set,
		noEndpoint: !usable[true] && !usable[false], unserved: map[lb.Family]withheld{},
		readyLocal: max(len(readyLocal[true]), len(readyLocal[false])),
	}
	for _, is4 := range []bool{true, false} {
		switch {
		case !usable[is4]:
			v.unserved[family(is4)] = withheld{lb.NoEndpoint + " of " + family(is4).String(), true}
		case local && len(readyLocal[is4]) == 0:
			v.unserved[family(is4)] = withheld{lb.NoLocalEndpoint, true}
		}
	}
	return v
}

func family(is4 bool) lb.Family {
	if is4 {
		return lb.IPv4
	}
	return lb.IPv6
}

// affinityOf returns the timeout of sessionAffinity ClientIP, or 0 without it.
func affinityOf(s *core.Service) time.Duration {
	if s.Spec.SessionAffinity != core.ServiceAffinityClientIP {
		return 0
	}
	seconds := core.DefaultClientIPServiceAffinitySeconds
	if c := s.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
		seconds = *c.ClientIP.TimeoutSeconds
	}
	return time.Duration(seconds) * time.Second
}

// everyNodeKnown reports whether each backend has a node. Endpoints in slices written by hand may have none.
func everyNodeKnown(ports []lb.ServicePort) bool {
	for _, p := range ports {
		for _, b := range p.Backends {
			if !b.Node.IsValid() && !b.Deleted {
				return false
			}
		}
	}
	return true
}

// allowed returns spec.loadBalancerSourceRanges. A family with no range in it is unrestricted
// (pkg/proxy/serviceport.go).
func allowed(s *core.Service) (list []netip.Prefix) {
	for _, text := range s.Spec.LoadBalancerSourceRanges {
		if p, ok := rangeOf(strings.TrimSpace(text)); ok { // the API server validates them
			list = append(list, p)
		}
	}
	if len(list) == 0 {
		return nil
	}
	for _, all := range []string{"0.0.0.0/0", "::/0"} {
		p := netip.MustParsePrefix(all)
		if !slices.ContainsFunc(list, func(o netip.Prefix) bool { return o.Addr().Is4() == p.Addr().Is4() }) {
			list = append(list, p)
		}
	}
	return list
}

// rangeOf parses a range like the API server and kube-proxy, which also accept "010.0.0.0/8" and "::ffff:10.0.0.0/104".
func rangeOf(text string) (netip.Prefix, bool) {
	_, n, err := netutils.ParseCIDRSloppy(text)
	if err != nil {
		return netip.Prefix{}, false
	}
	addr, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	if addr.Is4In6() && bits >= 96 {
		addr, bits = addr.Unmap(), bits-96
	}
	return netip.PrefixFrom(addr, bits), ok
}
