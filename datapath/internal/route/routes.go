package route

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Times for which answers about routes are used.
const (
	routesFor = 10 * time.Second
	// AfterChange is shorter: the kernel reports that an interface is down before it removes the routes.
	AfterChange = time.Second
)

// Cache are the answers of the kernel to questions about routes. The questions of the verification are always the
// same, and each takes a socket of its own. The zero value is empty.
type Cache struct {
	Since  time.Time // when they were forgotten
	Until  time.Time // when they are to be forgotten: not every change of a route is reported
	Routes map[Question][]netlink.Route
	local  []netip.Prefix // on the links of this node; nil: not read
	// Forgotten is how often they were forgotten.
	Forgotten int
}

// Question is a question about a route.
type Question struct {
	To  netip.Addr
	nic int // by which packets leave; 0: any
	// Entry: the entry of the table, with all its next hops; else the one that the kernel selects, and its source.
	Entry bool
}

// noRouteErrors are the errors by which the kernel says that there is no route. Others are no answer.
var noRouteErrors = []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL}

// Expire forgets all when it is time.
func (k *Cache) Expire(now time.Time) {
	if !now.Before(k.Until) {
		k.Forget(now, routesFor)
	}
}

// Forget makes the kernel be asked again. The next answers are used for this time at most.
func (k *Cache) Forget(now time.Time, use time.Duration) {
	*k = Cache{Since: now, Until: now.Add(use), Forgotten: k.Forgotten + 1}
}

// Ask asks the kernel, or returns its earlier answer. Without a route there is no answer.
func (k *Cache) Ask(q Question) ([]netlink.Route, error) {
	if routes, ok := k.Routes[q]; ok {
		return routes, nil
	}
	routes, err := netlink.RouteGetWithOptions(q.To.AsSlice(),
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

// entry returns the entry of the table by which packets get to another host; false: there is none.
func (k *Cache) entry(to netip.Addr) (r netlink.Route, ok bool) {
	routes, err := k.Ask(Question{To: to, Entry: true})
	if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST {
		return r, false
	}
	return routes[0], true
}

// NextHops returns the routers of the route to a client: none when it is on a link of this node.
func (k *Cache) NextHops(client netip.Addr) (all []Router) {
	r, _ := k.entry(client)
	add := func(nic int, gw net.IP) {
		if addr, ok := netip.AddrFromSlice(gw); ok {
			all = append(all, Router{nic, addr.Unmap()})
		}
	}
	add(r.LinkIndex, r.Gw)
	for _, hop := range r.MultiPath {
		add(hop.LinkIndex, hop.Gw)
	}
	return all
}

// Bits returns the length of the prefix of the route to another host; false: there is none.
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

// Widest returns which of these addresses has the shortest prefix among the routes to them, and how many of them the
// kernel routes to hosts that are on no link of this one.
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
