package preflight

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
)

// Warnings returns the rule that warns about settings that are valid but do not work on this machine.
func Warnings(n Network) config.Rule {
	return func(c *config.Config, r *config.Report) {
		onLink(n, c, r)
		sources(n, c, r)
		ownBackends(n, c, r)
		ownMembers(n, c, r)
	}
}

// onLink warns about addresses that neighbours resolve by ARP or NDP although nothing answers for them, and about
// addresses announced only by ARP or NDP although no neighbour resolves them.
func onLink(n Network, c *config.Config, r *config.Report) {
	warn := func(list string, i int, key string, k int, a netip.Addr) {
		key = fmt.Sprintf("%s[%d]", config.KeyOf(list, i, key), k)
		switch link := n.OnLink(a); {
		case link != "" && c.L2 == nil && n.Taken(a) == "":
			r.Warnf(key, "add [l2], or use an address in another prefix",
				"hosts on %s resolve %s by ARP or NDP, but nothing answers", link, a)
		case link == "" && byL2Alone(c, a):
			r.Warnf(key, "use an address of the link, unless routers have a route to it on that link",
				"%s is in no prefix of this machine's links, so no host asks for it by ARP or NDP", a)
		}
	}
	for i, s := range c.Services {
		for k, a := range s.Addresses {
			warn("service", i, "address", k, a)
		}
	}
	for i, p := range c.Pools {
		for k, x := range p.Ranges {
			warn("pool", i, "addresses", k, x.From)
		}
	}
}

// byL2Alone reports whether an address is announced by ARP or NDP but not by BGP.
func byL2Alone(c *config.Config, a netip.Addr) bool {
	for _, p := range c.Pools {
		if slices.ContainsFunc(p.Ranges, func(r lb.AddrRange) bool { return r.Contains(a) }) && len(p.Announce) > 0 {
			return !slices.Contains(p.Announce, lb.AnnounceBGP)
		}
	}
	return c.L2 != nil && c.BGP == nil
}

// sources warns about sessions from an address that this machine does not have. The address may appear later.
func sources(n Network, c *config.Config, r *config.Report) {
	if c.BGP == nil {
		return
	}
	for i, p := range c.BGP.Peers {
		if p.Source.IsValid() && !n.Own(p.Source.WithZone("")) {
			r.Warnf(config.KeyOf("bgp.peers", i, "source"), "write an address of this node, or leave it out",
				"no interface has %s, so there is no session until one does", p.Source)
		}
	}
}

// ownBackends warns about backends at addresses that no other host has, unless they are this machine's and its services
// can serve them.
func ownBackends(n Network, c *config.Config, r *config.Report) {
	for i, s := range c.Services {
		for k, b := range s.Backends {
			if what := n.NoHost(b.Addr); what != "" && !(n.Own(b.Addr) && s.Method == lb.MethodNAT) {
				key := fmt.Sprintf("%s[%d]", config.KeyOf("service", i, "backends"), k)
				r.Warnf(key, "write the address of another host",
					"%s is %s, but forward = %q only reaches other hosts", b.Addr, what, s.Method)
			}
		}
	}
}

// ownMembers warns about an [l2] whose only member is this machine. Another machine that should be a member would then
// count as an address conflict.
func ownMembers(n Network, c *config.Config, r *config.Report) {
	if c.L2 == nil || len(c.L2.Members) == 0 || c.Kubernetes != nil { // a cluster's nodes are members as well
		return
	}
	what := ""
	for _, a := range c.L2.Members {
		if what = n.NoHost(a); what == "" {
			return
		}
	}
	r.Warnf("l2.members", "add the addresses of the other machines, or leave it out",
		"has no other member: %s is %s", c.L2.Members[len(c.L2.Members)-1], what)
}
