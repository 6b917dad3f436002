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

// Default and Default6 are the destinations of the IPv4 and IPv6 default routes.
var (
	Default  = netip.MustParsePrefix("0.0.0.0/0")
	Default6 = netip.MustParsePrefix("::/0")
)

// AddRoute adds a route to dst, or replaces it. Several next hops share the flows (ECMP).
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

// DeleteRoute removes the route to dst, if it exists.
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

// NextHops returns the next hops of the route to exactly dst in the host's kernel, sorted. It omits next hops whose
// link has no carrier. Without such a route, the result is empty.
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
// none. It returns how long this took.
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

// Forward enables forwarding for both families. ECMP hashes addresses, protocol and ports, and skips next hops whose
// link has no carrier.
func (h *Host) Forward() error {
	values := map[string]string{"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "1"}
	for _, f := range []string{"net.ipv4.", "net.ipv6."} {
		// This is policy 3 with the fields of policy 1. Policy 1 uses the hash in the skb, which on veth is a random
		// number from the sending socket that changes with a retransmission. With it, connections changed their next
		// hop after a lost SYN. Policy 3 always hashes the headers, like a router with physical links.
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
