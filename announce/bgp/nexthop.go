package bgp

import (
	"fmt"
	"net"
	"net/netip"
)

// nextHops are the next hops of routes to one peer, one per family. A family without a next hop has a reason instead;
// its routes are not sent.
type nextHops struct {
	addr4, addr6     netip.Addr
	reason4, reason6 string
}

// has reports whether routes of the family of addr can be sent.
func (n nextHops) has(addr netip.Addr) bool {
	if addr.Is4() {
		return n.addr4.IsValid()
	}
	return n.addr6.IsValid()
}

// nextHopsFrom returns the next hops for a session with this local address. Routes of the same family use that address
// unless it is link-local. Otherwise, addresses of its interface take precedence over those in the options, because the
// peer can reach them.
func (o *Options) nextHopsFrom(local netip.Addr) nextHops {
	var n nextHops
	iface, addrs, err := interfaceOf(local)
	if local.Is4() {
		n.addr4 = local
	} else {
		n.addr4 = firstOr(addrs, netip.Addr.Is4, o.NextHopV4)
		n.reason4 = missing(n.addr4, "IPv4", iface, err)
	}
	if local.Is6() && !local.IsLinkLocalUnicast() {
		n.addr6 = local
	} else {
		n.addr6 = firstOr(addrs, netip.Addr.Is6, o.NextHopV6)
		n.reason6 = missing(n.addr6, "IPv6", iface, err)
	}
	return n
}

// nextHopsNow returns the session's next hops, given the current addresses of its interface. On an unnumbered link the
// next hop is the link-local address, because a global one, such as the loopback interface's, may be reachable only
// through this session's routes. Routers without RFC 8950 need an IPv4 address on the link.
func (n *session) nextHopsNow(o *Options) nextHops {
	if n.peer.Interface == "" {
		return o.nextHopsFrom(n.local)
	}
	hops := nextHops{addr6: n.local}
	if n.extended {
		hops.addr4 = n.local
		return hops
	}
	_, addrs, err := interfaceOf(n.local)
	hops.addr4 = firstOr(addrs, netip.Addr.Is4, netip.Addr{})
	switch {
	case hops.addr4.IsValid():
	case err != nil:
		hops.reason4 = fmt.Sprintf("IPv4 routes are not sent: %v", err)
	default:
		hops.reason4 = fmt.Sprintf("IPv4 routes are not sent: the peer does not offer extended next hops (RFC 8950), "+
			"and %s has no IPv4 address", n.peer.Interface)
	}
	return hops
}

func firstOr(addrs []netip.Addr, ok func(netip.Addr) bool, otherwise netip.Addr) netip.Addr {
	for _, a := range addrs {
		if ok(a) {
			return a
		}
	}
	return otherwise
}

func missing(addr netip.Addr, family, iface string, err error) string {
	switch {
	case addr.IsValid():
		return ""
	case err != nil:
		return fmt.Sprintf("%s routes are not sent: %v", family, err)
	default:
		return fmt.Sprintf("%s routes are not sent: no %s next hop, because %s has no global %s address",
			family, family, iface, family)
	}
}

// interfaceOf returns the interface that has addr, and its global addresses.
func interfaceOf(addr netip.Addr) (name string, global []netip.Addr, err error) {
	ifaces, err := net.Interfaces()
	if err != nil {
		return "", nil, fmt.Errorf("list interfaces: %w", err)
	}
	for _, iface := range ifaces {
		if zone := addr.Zone(); zone != "" && zone != iface.Name {
			continue
		}
		list, err := iface.Addrs()
		if err != nil {
			return "", nil, fmt.Errorf("list addresses of %s: %w", iface.Name, err)
		}
		found := false
		global = nil
		for _, a := range list {
			p, err := netip.ParsePrefix(a.String())
			if err != nil {
				continue
			}
			found = found || p.Addr() == addr.WithZone("")
			if p.Addr().IsGlobalUnicast() {
				global = append(global, p.Addr())
			}
		}
		if found {
			return iface.Name, global, nil
		}
	}
	return "", nil, fmt.Errorf("no interface has %v", addr)
}
