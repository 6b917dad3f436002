package agent

import (
	"errors"
	"fmt"
	"io"

	"github.com/vishvananda/netlink"
)

// Network writes the interfaces, addresses, routes, rules and neighbours of this network namespace. It needs no
// programs, which a container may lack.
func Network(w io.Writer) error {
	links, err := netlink.LinkList()
	for _, l := range links {
		a := l.Attrs()
		fmt.Fprintf(w, "interface %d %s: %s, mtu %d, %s, %s, flags %s, master %d\n", a.Index, a.Name, l.Type(), a.MTU,
			a.HardwareAddr, a.OperState, a.Flags, a.MasterIndex)
	}
	addrs, err2 := netlink.AddrList(nil, netlink.FAMILY_ALL)
	for _, a := range addrs {
		fmt.Fprintf(w, "address %s, interface %d, flags %#x\n", a, a.LinkIndex, a.Flags)
	}
	rules, err3 := netlink.RuleList(netlink.FAMILY_ALL)
	for _, r := range rules {
		fmt.Fprintf(w, "rule %s\n", r)
	}
	// Table 0 stands for all tables.
	routes, err4 := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{}, netlink.RT_FILTER_TABLE)
	for _, r := range routes {
		fmt.Fprintf(w, "route %s\n", r)
	}
	neighbours, err5 := netlink.NeighList(0, netlink.FAMILY_ALL)
	for _, n := range neighbours {
		fmt.Fprintf(w, "neighbour %s, interface %d, state %#x\n", n.String(), n.LinkIndex, n.State)
	}
	return errors.Join(err, err2, err3, err4, err5)
}
