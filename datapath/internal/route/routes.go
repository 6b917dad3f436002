package route

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// How long answers about routes stay valid.
const (
	routesFor = 30 * time.Second
	// AfterChange is shorter because the kernel reports that an interface is down before it removes the routes.
	AfterChange = time.Second
)

// Cache caches the kernel's answers to route queries, which the verification repeats. The zero value is empty.
type Cache struct {
	Kernel *Kernel   // which is asked; may be nil
	Since  time.Time // when the cache was last emptied
	Until  time.Time // when to empty it next, because not every route change is reported
	Routes map[Question][]netlink.Route
	local  []netip.Prefix // this node's on-link prefixes, or nil if not read
}

// Question is a route query.
type Question struct {
	To  netip.Addr
	nic int // egress interface, or 0 for any
	// Entry requests the routing table's entry with all its next hops, instead of the path that the kernel selects and
	// its source address.
	Entry bool
}

// noRouteErrors lists the errors that mean "no route". Other errors leave the question open.
var noRouteErrors = []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL}

// Expire empties the cache when it has expired.
func (k *Cache) Expire(now time.Time) {
	if !now.Before(k.Until) {
		k.Forget(now, routesFor)
	}
}

// Forget empties the cache. New answers stay valid for use at most.
func (k *Cache) Forget(now time.Time, use time.Duration) {
	*k = Cache{Kernel: k.Kernel, Since: now, Until: now.Add(use)}
}

// Ask returns the cached answer, or asks the kernel. The answer is empty if there is no route.
func (k *Cache) Ask(q Question) ([]netlink.Route, error) {
	if routes, ok := k.Routes[q]; ok {
		return routes, nil
	}
	routes, err := k.Kernel.Handle().RouteGetWithOptions(q.To.AsSlice(),
		&netlink.RouteGetOptions{OifIndex: q.nic, FIBMatch: q.Entry})
	if err != nil && !slices.ContainsFunc(noRouteErrors, func(no error) bool { return errors.Is(err, no) }) {
		return nil, err
	}
	if k.Routes == nil {
		k.Routes = map[Question][]netlink.Route{}
	}
	k.Routes[q] = routes
	return routes, nil
}

// entry returns the routing table's entry for packets to another host, or false if there is none.
func (k *Cache) entry(to netip.Addr) (r netlink.Route, ok bool) {
	routes, err := k.Ask(Question{To: to, Entry: true})
	if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST {
		return r, false
	}
	return routes[0], true
}

// NextHops returns the routers on the route to a client, or none if the client is on a link of this node.
func (k *Cache) NextHops(client netip.Addr) (all []Router) {
	r, _ := k.entry(client)
	add := func(nic int, gw net.IP) {
		if addr, ok := netip.AddrFromSlice(gw); ok {
			all = append(all, Router{NIC: nic, Addr: addr.Unmap()})
		}
	}
	add(r.LinkIndex, r.Gw)
	for _, hop := range r.MultiPath {
		add(hop.LinkIndex, hop.Gw)
	}
	return all
}

// Bits returns the prefix length of the route to another host, or false if there is none.
func (k *Cache) Bits(to netip.Addr) (bits int, ok bool) {
	r, ok := k.entry(to)
	if r.Dst != nil {
		bits, _ = r.Dst.Mask.Size()
	}
	return bits, ok
}

// Routed reports whether there is a route to another host.
func (k *Cache) Routed(to netip.Addr) bool {
	_, ok := k.entry(to)
	return ok
}

// Widest returns the address whose route has the shortest prefix, and how many of the addresses are routed. It ignores
// addresses on links of this node.
func (k *Cache) Widest(all []netip.Addr) (best netip.Addr, n int) {
	if k.local == nil {
		local, err := net.InterfaceAddrs()
		if err != nil {
			return best, 0
		}
		for _, a := range local {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				k.local = append(k.local, p)
			}
		}
	}
	least := 0
	for _, a := range all {
		bits, ok := k.Bits(a)
		if !ok || Contains(k.local, a) {
			continue
		}
		if n++; n == 1 || bits < least {
			best, least = a, bits
		}
	}
	return best, n
}

// Describe says in words where the kernel routes packets to an address.
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
