package config

import (
	"regexp"

	"github.com/steelyard-lb/steelyard/lb"
)

func defaultKubernetes() *Kubernetes {
	return &Kubernetes{
		Allocate: true, Proxy: ProxyAuto, Forward: lb.MethodTunnel, MaxEndpointsPerService: 10000,
	}
}

// className matches load balancer classes that the API server accepts: a label-style name with or without a prefix.
var className = regexp.MustCompile(`^([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)

func (d *decoder) kubernetes(t *table) *Kubernetes {
	k := defaultKubernetes()
	k.Kubeconfig = t.str("kubeconfig", "", "/etc/steelyard/kubeconfig")
	if k.Kubeconfig != "" {
		k.Kubeconfig = d.inDir(k.Kubeconfig)
	}
	if i, ok := t.get("load_balancer_class"); ok && i.value != "" {
		const like = "steelyard.dev/lb"
		if s, ok := i.str(like); ok {
			if !className.MatchString(s) {
				i.errorf(`write one like "`+like+`"`, "%q is not a load balancer class", s)
			}
			k.LoadBalancerClass = s
		}
	}
	k.Allocate = t.boolean("allocate", k.Allocate)
	k.Proxy = word(t, "proxy", "proxy", k.Proxy, []string{ProxyAuto, ProxyKubeProxy, ProxyReplace})
	k.Forward = word(t, "forward", "method", k.Forward, []lb.Method{lb.MethodTunnel, lb.MethodNAT})
	k.HealthAddresses = distinct(t.list("health_addresses", "192.0.2.0/24"), item.prefix)
	k.ExcludeNodes = distinct(t.list("exclude_nodes", NodeNotReady), func(i item) (string, bool) {
		return i.word("state of a node", []string{NodeNotReady, NodeUnschedulable})
	})
	k.IgnoreExcludeLabel = t.boolean("ignore_exclude_label", false)
	k.MaxEndpointsPerService = integer(t, "max_endpoints_per_service", k.MaxEndpointsPerService, 1, 131072)
	return k
}
