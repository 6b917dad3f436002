// Package machine finds the addresses that belong to this machine and to its links. None of them can be the address of
// a service, because the datapath drops packets to a VIP that match none of its frontends. The machine, or a router
// that it needs, would be unreachable.
package machine

import (
	"fmt"
	"maps"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// Network is the state of the links at one moment. It is immutable.
type Network struct {
	links  map[string]string     // encapsulation by name
	taken  map[netip.Addr]string // what the address is, such as "the address of eth0"
	onLink map[netip.Prefix]string
}

// ipvsDevice holds kube-proxy's VIPs in IPVS mode, on every node. They are addresses of services.
const ipvsDevice = "kube-ipvs0"

// Read returns the network in this process's namespace.
func Read() (*Network, error) {
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list the interfaces: %w", err)
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil, fmt.Errorf("list the addresses: %w", err)
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL) // of the main table
	if err != nil {
		return nil, fmt.Errorf("list the routes: %w", err)
	}
	return New(links, addrs, routes), nil
}

// New returns the network that consists of these links, addresses and routes.
func New(links []netlink.Link, addrs []netlink.Addr, routes []netlink.Route) *Network {
	n := &Network{links: map[string]string{}, taken: map[netip.Addr]string{}, onLink: map[netip.Prefix]string{}}
	names := map[int]string{}
	for _, l := range links {
		names[l.Attrs().Index] = l.Attrs().Name
		n.links[l.Attrs().Name] = l.Attrs().EncapType
	}
	for _, r := range routes {
		n.gateway(r.Gw)
		for _, hop := range r.MultiPath {
			n.gateway(hop.Gw)
		}
	}
	for _, a := range addrs { // after the gateways, so that an address of this machine counts as its own
		n.address(a, names[a.LinkIndex])
	}
	return n
}

const (
	gateway = "the gateway of a route"
	own     = "the address of "
)

func (n *Network) gateway(ip []byte) {
	if a, ok := netip.AddrFromSlice(ip); ok {
		n.taken[a.Unmap()] = gateway
	}
}

func (n *Network) address(a netlink.Addr, link string) {
	if a.IPNet == nil || link == ipvsDevice {
		return
	}
	ip, ok := netip.AddrFromSlice(a.IP)
	if !ok {
		return
	}
	ip = ip.Unmap()
	bits, _ := a.Mask.Size()
	prefix := netip.PrefixFrom(ip, bits).Masked()
	if !ip.IsLinkLocalUnicast() && bits < ip.BitLen() && a.Scope == unix.RT_SCOPE_UNIVERSE {
		n.onLink[prefix] = link
		if ip.Is4() && bits < 31 {
			n.take(prefix.Addr(), "the network address of "+prefix.String()+" on "+link)
			n.take(lb.LastOf(prefix), "the broadcast address of "+prefix.String()+" on "+link)
		}
	}
	if b, ok := netip.AddrFromSlice(a.Broadcast); ok {
		n.take(b.Unmap(), "the broadcast address of "+link)
	}
	n.taken[ip] = own + link
}

// take records what an address is, unless something more important is recorded.
func (n *Network) take(a netip.Addr, what string) {
	if _, known := n.taken[a]; !known {
		n.taken[a] = what
	}
}

// HasLink reports whether an interface with this name exists.
func (n *Network) HasLink(name string) bool { _, ok := n.links[name]; return ok }

// NotEthernet returns the encapsulation of an interface whose packets have no Ethernet header, or "" if they have one
// or if there is no such interface.
func (n *Network) NotEthernet(name string) string {
	if is := n.links[name]; is != "ether" && is != "loopback" {
		return is
	}
	return ""
}

// Taken says why a service cannot have an address, such as "the address of eth0", or returns "" if it can.
func (n *Network) Taken(a netip.Addr) string { return n.taken[a] }

// NoHost says why no other host can have an address, such as "the address of eth0", or returns "" if one can.
func (n *Network) NoHost(a netip.Addr) string {
	if what := n.taken[a]; what != gateway {
		return what
	}
	return ""
}

// Own reports whether an interface of this machine has the address.
func (n *Network) Own(a netip.Addr) bool { return strings.HasPrefix(n.taken[a], own) }

// TakenIn returns the lowest address in a range that a service cannot have, and why.
func (n *Network) TakenIn(r lb.AddrRange) (lowest netip.Addr, what string) {
	for a, is := range n.taken {
		if r.Contains(a) && (what == "" || a.Less(lowest)) {
			lowest, what = a, is
		}
	}
	return lowest, what
}

// OnLink returns the interface on which neighbours resolve an address by ARP or NDP, or "" if there is none.
func (n *Network) OnLink(a netip.Addr) string {
	best, name := -1, ""
	for p, link := range n.onLink {
		if p.Contains(a) && p.Bits() > best {
			best, name = p.Bits(), link
		}
	}
	return name
}

// Equal reports whether services can have the same addresses on both networks.
func (n *Network) Equal(o *Network) bool {
	return o != nil && maps.Equal(n.taken, o.taken) && maps.Equal(n.onLink, o.onLink)
}
