package kube

import (
	"fmt"
	"net/netip"
	"slices"

	core "k8s.io/api/core/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// ofIPv6 is the suffix of the key of a service's second check, of its health check node port over IPv6.
const ofIPv6 = "/IPv6"

// nodePorts checks a service's health check node port over each family in which the service has an address and a ready
// endpoint on this node. kube-proxy serves the families separately, each with its own port and endpoint count.
// nodePorts returns why all addresses are withheld, or "". If only one family fails, it sets v.unserved.
func (c *conditions) nodePorts(s *core.Service, v *view, node *core.Node) (reason string) {
	failed, works := map[lb.Family]string{}, false
	for _, f := range []lb.Family{lb.IPv4, lb.IPv6} {
		key := v.service.Name
		if f == lb.IPv6 {
			key += ofIPv6
		}
		_, unserved := v.unserved[f]
		if unserved || !slices.ContainsFunc(v.service.VIPs, func(a netip.Addr) bool { return lb.FamilyOf(a) == f }) {
			c.stopOne(key)
			continue
		}
		at := netip.AddrPortFrom(c.addressOf(node, f), uint16(s.Spec.HealthCheckNodePort))
		if why := c.nodePort(key, v, at); why == "" {
			works = true
		} else {
			failed[f] = why
			if reason == "" {
				reason = why
			}
		}
	}
	if !works {
		return reason
	}
	for f, why := range failed {
		v.unserved[f] = withheld{reason: why}
	}
	return ""
}

// nodePort checks a health check node port of this node as an external load balancer does: at the Node's address,
// because kube-proxy may listen only there (nodePortAddresses "primary"). If the service is already announced when the
// port is new, for example after a policy change, it stays announced until the check fails, because the proxy opens the
// port later.
func (c *conditions) nodePort(key string, v *view, at netip.AddrPort) string {
	check := lb.Check{
		Key: lb.CheckKey{Service: key}, Target: at, Spec: v.settings.probe(c.now().Probe), Presumed: v.announced,
	}
	check.Spec.Type, check.Spec.Path, check.Spec.Body = lb.CheckNodePort, "/healthz", v.service.Name
	c.start(check)
	return c.reason(key, fmt.Sprintf("health check node port %d", at.Port()))
}

// addressOf returns this node's address in a family, or its first address if it has none.
func (c *conditions) addressOf(node *core.Node, f lb.Family) netip.Addr {
	addrs := []netip.Addr{c.o.Address}
	if node != nil {
		addrs = append(nodeAddresses(node), addrs...)
	}
	i := slices.IndexFunc(addrs, func(a netip.Addr) bool { return a.IsValid() && lb.FamilyOf(a) == f })
	return addrs[max(i, 0)]
}
