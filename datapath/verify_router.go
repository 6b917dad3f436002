package datapath

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// A route says where packets go, not whether anybody is there. The kernel knows whether a router answers ARP or NDP, if
// it is asked. Without this an address could be announced to one router while replies go to another one that is down.

// routersEvery is how often the routers are looked at. The kernel declares one unreachable after three requests, one a
// second; one that answered before it begins to ask after up to 30 seconds, or five after a packet.
const routersEvery = time.Second

// routers are the next hops of packets to clients and backends behind routers.
type routers struct {
	at     time.Time
	known  map[router]asked
	faults map[netip.Addr]string // by client or backend, since at
}

// unansweredFor is how long no answer means a failure: three requests, one a second. While packets are sent to the
// router, the kernel begins again at once, and its state is hardly ever that of a failure.
const unansweredFor = 3500 * time.Millisecond

// asked is what is known of a router. It has failed when it did not answer a request to all hosts: some do not answer
// those to their own MAC address, by which the kernel confirms an entry.
type asked struct {
	once, failed bool
	since        time.Time // since when its address is not known
}

type router struct {
	nic  int
	addr netip.Addr
}

// valid are the states of a neighbour whose address is known (NUD_VALID).
const valid = unix.NUD_PERMANENT | unix.NUD_NOARP | unix.NUD_REACHABLE | unix.NUD_PROBE | unix.NUD_STALE |
	unix.NUD_DELAY

// nextHops returns the routers of the route to a client: none when it is on a link of this node.
func nextHops(client netip.Addr) (all []router) {
	routes, err := netlink.RouteGetWithOptions(client.AsSlice(), &netlink.RouteGetOptions{FIBMatch: true})
	if err != nil || len(routes) == 0 || routes[0].Type != unix.RTN_UNICAST {
		return nil
	}
	add := func(nic int, gw net.IP) {
		if addr, ok := netip.AddrFromSlice(gw); ok {
			all = append(all, router{nic, addr.Unmap()})
		}
	}
	add(routes[0].LinkIndex, routes[0].Gw)
	for _, hop := range routes[0].MultiPath {
		add(hop.LinkIndex, hop.Gw)
	}
	return all
}

// look reads the states of the routers, also of those to a sample of the clients and those towards backends, and makes
// the kernel ask them.
func (r *routers) look(now time.Time, sample []lb.Question, more func() []router) {
	if now.Sub(r.at) < routersEvery {
		return
	}
	was := r.known
	*r = routers{at: now, known: map[router]asked{}, faults: map[netip.Addr]string{}}
	clients := slices.Concat(far4.all(), far6.all())
	for _, q := range sample {
		clients = append(clients, q.Client.Addr())
	}
	hops := more()
	for _, client := range clients {
		hops = append(hops, nextHops(client)...)
	}
	for _, x := range hops {
		if _, seen := r.known[x]; !seen {
			r.known[x] = x.ask(was[x], now)
		}
	}
}

// fault returns why packets to a client or a backend do not arrive; "": nothing is known. While one of several routers
// answers, nothing is wrong with the address.
func (r *routers) fault(to netip.Addr, whose string) string {
	fault, known := r.faults[to]
	if !known {
		hops := nextHops(to)
		if len(hops) > 0 && !slices.ContainsFunc(hops, func(x router) bool { return !r.known[x].failed }) {
			fault = fmt.Sprintf("%s, the next hop %s, does not answer", hops[0].addr, whose)
		}
		r.faults[to] = fault
	}
	return fault
}

// ask returns what is known of a router, given what was before, and makes the kernel ask it.
func (x router) ask(before asked, now time.Time) asked {
	family := netlink.FAMILY_V4
	if x.addr.Is6() {
		family = netlink.FAMILY_V6
	}
	state := unix.NUD_NONE
	list, err := netlink.NeighList(x.nic, family)
	if err != nil {
		return before
	}
	for _, n := range list {
		if a, ok := netip.AddrFromSlice(n.IP); ok && a.Unmap() == x.addr {
			state = n.State
		}
	}
	if state&(unix.NUD_PERMANENT|unix.NUD_NOARP|unix.NUD_REACHABLE) == 0 {
		// NTF_USE: as if a packet were sent to it (neigh_add in net/core/neighbour.c).
		_ = netlink.NeighSet(&netlink.Neigh{
			LinkIndex: x.nic, Family: family, IP: x.addr.AsSlice(), Flags: netlink.NTF_USE,
		})
	}
	if state&valid != 0 {
		return asked{}
	}
	since := before.since
	if since.IsZero() {
		since = now
	}
	failed := before.failed || before.once && state == unix.NUD_FAILED || now.Sub(since) >= unansweredFor
	return asked{once: true, failed: failed, since: since} // the request was sent to all hosts
}
