package datapath

import (
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
)

// madeClients are the sources of made packets.
type madeClients struct {
	v4, v6 netip.Addr
	// had4 and had6 are which clients were reachable. If they are no longer, that is a fault, also when others still
	// are.
	had4, had6 reach
	// nics are the interfaces by which replies last left, by whether the client has IPv4.
	nics map[bool]int
	// chosen is knownRoutes.since of the routes by which they were chosen.
	chosen time.Time
}

// reach is which clients behind routers the kernel has routes to.
type reach int

const (
	reachLink   reach = iota // none
	reachSome                // some
	reachPublic              // those of the Internet
)

// farAddrs are addresses behind routers. Nothing is sent to them.
type farAddrs struct {
	// public: most of them are routed where there is a default route, or a table of the Internet. A route to a network
	// of the servers may cover one.
	public []netip.Addr
	inner  []netip.Addr // one of them is routed where clients are in private networks only
}

func (f farAddrs) all() []netip.Addr { return slices.Concat(f.public, f.inner) }

var (
	far4 = farAddrs{
		addrs("11.0.0.1", "52.0.0.1", "91.0.0.1", "133.0.0.1", "185.0.0.1"),
		addrs("198.51.100.1", "10.0.0.1", "172.16.0.1", "192.168.0.1"),
	}
	far6 = farAddrs{
		addrs("2600::1", "2a00::1", "2400::1", "2800::1", "2c00::1"),
		addrs("2001:db8::1", "fd00::1"),
	}
)

func addrs(texts ...string) (all []netip.Addr) {
	for _, t := range texts {
		all = append(all, netip.MustParseAddr(t))
	}
	return all
}

// choose takes an address behind a router that is routed, else one on a link of this node.
func (c *madeClients) choose(v view, routes *knownRoutes) {
	c.v4, c.had4 = chooseClient(far4, c.had4, v, routes)
	c.v6, c.had6 = chooseClient(far6, c.had6, v, routes)
	c.chosen = routes.since
}

func chooseClient(far farAddrs, had reach, v view, routes *knownRoutes) (netip.Addr, reach) {
	client, n := routes.widest(far.public)
	switch {
	case 2*n > len(far.public):
		return client, reachPublic
	case had == reachPublic:
		if i := slices.IndexFunc(far.public, func(a netip.Addr) bool { return !routes.routed(a) }); i >= 0 {
			return far.public[i], reachPublic
		}
	}
	if client, n := routes.widest(far.all()); n > 0 {
		return client, reachSome
	}
	if had == reachSome {
		return far.public[0], reachSome
	}
	for _, name := range v.names {
		if a, ok := neighbourOn(name, far.public[0].Is4(), v, routes); ok {
			return a, reachLink
		}
	}
	return far.public[0], reachLink
}

// neighbourOn returns an address on the link of an interface.
func neighbourOn(name string, is4 bool, v view, routes *knownRoutes) (netip.Addr, bool) {
	nic, err := netlink.LinkByName(name)
	if err != nil {
		return netip.Addr{}, false
	}
	addrs, err := netlink.AddrList(nic, netlink.FAMILY_ALL)
	if err != nil {
		return netip.Addr{}, false
	}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		ip = ip.Unmap()
		ones, bits := a.Mask.Size()
		if !ok || ip.Is4() != is4 || !ip.IsGlobalUnicast() || ones == bits {
			continue
		}
		p := netip.PrefixFrom(ip, ones)
		for x := p.Masked().Addr().Next(); p.Contains(x); x = x.Next() {
			if !v.own[x] {
				return x, routes.routed(x)
			}
		}
	}
	return netip.Addr{}, false
}

// of returns the client of made packets to a VIP: one that may use the service. It returns false when none may.
func (c *madeClients) of(vip netip.Addr, allow []netip.Prefix) (netip.Addr, bool) {
	client := c.v6
	if vip.Is4() {
		client = c.v4
	}
	if len(allow) == 0 || contains(allow, client) {
		return client, true
	}
	for _, p := range allow {
		if p.Addr().Is4() == vip.Is4() {
			if p.IsSingleIP() {
				return p.Addr(), true
			}
			return p.Masked().Addr().Next(), true
		}
	}
	return client, false
}
