package doctor

import (
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// path is how this node reaches an address.
type path struct {
	nic    net.Interface
	source netip.Addr
	router netip.Addr // zero if the address is on the link
	mtu    int        // of packets that this node sends
}

// pathTo returns how this node reaches an address. ok is false if it does not, or if the address is its own.
func pathTo(to netip.Addr) (p path, ok bool) {
	routes, err := netlink.RouteGet(to.WithZone("").AsSlice())
	if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST {
		return path{}, false
	}
	nic, err := net.InterfaceByIndex(routes[0].LinkIndex)
	if err != nil || nic.Flags&net.FlagLoopback != 0 {
		return path{}, false
	}
	p.nic, p.mtu = *nic, nic.MTU
	if m := routes[0].MTU; m > 0 {
		p.mtu = min(p.mtu, m)
	}
	if a, valid := netip.AddrFromSlice(routes[0].Src); valid {
		p.source = a.Unmap()
	}
	if a, valid := netip.AddrFromSlice(routes[0].Gw); valid {
		p.router = a.Unmap()
	}
	return p, p.source.IsValid()
}

// ownPrefixes returns the addresses of this machine that others can reach, with the length of their links' prefixes.
func ownPrefixes() (all []netip.Prefix) {
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	if err != nil {
		return nil
	}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		if ip = ip.Unmap(); ok && ip.IsGlobalUnicast() && a.Scope == unix.RT_SCOPE_UNIVERSE {
			bits, _ := a.Mask.Size()
			all = append(all, netip.PrefixFrom(ip, bits))
		}
	}
	return all
}

// macOf returns the MAC address of a neighbour, or nil if it is not known.
func macOf(p path, neighbour netip.Addr) net.HardwareAddr {
	family := netlink.FAMILY_V4
	if neighbour.Is6() {
		family = netlink.FAMILY_V6
	}
	entries, err := netlink.NeighList(p.nic.Index, family)
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if ip, ok := netip.AddrFromSlice(e.IP); ok && ip.Unmap() == neighbour && len(e.HardwareAddr) == 6 &&
			e.State&(netlink.NUD_FAILED|netlink.NUD_INCOMPLETE) == 0 {
			return e.HardwareAddr
		}
	}
	return nil
}
