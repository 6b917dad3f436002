package kube

import (
	"errors"
	"net/netip"
	"slices"
	"strings"

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
	top := topology{node: s.o.Node, zone: zoneOf(s.node())}
	var services []*core.Service
	for _, x := range s.services.List() {
		if service := x.(*core.Service); handled(service) {
			services = append(services, service)
		}
	}
	slices.SortFunc(services, func(a, b *core.Service) int { return strings.Compare(nameOf(a), nameOf(b)) })
	rules := proxy.Rules{}
	for _, service := range services {
		addRules(rules, service, s.slicesIn(nameOf(service)), top, s.o.MaxEndpoints)
	}
	return rules
}

// addRules adds the rules for each address and port of a Service (pkg/proxy/topology.go, pkg/proxy/serviceport.go). It
// uses at most most pairs of endpoint and port. If two Services have the same address and port, one with endpoints has
// precedence.
func addRules(rules proxy.Rules, s *core.Service, endpoints []*endpointSlice, top topology, most int) {
	found := findPairs(s, endpoints, most)
	internalLocal := s.Spec.InternalTrafficPolicy != nil &&
		*s.Spec.InternalTrafficPolicy == core.ServiceInternalTrafficPolicyLocal
	var clusterIPs []netip.Addr
	for _, text := range s.Spec.ClusterIPs {
		if a, err := netip.ParseAddr(text); err == nil {
			clusterIPs = append(clusterIPs, a)
		}
	}
	for i, p := range s.Spec.Ports {
		number, ok := portOfSpec(p)
		if !ok {
			continue
		}
		for _, is4 := range []bool{true, false} {
			if !slices.ContainsFunc(clusterIPs, func(a netip.Addr) bool { return a.Is4() == is4 }) {
				continue // the Service is not of this family
			}
			c := choose(found.within(found.of[portFamily{i, is4}]), top)
			cluster, local := c.rule(c.cluster), c.rule(c.local)
			internal := proxy.Rule{Service: proxy.NameOf(nameOf(s), p.Name), Inside: cluster}
			external := internal
			external.Outside = cluster
			if internalLocal {
				internal.Inside = local
			}
			if isLocal(s) {
				external.Outside = local
			}
			put := func(addrs []netip.Addr, port int32, rule proxy.Rule) {
				for _, a := range addrs {
					to := proxy.Destination{Addr: a, Port: uint16(port), Protocol: number.Protocol}
					if a.Is4() == is4 && (len(rule.Inside.Endpoints) > 0 || len(rules[to].Inside.Endpoints) == 0) {
						rules[to] = rule
					}
				}
			}
			put(clusterIPs, p.Port, internal)
			put(slices.Concat(externalIPsOf(s), addressesOf(s)), p.Port, external)
			if p.NodePort != 0 {
				put([]netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}, p.NodePort, external)
			}
		}
	}
}

// rule returns the choice from some of the endpoints.
func (c choice) rule(from []endpoint) proxy.Choice {
	if len(from) == 0 && !c.usable {
		return proxy.Choice{Empty: proxy.Refused}
	}
	if len(from) == 0 {
		return proxy.Choice{Empty: proxy.Dropped}
	}
	var out proxy.Choice
	for _, e := range from {
		out.Endpoints = append(out.Endpoints, e.at)
	}
	return out
}
