package kube

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// Labels with which a Service says that others look after it (pkg/proxy/apis/well_known_labels.go).
const (
	labelProxyName = "service.kubernetes.io/service-proxy-name"
	labelHeadless  = "service.kubernetes.io/headless"
)

// handled reports whether nodes may serve a Service: nobody else looks after it, and it is not headless.
func handled(s *core.Service) bool {
	_, proxied := s.Labels[labelProxyName]
	_, headless := s.Labels[labelHeadless]
	return !proxied && !headless && s.Spec.ClusterIP != core.ClusterIPNone && s.Spec.Type != core.ServiceTypeExternalName && len(s.Spec.Ports) > 0
}

// ours reports whether a Service is to have addresses from us: of type LoadBalancer, and of our class.
func ours(s *core.Service, class string) bool {
	if s.Spec.Type != core.ServiceTypeLoadBalancer {
		return false
	}
	if s.Spec.LoadBalancerClass == nil {
		return class == ""
	}
	return *s.Spec.LoadBalancerClass == class
}

// addressesOf returns the addresses of a Service that nodes are to serve: those of its status whose ipMode is VIP, the default.
func addressesOf(s *core.Service) (vips []netip.Addr) {
	for _, i := range s.Status.LoadBalancer.Ingress {
		if i.IPMode != nil && *i.IPMode != core.LoadBalancerIPModeVIP {
			continue
		}
		if a, err := netip.ParseAddr(i.IP); err == nil && !slices.Contains(vips, a) {
			vips = append(vips, a)
		}
	}
	return vips
}

// externalsOf returns spec.externalIPs.
func externalsOf(s *core.Service) (addrs []netip.Addr) {
	for _, text := range s.Spec.ExternalIPs {
		if a, err := netip.ParseAddr(text); err == nil && !slices.Contains(addrs, a) {
			addrs = append(addrs, a)
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

// view is what one node makes of a Service.
type view struct {
	service   *lb.Service
	readyHere int // ready endpoints on this node, by address, of the family that has more
}

// translate returns what this node is to do for s at these addresses. Shared says that another Service has one of
// its addresses, too: then packets may arrive where it has no endpoint, whatever its policy is.
func translate(s *core.Service, vips []netip.Addr, endpoints []*discovery.EndpointSlice, at place, shared bool) *view {
	out := &lb.Service{
		Name: s.Namespace + "/" + s.Name, Source: Name, VIPs: vips, Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT,
		Policy: policyOf(s), MinHealthy: 1, Check: lb.CheckSpec{Type: lb.CheckNone}, Allow: allowed(s, vips),
	}
	if s.Spec.SessionAffinity == core.ServiceAffinityClientIP {
		out.Affinity = time.Duration(core.DefaultClientIPServiceAffinitySeconds) * time.Second
		if c := s.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
			out.Affinity = time.Duration(*c.ClientIP.TimeoutSeconds) * time.Second
		}
	}
	readyHere := map[bool]map[netip.Addr]bool{true: {}, false: {}} // by whether IPv4
	some, somewhere, hinted := false, false, false
	for _, p := range s.Spec.Ports {
		port := lb.ServicePort{Port: lb.Port{Port: uint16(p.Port), Target: uint16(p.Port)}}
		if port.Protocol.UnmarshalText([]byte(strings.ToLower(string(protocolOf(&p.Protocol))))) != nil {
			continue
		}
		var there []endpoint
		for _, is4 := range []bool{true, false} {
			all := endpointsOf(endpoints, p, is4)
			c := choose(all, at)
			use := c.cluster
			if isLocal(s) && (len(c.local) > 0 || !shared || at.nodes == nil) {
				use = c.local
			}
			use = reachable(use, at)
			port.Backends = append(port.Backends, backendsFor(use, at)...)
			there = append(there, all...)
			some, somewhere, hinted = some || len(use) > 0, somewhere || c.anywhere, hinted || c.ours
			for _, e := range c.local[:c.readyHere] {
				readyHere[is4][e.at.Addr()] = true
			}
		}
		port.Nodes = nodesOf(there, at)
		out.Ports = append(out.Ports, port)
	}
	if at.nodes != nil && everyNodeKnown(out.Ports) {
		out.NodeForwarding = lb.NodeForwarding{Enabled: true, AnyNode: isLocal(s) || hinted}
	} else {
		for i := range out.Ports {
			out.Ports[i].Nodes = nil
		}
	}
	// Local, and endpoints are elsewhere only: dropped, for the client is to try another node; with none anywhere refused.
	out.DropWhenEmpty = isLocal(s) && !some && somewhere
	return &view{service: out, readyHere: max(len(readyHere[true]), len(readyHere[false]))}
}

// everyNodeKnown reports whether the node of each endpoint is known. EndpointSlices written by hand may name no node.
func everyNodeKnown(ports []lb.ServicePort) bool {
	for _, p := range ports {
		for _, b := range p.Backends {
			if !b.Node.IsValid() {
				return false
			}
		}
	}
	return true
}

// allowed returns loadBalancerSourceRanges. A family of which none is listed is not restricted (pkg/proxy/serviceport.go).
func allowed(s *core.Service, vips []netip.Addr) (list []netip.Prefix) {
	for _, text := range s.Spec.LoadBalancerSourceRanges {
		if p, err := netip.ParsePrefix(strings.TrimSpace(text)); err == nil { // the API server has seen to it
			list = append(list, p.Masked())
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
