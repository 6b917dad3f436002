package route

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
)

// Describe describes the kernel's route to an address.
func Describe(to netip.Addr) string {
	routes, err := netlink.RouteGet(to.AsSlice())
	if err != nil || len(routes) == 0 {
		return fmt.Sprintf("the kernel has no route to %s: the packet would be dropped", to)
	}
	r := routes[0]
	name := fmt.Sprint("interface ", r.LinkIndex)
	if link, err := netlink.LinkByIndex(r.LinkIndex); err == nil {
		name = link.Attrs().Name
	}
	if gw, ok := netip.AddrFromSlice(r.Gw); ok {
		return fmt.Sprintf("by %s, next hop %s", name, gw.Unmap())
	}
	return fmt.Sprintf("by %s, on the same network", name)
}
