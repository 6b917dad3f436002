package datapath

import (
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// madeClients are the sources of made packets.
type madeClients struct {
	v4, v6 netip.Addr
	// had4 and had6 are which clients were reachable. If they are no longer, that is a fault, also when others still
	// are.
	had4, had6 reach
	// nics are the interfaces by which replies last left, by whether the client has IPv4.
	nics map[bool]int
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
func (c *madeClients) choose(v view) {
	c.v4, c.had4 = chooseClient(far4, c.had4, v)
	c.v6, c.had6 = chooseClient(far6, c.had6, v)
}

func chooseClient(far farAddrs, had reach, v view) (netip.Addr, reach) {
	client, n := widest(far.public)
	switch {
	case 2*n > len(far.public):
		return client, reachPublic
	case had == reachPublic:
		if i := slices.IndexFunc(far.public, func(a netip.Addr) bool { return !routed(a) }); i >= 0 {
			return far.public[i], reachPublic
		}
	}
	if client, n := widest(far.all()); n > 0 {
		return client, reachSome
	}
	if had == reachSome {
		return far.public[0], reachSome
	}
	for _, name := range v.names {
		if a, ok := neighbourOn(name, far.public[0].Is4(), v); ok {
			return a, reachLink
		}
	}
	return far.public[0], reachLink
}

// widest returns which of these addresses has the shortest prefix among the routes to them, and how many of them the
// kernel routes to hosts that are on no link of this one.
func widest(all []netip.Addr) (best netip.Addr, n int) {
	local, err := net.InterfaceAddrs()
	if err != nil {
		return best, 0
	}
	onLink := func(to netip.Addr) bool {
		return slices.ContainsFunc(local, func(a net.Addr) bool {
			p, err := netip.ParsePrefix(a.String())
			return err == nil && p.Contains(to)
		})
	}
	least := 0
	for _, a := range all {
		bits, ok := routeBits(a)
		if !ok || onLink(a) {
			continue
		}
		if n++; n == 1 || bits < least {
			best, least = a, bits
		}
	}
	return best, n
}

// routeBits returns the length of the prefix of the route to another host; false: there is none.
func routeBits(to netip.Addr) (bits int, ok bool) {
	routes, err := netlink.RouteGetWithOptions(to.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST {
		return 0, false
	}
	if routes[0].Dst != nil {
		bits, _ = routes[0].Dst.Mask.Size()
	}
	return bits, true
}

// routed reports whether the kernel has a route to another host.
func routed(to netip.Addr) bool {
	routes, err := netlink.RouteGet(to.AsSlice())
	return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_UNICAST
}

// neighbourOn returns an address on the link of an interface.
func neighbourOn(name string, is4 bool, v view) (netip.Addr, bool) {
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
				return x, routed(x)
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
