package config

import (
	"net"
	"regexp"
	"strconv"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

func defaultKubernetes() *Kubernetes {
	return &Kubernetes{
		LoadBalancerClasses: []string{""}, Allocate: true, Proxy: ProxyAuto, Forward: lb.MethodTunnel,
		PanicHold: 30 * time.Second, NodeProbe: 300 * time.Millisecond, MaxEndpointsPerService: 10000,
	}
}

// className matches the load balancer classes that the API server accepts: a label-style name, optionally with a
// prefix.
var className = regexp.MustCompile(`^([a-z0-9][-a-z0-9.]*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)

// class reads a load balancer class. "" means Services without one.
func (i item) class() (string, bool) {
	const like = "steelyard.dev/lb"
	s, ok := i.str(like)
	if ok && s != "" && !className.MatchString(s) {
		i.errorf(`write one like "`+like+`"`, "%q is not a load balancer class", s)
	}
	return s, ok
}

// hostPort reads a host's name or address with a port.
func (i item) hostPort() (string, bool) {
	const like = "192.0.2.1:6443"
	s, ok := i.str(like)
	if !ok {
		return "", false
	}
	host, port, err := net.SplitHostPort(s)
	if n, errPort := strconv.ParseUint(port, 10, 16); err != nil || errPort != nil || host == "" || n == 0 {
		i.errorf(`write one like "`+like+`"`, "%q is not a host with a port", s)
		return "", false
	}
	return s, true
}

func (d *decoder) kubernetes(t *table) *Kubernetes {
	k := defaultKubernetes()
	k.Kubeconfig = t.str("kubeconfig", "/etc/steelyard/kubeconfig")
	if k.Kubeconfig != "" {
		k.Kubeconfig = d.inDir(k.Kubeconfig)
	}
	k.APIServers = distinct(t.list("api_servers", "192.0.2.1:6443"), item.hostPort)
	if i, ok := t.get("load_balancer_class"); ok {
		all, isList := i.elements()
		if !isList {
			all = []item{i}
		} else if len(all) == 0 {
			i.errorf(`write [""] for Services without a class`, "is empty")
		}
		k.LoadBalancerClasses = distinct(all, item.class)
	}
	k.Allocate = t.boolean("allocate", k.Allocate)
	k.Proxy = word(t, "proxy", "proxy", k.Proxy, []string{ProxyAuto, ProxyKubeProxy, ProxyReplace})
	k.Forward = word(t, "forward", "method", k.Forward, []lb.Method{lb.MethodTunnel, lb.MethodNAT})
	k.HealthAddresses = distinct(t.list("health_addresses", "192.0.2.0/24"), item.prefix)
	k.NodePortAddresses = distinct(t.list("node_port_addresses", "192.0.2.0/24"), item.prefix)
	k.NoSocketLB = word(t, "socket_lb", "value", "host", []string{"host", "off"}) == "off"
	if i, ok := t.get("node_port_forward"); ok && i.value != "nat" {
		i.errorf(`write "nat"`, "node ports are forwarded to pods on other nodes only by nat")
	}
	k.AnyExternalIP = word(t, "external_ips", "value", "pools", []string{"pools", "any"}) == "any"
	if k.Proxy != ProxyReplace {
		for key, set := range map[string]bool{
			"node_port_addresses": len(k.NodePortAddresses) > 0, "socket_lb": k.NoSocketLB,
		} {
			if set {
				t.at(key).errorf(`set proxy = "replace"`, "only counts where the agent is the service proxy")
			}
		}
	}
	k.ExcludeNodes = distinct(t.list("exclude_nodes", NodeNotReady), func(i item) (string, bool) {
		return i.word("state of a node", []string{NodeNotReady, NodeUnschedulable})
	})
	k.IgnoreExcludeLabel = t.boolean("ignore_exclude_label", false)
	k.PanicHold = t.duration("panic_hold", k.PanicHold, 0, time.Hour)
	if i, ok := t.get("node_probe"); ok && i.value == "off" {
		k.NodeProbe = 0
	} else {
		k.NodeProbe = t.duration("node_probe", k.NodeProbe, 100*time.Millisecond, time.Minute)
	}
	k.MaxEndpointsPerService = integer(t, "max_endpoints_per_service", k.MaxEndpointsPerService, 1, 131072)
	return k
}
