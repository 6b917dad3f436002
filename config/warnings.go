package config

import (
	"net/netip"
	"slices"

	"github.com/steelyard-lb/steelyard/lb"
)

// warn adds warnings about legal but useless settings.
func (d *decoder) warn(t *table) {
	c := d.config
	root := func(key string) item { return t.at(key) }
	noSource := len(c.Services) == 0 && c.Kubernetes == nil && !t.has("service") && !t.has("kubernetes")
	if noSource && len(c.Datapath.TunnelSources) == 0 {
		item{d: d}.warnf("add a [[service]] or [kubernetes]", "nothing to do: no services and no source of services")
	}
	d.warnTunnels()
	onNodes := len(c.Pools) > 0 && !slices.ContainsFunc(c.Pools, func(p Pool) bool { return !p.Nodes })
	if (len(c.Services) > 0 || c.Kubernetes != nil && !onNodes) && c.BGP == nil && c.L2 == nil {
		key := "service"
		if len(c.Services) == 0 {
			key = "kubernetes"
		}
		root(key).warnf("add [bgp] or [l2], or route the addresses here yourself",
			"no address is announced, because neither bgp nor l2 is enabled")
	}
	if c.BGP != nil && len(c.BGP.Peers) == 0 {
		root("bgp").warnf("add [[bgp.peers]]", "has no peers, so it announces nothing")
	}
	d.warnNested()
	for n, s := range c.Services {
		if len(s.Backends) > 0 && !slices.ContainsFunc(s.Backends, func(b lb.Backend) bool { return !unused(b) }) {
			i := item{d: d, path: "service" + index(n) + ".backends", object: `service "` + s.Name + `"`}
			i.warnf("set weight and drain = false on one", "none accepts new connections")
		}
	}
	if c.Kubernetes == nil {
		d.needsKubernetes()
	}
}

// warnNested warns about backends whose address is a VIP of another service, because this machine's own packets are not
// load-balanced.
func (d *decoder) warnNested() {
	vips := map[netip.Addr]string{}
	for _, s := range d.config.Services {
		for _, a := range s.Addresses {
			vips[a] = s.Name
		}
	}
	for n, s := range d.config.Services {
		for k, b := range s.Backends {
			if of := vips[b.Addr]; of != "" && of != s.Name { // the service's own VIP is an error
				i := item{d: d, path: "service" + index(n) + ".backends" + index(k), object: `service "` + s.Name + `"`}
				i.warnf("write the addresses of that service's servers",
					"%s is an address of service %q, and forwarded packets are not balanced again", b.Addr, of)
			}
		}
	}
}

// warnTunnels warns about tunnel sources without keys and keys without sources. A cluster always has both.
func (d *decoder) warnTunnels() {
	c := d.config.Datapath
	if d.config.Kubernetes != nil {
		return
	}
	if len(c.TunnelSources) > 0 && len(c.TunnelKeys) == 0 {
		item{d: d, path: "datapath.tunnel_sources"}.warnf(
			"add datapath.tunnel_key_file here and on the senders that run Steelyard",
			"anyone who can send from these addresses can forge packets from any client")
	}
	if len(c.TunnelKeys) == 0 || d.warnKeyless() {
		return
	}
	if len(c.TunnelSources) == 0 && !c.HashSeed.IsSet() {
		item{d: d, path: "datapath.tunnel_key_file"}.warnf("add datapath.tunnel_sources, or leave the file out",
			"has no effect without tunnels to or from other nodes")
	}
}

// warnKeyless warns about GUE services whose servers receive no key, and reports whether there are any. A load balancer
// sends the key only to servers in its own tunnel_sources.
func (d *decoder) warnKeyless() (warned bool) {
	keyed := func(b lb.Backend) bool {
		return slices.ContainsFunc(d.config.Datapath.TunnelSources,
			func(p netip.Prefix) bool { return p.Contains(b.Addr) })
	}
	for n, s := range d.config.Services {
		if s.Method != lb.MethodTunnel || s.Encap != lb.EncapGUE || len(s.Backends) == 0 ||
			slices.ContainsFunc(s.Backends, keyed) {
			continue
		}
		item{d: d, path: "service" + index(n) + ".tunnel", object: `service "` + s.Name + `"`}.warnf(
			"add the backends that run Steelyard to datapath.tunnel_sources here as well",
			"this machine sends no token to any of the service's backends, although it has keys")
		warned = true
	}
	return warned
}

// needsKubernetes warns about keys that have no effect without Kubernetes.
func (d *decoder) needsKubernetes() {
	const hint, problem = "add [kubernetes], or leave it out", "has no effect without Kubernetes"
	if d.config.BGP != nil {
		for n, p := range d.config.BGP.Peers {
			if p.NodeSelector != "" {
				item{d: d, path: "bgp.peers" + index(n) + ".node_selector"}.warnf(hint, problem)
			}
		}
	}
	for n, p := range d.config.Pools {
		object := `pool "` + p.Name + `"`
		for key, set := range map[string]bool{
			"class": p.Class != "", "namespaces": len(p.Namespaces) > 0, "service_selector": p.ServiceSelector != "",
		} {
			if set {
				item{d: d, path: "pool" + index(n) + "." + key, object: object}.warnf(hint, problem)
			}
		}
	}
}
