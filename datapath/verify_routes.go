package datapath

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
	// routesAfterChange is shorter: the kernel reports that an interface is down before it removes the routes.
	routesAfterChange = time.Second
)

// knownRoutes are the answers of the kernel to questions about routes. The questions of the verification are always the
// same, and each takes a socket of its own. The zero value is empty.
type knownRoutes struct {
	since  time.Time // when they were forgotten
	until  time.Time // when they are to be forgotten: not every change of a route is reported
	routes map[routeQuestion][]netlink.Route
	local  []netip.Prefix // on the links of this node; nil: not read
	// toBackends is how backends are reached; nil: not read.
	toBackends *toBackends
}

// toBackends are the interfaces and the routers by which backends on other nodes are reached.
type toBackends struct {
	interfaces []int
	routers    []router
}

type routeQuestion struct {
	to  netip.Addr
	nic int // by which packets leave; 0: any
	// entry: the entry of the table, with all its next hops; else the one that the kernel selects, and its source.
	entry bool
}

// noRouteErrors are the errors by which the kernel says that there is no route. Others are no answer.
var noRouteErrors = []error{unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL}

// expire forgets all when it is time.
func (k *knownRoutes) expire(now time.Time) {
	if !now.Before(k.until) {
		k.forget(now, routesFor)
	}
}

// forget makes the kernel be asked again. The next answers are used for this time at most.
func (k *knownRoutes) forget(now time.Time, use time.Duration) {
	*k = knownRoutes{since: now, until: now.Add(use)}
}

// backends returns how those of all frontends are reached. Forgotten, it is read again.
func (k *knownRoutes) backends(s *services) *toBackends {
	if k.toBackends == nil {
		k.toBackends = &toBackends{s.interfaces(nil), s.routers()}
	}
	return k.toBackends
}

func (k *knownRoutes) ask(q routeQuestion) ([]netlink.Route, error) {
	if routes, ok := k.routes[q]; ok {
		return routes, nil
	}
	routes, err := netlink.RouteGetWithOptions(q.to.AsSlice(),
		&netlink.RouteGetOptions{OifIndex: q.nic, FIBMatch: q.entry})
	if err != nil && !slices.ContainsFunc(noRouteErrors, func(no error) bool { return errors.Is(err, no) }) {
		return nil, err
	}
	if k.routes == nil {
		k.routes = map[routeQuestion][]netlink.Route{}
	}
	k.routes[q] = routes
	return routes, nil
}

// entry returns the entry of the table by which packets get to another host; false: there is none.
func (k *knownRoutes) entry(to netip.Addr) (r netlink.Route, ok bool) {
	routes, err := k.ask(routeQuestion{to: to, entry: true})
	if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST {
		return r, false
	}
	return routes[0], true
}

// nextHops returns the routers of the route to a client: none when it is on a link of this node.
func (k *knownRoutes) nextHops(client netip.Addr) (all []router) {
	r, _ := k.entry(client)
	add := func(nic int, gw net.IP) {
		if addr, ok := netip.AddrFromSlice(gw); ok {
			all = append(all, router{nic, addr.Unmap()})
		}
	}
	add(r.LinkIndex, r.Gw)
	for _, hop := range r.MultiPath {
		add(hop.LinkIndex, hop.Gw)
	}
	return all
}

// bits returns the length of the prefix of the route to another host; false: there is none.
func (k *knownRoutes) bits(to netip.Addr) (bits int, ok bool) {
	r, ok := k.entry(to)
	if r.Dst != nil {
		bits, _ = r.Dst.Mask.Size()
	}
	return bits, ok
}

// routed reports whether there is a route to another host.
func (k *knownRoutes) routed(to netip.Addr) bool {
	_, ok := k.entry(to)
	return ok
}

// widest returns which of these addresses has the shortest prefix among the routes to them, and how many of them the
// kernel routes to hosts that are on no link of this one.
func (k *knownRoutes) widest(all []netip.Addr) (best netip.Addr, n int) {
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
		bits, ok := k.bits(a)
		if !ok || contains(k.local, a) {
			continue
		}
		if n++; n == 1 || bits < least {
			best, least = a, bits
		}
	}
	return best, n
}
