package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Default is the destination of the IPv4 default route, Default6 of the IPv6 one.
var (
	Default  = netip.MustParsePrefix("0.0.0.0/0")
	Default6 = netip.MustParsePrefix("::/0")
)

// AddRoute adds a route to dst with these next hops; several next hops share the flows (ECMP). It replaces a route to
// the same destination.
func (h *Host) AddRoute(dst netip.Prefix, via ...netip.Addr) error {
	if len(via) == 0 {
		return fmt.Errorf("host %s: route to %s: no next hop", h, dst)
	}
	r := netlink.Route{Dst: ipNet(dst), Family: family(dst.Addr())}
	if len(via) == 1 {
		r.Gw = via[0].AsSlice()
	} else {
		for _, v := range via {
			r.MultiPath = append(r.MultiPath, &netlink.NexthopInfo{Gw: v.AsSlice()})
		}
	}
	if err := h.nl.RouteReplace(&r); err != nil {
		return fmt.Errorf("host %s: route to %s via %v: %w", h, dst, via, err)
	}
	h.mu.Lock()
	h.routes = append(h.routes, r)
	h.mu.Unlock()
	return nil
}

// DeleteRoute removes the route to dst, if there is one.
func (h *Host) DeleteRoute(dst netip.Prefix) error {
	h.mu.Lock()
	h.routes = slices.DeleteFunc(h.routes, func(r netlink.Route) bool { return r.Dst.String() == ipNet(dst).String() })
	h.mu.Unlock()
	err := h.nl.RouteDel(&netlink.Route{Dst: ipNet(dst), Family: family(dst.Addr())})
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("host %s: delete route to %s: %w", h, dst, err)
	}
	return nil
}

// NextHops returns the next hops of the route to exactly dst in the host's kernel, sorted. It is empty if there is no
// such route. It leaves out next hops whose link has no carrier.
func (h *Host) NextHops(dst netip.Prefix) ([]netip.Addr, error) {
	filter := &netlink.Route{Dst: ipNet(dst.Masked())}
	all, err := h.nl.RouteListFiltered(family(dst.Addr()), filter, netlink.RT_FILTER_DST)
	if err != nil {
		return nil, fmt.Errorf("host %s: list routes: %w", h, err)
	}
	const unusable = unix.RTNH_F_DEAD | unix.RTNH_F_LINKDOWN
	var hops []netip.Addr
	for _, r := range all {
		for _, n := range r.MultiPath {
			gw := n.Gw
			if via, ok := n.Via.(*netlink.Via); ok && gw == nil {
				gw = via.Addr // an IPv4 route with an IPv6 next hop
			}
			if a, ok := netip.AddrFromSlice(gw); ok && n.Flags&unusable == 0 {
				hops = append(hops, a.Unmap())
			}
		}
		gw := r.Gw
		if via, ok := r.Via.(*netlink.Via); ok && gw == nil {
			gw = via.Addr
		}
		if a, ok := netip.AddrFromSlice(gw); ok && r.Flags&unusable == 0 {
			hops = append(hops, a.Unmap())
		}
	}
	slices.SortFunc(hops, netip.Addr.Compare)
	return slices.Compact(hops), nil
}

// WaitNextHops waits until the host's kernel has a route to dst with exactly these next hops, or no route if there are
// none, and returns how long that took.
func (h *Host) WaitNextHops(ctx context.Context, within time.Duration, dst netip.Prefix,
	want ...netip.Addr) (time.Duration, error) {
	want = slices.Clone(want)
	slices.SortFunc(want, netip.Addr.Compare)
	return Until(ctx, within, fmt.Sprintf("%s routes %s via %v", h, dst, want), func() error {
		got, err := h.NextHops(dst)
		if err == nil && !slices.Equal(got, want) {
			err = fmt.Errorf("the next hops are %v", got)
		}
		return err
	})
}

// Forward enables forwarding of both families in the host. ECMP hashes addresses, protocol and ports, and skips next
// hops whose link has no carrier.
func (h *Host) Forward() error {
	values := map[string]string{"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "1"}
	for _, f := range []string{"net.ipv4.", "net.ipv6."} {
		// This is policy 3 with the fields of policy 1. Policy 1 uses the hash in the skb; on veth that is a random
		// number of the sending socket, which changes with a retransmission. Policy 3 always hashes the headers, as a
		// router behind a physical link does. With policy 1, connections changed their next hop after a lost SYN.
		values[f+"fib_multipath_hash_policy"] = "3"
		values[f+"fib_multipath_hash_fields"] = "0x37"
		for _, conf := range []string{"all", "default"} {
			values[f+"conf."+conf+".ignore_routes_with_linkdown"] = "1"
		}
	}
	for _, conf := range []string{"all", "default"} {
		values["net.ipv4.conf."+conf+".send_redirects"] = "0"
	}
	return h.Sysctl(values)
}

func family(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}
