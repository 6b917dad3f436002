package cli

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/config"
)

// node is what the configuration says of this machine, completed by what the machine says of itself.
type node struct {
	name         string
	routerID     netip.Addr // IPv4
	address4     netip.Addr // zero: none
	address6     netip.Addr
	interfaces   []string // uplinks
	l2Interfaces []string
}

// describe fails when something is needed that neither the configuration nor the machine knows.
func describe(cfg *config.Config) (node, error) {
	n := node{name: cfg.Node.Name, routerID: cfg.Node.RouterID, interfaces: cfg.Datapath.Interfaces}
	if n.name == "" {
		host, err := os.Hostname()
		if err != nil {
			return node{}, fmt.Errorf("find the host name: %w; set node.name", err)
		}
		n.name = cmp.Or(os.Getenv("NODE_NAME"), host)
	}
	if len(n.interfaces) == 0 {
		name, err := defaultInterface()
		if err != nil {
			return node{}, fmt.Errorf("find the uplink: %w; set datapath.interfaces", err)
		}
		n.interfaces = []string{name}
	}
	n.l2Interfaces = n.interfaces
	if cfg.L2 != nil && len(cfg.L2.Interfaces) > 0 {
		n.l2Interfaces = cfg.L2.Interfaces
	}
	v4, v6, err := addressesOf(n.interfaces[0])
	if err != nil {
		return node{}, err
	}
	n.address4, n.address6 = v4, v6
	if a := cfg.Node.Address; a.Is4() {
		n.address4 = a
	} else if a.Is6() {
		n.address6 = a
	}
	if !n.routerID.IsValid() {
		n.routerID = n.address4
	}
	if cfg.BGP != nil && !n.routerID.IsValid() {
		return node{}, fmt.Errorf("interface %s has no IPv4 address to use as BGP identifier; set node.router_id", n.interfaces[0])
	}
	return n, nil
}

// defaultInterface returns the interface of the default route, IPv4 first.
func defaultInterface() (string, error) {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{Dst: nil}, netlink.RT_FILTER_DST)
		if err != nil {
			return "", fmt.Errorf("list routes: %w", err)
		}
		for _, r := range routes {
			index := r.LinkIndex
			if index == 0 && len(r.MultiPath) > 0 {
				index = r.MultiPath[0].LinkIndex
			}
			if link, err := netlink.LinkByIndex(index); err == nil {
				return link.Attrs().Name, nil
			}
		}
	}
	return "", errors.New("there is no default route")
}

// addressesOf returns the first global address of each family that an interface has; zero where it has none.
func addressesOf(name string) (v4, v6 netip.Addr, err error) {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return v4, v6, fmt.Errorf("interface %s: %w", name, err)
	}
	addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return v4, v6, fmt.Errorf("list the addresses of %s: %w", name, err)
	}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		ip = ip.Unmap()
		switch {
		case !ok || !ip.IsGlobalUnicast():
		case ip.Is4() && !v4.IsValid():
			v4 = ip
		case ip.Is6() && !v6.IsValid():
			v6 = ip
		}
	}
	return v4, v6, nil
}
