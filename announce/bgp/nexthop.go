package bgp

import (
	"fmt"
	"net"
	"net/netip"
)

// nextHops are the next hops of routes to one peer, per family: the local address of the session if it is of that
// family, else an address that the export policy sets. A family without one has a reason instead, and its routes are
// not sent.
type nextHops struct {
	// session4, session6: the local address of the session is the next hop; no policy is needed.
	session4, session6 bool
	addr4, addr6       netip.Addr
	reason4, reason6   string
}

// has reports whether routes of the family of addr can be sent.
func (n nextHops) has(addr netip.Addr) bool {
	if addr.Is4() {
		return n.session4 || n.addr4.IsValid()
	}
	return n.session6 || n.addr6.IsValid()
}

// nextHopsTo returns the next hops expected for a session that is not established, according to the routing table.
func (o *Options) nextHopsTo(p Peer) nextHops {
	local, err := localTowards(p)
	if err == nil {
		return o.nextHopsFrom(local)
	}
	n := nextHops{session4: p.Address.Is4(), session6: p.Address.Is6(), addr4: o.NextHopV4, addr6: o.NextHopV6}
	if !n.session4 {
		n.reason4 = missing(n.addr4, "IPv4", "", err)
	}
	if !n.session6 {
		n.reason6 = missing(n.addr6, "IPv6", "", err)
	}
	return n
}

// nextHopsFrom returns the next hops for a session with this local address. Addresses of its interface have precedence
// over those of the options, because the peer can reach them.
func (o *Options) nextHopsFrom(local netip.Addr) nextHops {
	n := nextHops{session4: local.Is4(), session6: local.Is6() && !local.IsLinkLocalUnicast()}
	if n.session4 && n.session6 {
		return n
	}
	iface, addrs, err := interfaceOf(local)
	if !n.session4 {
		n.addr4 = firstOr(addrs, netip.Addr.Is4, o.NextHopV4)
		n.reason4 = missing(n.addr4, "IPv4", iface, err)
	}
	if !n.session6 {
		n.addr6 = firstOr(addrs, netip.Addr.Is6, o.NextHopV6)
		n.reason6 = missing(n.addr6, "IPv6", iface, err)
	}
	return n
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
		return fmt.Sprintf("%s routes are not sent: no %s next hop, %s has no global %s address",
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

// localTowards returns the local address that a session with p will have. It sends no packet: connecting a UDP socket
// only looks up the route.
func localTowards(p Peer) (netip.Addr, error) {
	if p.Source.IsValid() {
		return p.Source, nil
	}
	c, err := net.Dial("udp", netip.AddrPortFrom(p.Address, p.Port).String())
	if err != nil {
		return netip.Addr{}, fmt.Errorf("look up the route to %v: %w", p.Address, err)
	}
	defer c.Close()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}
