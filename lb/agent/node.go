package agent

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/agent/machine"
)

// node holds the facts about this node, from the configuration or, failing that, from the system.
type node struct {
	name         string
	routerID     netip.Addr // IPv4
	address4     netip.Addr // zero if it has none
	address6     netip.Addr
	interfaces   []string // uplinks
	l2Interfaces []string
}

// address returns the IPv4 address, or the IPv6 address of a node without one.
func (n node) address() netip.Addr {
	if n.address4.IsValid() {
		return n.address4
	}
	return n.address6
}

// addresses returns the node's addresses of both families, without missing ones.
func (n node) addresses() []netip.Addr {
	return slices.DeleteFunc([]netip.Addr{n.address4, n.address6}, func(a netip.Addr) bool { return !a.IsValid() })
}

// host is the system on which the agent runs.
type host interface {
	name() (string, error)
	// defaultInterface returns the Ethernet interface of the default route, preferring IPv4.
	defaultInterface() (string, error)
	// addresses returns an interface's first global address of each family, or zero where it has none.
	addresses(iface string) (v4, v6 netip.Addr, err error)
}

// lackError reports a fact that is neither configured nor found in the system.
type lackError struct {
	key, hint string // of the configuration
	err       error
	mayCome   bool // the fact may appear later
}

func lacks(key, hint, format string, args ...any) error {
	return &lackError{key, hint, fmt.Errorf(format, args...), false}
}

// lacksYet is lacks for a fact that this node's network may still provide, such as a default route from DHCP.
func lacksYet(key, hint, format string, args ...any) error {
	return &lackError{key, hint, fmt.Errorf(format, args...), true}
}

// mayCome reports whether this node's network may still provide the missing fact.
func mayCome(err error) bool {
	var lack *lackError
	return errors.As(err, &lack) && lack.mayCome
}

func (e *lackError) Error() string { return e.err.Error() + "; " + e.hint }

func (e *lackError) Unwrap() error { return e.err }

// describe returns the facts of the node. It fails when a required one is neither configured nor found in the system.
func describe(cfg *config.Config, h host) (node, error) {
	n := node{name: cfg.Node.Name, routerID: cfg.Node.RouterID, interfaces: cfg.Datapath.Interfaces}
	if n.name == "" {
		name, err := h.name()
		if err != nil {
			return node{}, lacks("node.name", "set node.name", "find the host name: %w", err)
		}
		n.name = cmp.Or(os.Getenv("NODE_NAME"), name)
	}
	if len(n.interfaces) == 0 {
		name, err := h.defaultInterface()
		if err != nil {
			return node{}, lacksYet("datapath.interfaces", "set datapath.interfaces", "find the uplink: %w", err)
		}
		n.interfaces = []string{name}
	}
	n.l2Interfaces = n.interfaces
	if cfg.L2 != nil && len(cfg.L2.Interfaces) > 0 {
		n.l2Interfaces = cfg.L2.Interfaces
	}
	first, v4, v6, err := firstOf(n.interfaces, h)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return node{}, lacksYet("datapath.interfaces", "name an interface of this machine", "%w", err)
	}
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
		return node{}, lacksYet("node.router_id", "set node.router_id",
			"interface %s has no IPv4 address to use as BGP identifier", first)
	}
	return n, nil
}

// servesItself reports whether a backend of a service with nat has an address of this machine. It returns otherwise if
// the addresses cannot be listed.
func servesItself(cfg *config.Config, otherwise bool) bool {
	n, err := machine.Read()
	if err != nil {
		return otherwise
	}
	return slices.ContainsFunc(cfg.Services, func(s config.Service) bool {
		return s.Method == lb.MethodNAT &&
			slices.ContainsFunc(s.Backends, func(b lb.Backend) bool { return n.Own(b.Addr) })
	})
}

// firstOf returns the first of these interfaces that exists, and its addresses. The datapath attaches the others when
// they appear.
func firstOf(names []string, h host) (name string, v4, v6 netip.Addr, err error) {
	var missing error
	for _, name := range names {
		v4, v6, err := h.addresses(name)
		if !errors.As(err, new(netlink.LinkNotFoundError)) {
			return name, v4, v6, err
		}
		missing = cmp.Or(missing, err)
	}
	return "", v4, v6, missing
}

// thisHost is this process's host, in its network namespace.
type thisHost struct{}

func (thisHost) name() (string, error) { return os.Hostname() }

func (thisHost) defaultInterface() (string, error) {
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
			if link, err := netlink.LinkByIndex(index); err == nil && link.Attrs().EncapType == "ether" {
				return link.Attrs().Name, nil
			}
		}
	}
	return "", errors.New("there is no default route through an Ethernet interface")
}

func (thisHost) addresses(iface string) (v4, v6 netip.Addr, err error) {
	link, err := netlink.LinkByName(iface)
	if err != nil {
		return v4, v6, fmt.Errorf("interface %s: %w", iface, err)
	}
	addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
	if err != nil {
		return v4, v6, fmt.Errorf("list the addresses of %s: %w", iface, err)
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
