package kube

import (
	"cmp"
	"errors"
	"net/netip"
	"slices"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube/proxy"
)

// ProxyDiff returns where this agent would choose other endpoints of Services than kube-proxy. It may be called from
// any goroutine.
func (s *Source) ProxyDiff() ([]lb.Change, error) {
	for _, synced := range s.synced {
		if !synced() {
			return nil, errors.New("the Services of the cluster are not known yet")
		}
	}
	kubeProxy, err := proxy.KubeProxy()
	if err != nil {
		return nil, err
	}
	return proxy.Compare(s.proxyRules(), kubeProxy), nil
}

// proxyRules returns what this node does with connections to Services if the agent is its service proxy.
func (s *Source) proxyRules() proxy.Rules {
	all := map[string][]nodeRule{}
	for _, name := range s.services.ListKeys() {
		all[name] = s.rulesOf(name)
	}
	rules := proxy.Rules{}
	for to, r := range firstClaims(all) {
		rule := proxy.Rule{Service: r.Name, Inside: choiceOf(r.Inside)}
		if r.Outside != nil {
			rule.Outside = choiceOf(*r.Outside)
		}
		rules[to] = rule
	}
	return rules
}

// choiceOf returns the choice in the form in which kube-proxy's is read.
func choiceOf(c lb.NodeChoice) proxy.Choice {
	switch {
	case len(c.Endpoints) > 0:
		return proxy.Choice{Endpoints: c.Endpoints}
	case c.Drop:
		return proxy.Choice{Empty: proxy.Dropped}
	}
	return proxy.Choice{Empty: proxy.Refused}
}

// nodeRule is a rule for one destination that a Service claims. Outside is set for all addresses that other machines
// may connect to, also for VIPs.
type nodeRule struct {
	lb.NodeRule
	kind    ruleKind
	service *core.Service
	inUse   string // why this node does not serve the port, or ""
}

// ruleKind says what the destination of a rule is.
type ruleKind int

const (
	ruleOwn      ruleKind = iota // a ClusterIP or a node port, which the API server gives to one Service only
	ruleVIP                      // an address in the status
	ruleNode                     // an address of this node, which is in the status
	ruleExternal                 // in spec.externalIPs
)

func (r *nodeRule) to() proxy.Destination {
	return proxy.Destination{Addr: r.Addr, Port: r.Port, Protocol: r.Protocol}
}

// compareRules orders rules for one destination. An address that the API server gave to a Service stays its own. A
// Service with endpoints precedes one without, as with kube-proxy.
func compareRules(a, b *nodeRule) int {
	empty := func(r *nodeRule) bool { return len(r.Inside.Endpoints) == 0 }
	return cmp.Or(
		compareBool(a.kind != ruleOwn, b.kind != ruleOwn),
		compareBool(empty(a), empty(b)),
		compareClaims(claim{a.service, a.kind == ruleExternal}, claim{b.service, b.kind == ruleExternal}),
	)
}

// firstClaims returns the rule that applies to each destination.
func firstClaims(all map[string][]nodeRule) map[proxy.Destination]*nodeRule {
	first := map[proxy.Destination]*nodeRule{}
	for _, rules := range all {
		for i := range rules {
			r := &rules[i]
			if r.inUse != "" {
				continue
			}
			if other := first[r.to()]; other == nil || compareRules(r, other) < 0 {
				first[r.to()] = r
			}
		}
	}
	return first
}

// rulesOf returns the rules that a Service claims, none if this node does not serve it. It may be called from any
// goroutine.
func (s *Source) rulesOf(name string) []nodeRule {
	service := s.Service(name)
	if service == nil || !handled(service) {
		return nil
	}
	own, pools := s.node(), *s.pools.Load()
	top := topology{node: s.o.Node, zone: zoneOf(own)}
	if matchesClass(service, s.o.Classes...) {
		top.own = ownAddresses(own)
	}
	return s.withoutUsed(rulesFor(service, s.slicesIn(name), top, pools, &s.o))
}

// rulesFor returns the rules for each address and port of a Service (pkg/proxy/topology.go, pkg/proxy/serviceport.go).
// They use at most o.MaxEndpoints pairs of endpoint and port.
func rulesFor(
	s *core.Service, endpoints []*endpointSlice, top topology, pools []Pool, o *Options,
) (rules []nodeRule) {
	found := findPairs(s, endpoints, o.MaxEndpoints)
	isNoHost := func(a netip.Addr) bool { return !isHost(a) } // such as 0.0.0.0, which means node ports here
	clusterIPs, allow := parsed(s.Spec.ClusterIPs), allowed(s)
	vips, own := atNode(s, slices.DeleteFunc(addressesOf(s), isNoHost), top.own, pools)
	ports := holds(s).Ports
	pooled := func(a netip.Addr) bool { return poolOf(pools, a) != nil }
	// Kubernetes lets every Service have any address (CVE-2020-8554).
	external := slices.DeleteFunc(externalIPsOf(s), func(a netip.Addr) bool {
		anyone := o.AnyExternalIP && !pooled(a)
		return isNoHost(a) || slices.Contains(vips, a) || !anyone && !permitsExternal(pools, s, a)
	})
	internalLocal := s.Spec.InternalTrafficPolicy != nil &&
		*s.Spec.InternalTrafficPolicy == core.ServiceInternalTrafficPolicyLocal
	for i, p := range s.Spec.Ports {
		number, ok := portOfSpec(p)
		if !ok {
			continue
		}
		for _, is4 := range []bool{true, false} {
			if !slices.ContainsFunc(clusterIPs, func(a netip.Addr) bool { return a.Is4() == is4 }) {
				continue // the Service is not of this family
			}
			all := found.of[portFamily{i, is4}]
			c := choose(found.within(all), top)
			cluster, local := c.node(c.cluster), c.node(c.local)
			outside := &cluster
			if isLocal(s) {
				outside = &local
			}
			add := func(kind ruleKind, port int32, r lb.NodeRule, addrs ...netip.Addr) {
				r.Name, r.Affinity = proxy.NameOf(nameOf(s), p.Name), affinityOf(s)
				r.Port, r.Protocol = uint16(port), number.Protocol
				switch r.Protocol {
				case lb.UDP:
					r.Serving = c.node(withFlows(all)).Endpoints
				case lb.TCP:
					r.Ending = c.node(filter(all, func(e endpoint) bool { return e.terminating })).Endpoints
				}
				for _, r.Addr = range addrs {
					if r.Addr.Is4() == is4 {
						r.Whole = r.ClusterIP || pooled(r.Addr)
						rules = append(rules, nodeRule{NodeRule: r, kind: kind, service: s})
					}
				}
			}
			internal := cluster
			if internalLocal {
				internal = local
			}
			add(ruleOwn, p.Port, lb.NodeRule{Inside: internal, ClusterIP: true}, clusterIPs...)
			add(ruleVIP, p.Port, lb.NodeRule{Inside: cluster, Outside: outside, Allow: allow}, vips...)
			if slices.Contains(ports, number) { // otherwise it is another Service's at the nodes
				add(ruleNode, p.Port, lb.NodeRule{Inside: cluster, Outside: outside, Allow: allow}, own...)
			}
			add(ruleExternal, p.Port, lb.NodeRule{Inside: cluster, Outside: outside}, external...)
			if p.NodePort != 0 {
				add(ruleOwn, p.NodePort, lb.NodeRule{Inside: cluster, Outside: outside},
					netip.IPv4Unspecified(), netip.IPv6Unspecified())
			}
		}
	}
	return rules
}

// node returns the choice from some of the endpoints.
func (c choice) node(from []endpoint) lb.NodeChoice {
	out := lb.NodeChoice{Drop: len(from) == 0 && c.usable}
	for _, e := range from {
		out.Endpoints = append(out.Endpoints, e.at)
	}
	return out
}
