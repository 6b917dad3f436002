package datapath

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// A route says where packets go, not whether anybody is there. The kernel knows whether a router answers ARP or NDP, if
// it is asked. Without this an address could be announced to one router while replies go to another one that is down.

// Times of the requests to routers. A tick may be early or late by tickSlack.
const (
	tickSlack = verifyEvery / 2
	// routersEvery is how often a router is asked.
	routersEvery = time.Second - tickSlack
	// againEvery is how often one that has not answered is asked again.
	againEvery = 500*time.Millisecond - tickSlack
	// maxRequests is after how many requests without an answer a router has failed: a router under load may limit them.
	maxRequests = 5
	// maxAsked is how many routers are asked at a time. In a cluster each node can be one. Of more, all are in turn.
	maxAsked = 64
)

// routers are the next hops of packets to clients and backends behind routers.
type routers struct {
	at        time.Time
	known     map[router]asked
	faults    map[netip.Addr]string // by client or backend, since at
	requester requester
}

// asked is what is known of a router.
type asked struct {
	at time.Time // of the last request
	// since is when the first request was sent that it has not answered; zero: it has answered all.
	since time.Time
	// requests is how many it has not answered. The first is sent to its MAC address, if that is known. Some routers do
	// not answer these, so the others are sent to all hosts.
	requests int
	failed   bool
}

// doubtful reports whether it is not known yet whether the router answers.
func (a asked) doubtful() bool { return a.requests > 0 && !a.failed }

func (a asked) due(now time.Time) bool { return a.doubtful() || now.Sub(a.at) >= routersEvery }

type router struct {
	nic  int
	addr netip.Addr
}

// valid are the states of a neighbour whose address is known (NUD_VALID).
const valid = unix.NUD_PERMANENT | unix.NUD_NOARP | unix.NUD_REACHABLE | unix.NUD_PROBE | unix.NUD_STALE |
	unix.NUD_DELAY

// look reads which routers have answered, also those to a sample of the clients and those towards backends, and asks
// them again.
func (r *routers) look(now time.Time, routes *knownRoutes, sample []lb.Question, of *services) {
	if now.Sub(r.at) < againEvery {
		return
	}
	was := r.known
	r.at, r.known, r.faults = now, map[router]asked{}, map[netip.Addr]string{}
	clients := slices.Concat(far4.all(), far6.all())
	for _, q := range sample {
		clients = append(clients, q.Client.Addr())
	}
	hops := slices.Clone(routes.backends(of).routers)
	for _, client := range clients {
		hops = append(hops, routes.nextHops(client)...)
	}
	entries := neighbours{}
	var ask []router
	for _, x := range hops {
		if _, seen := r.known[x]; seen {
			continue
		}
		n, read := entries.of(x)
		r.known[x] = was[x].after(n, read)
		if read && n.State&configured == 0 && r.known[x].due(now) {
			ask = append(ask, x)
		}
	}
	r.ask(ask, entries, routes)
	for _, a := range r.known {
		if a.requests > 1 { // the kernel may use another one now, without a report (IPv6: RFC 4191, 3.2)
			routes.forget(now, routesFor)
			return
		}
	}
}

// ask sends requests to some of the routers.
func (r *routers) ask(all []router, entries neighbours, routes *knownRoutes) {
	r.requester.begin()
	for _, x := range r.first(all) {
		n, _ := entries.of(x)
		a, now, err := r.known[x], time.Now(), error(nil)
		if n.State&valid != 0 {
			err = r.requester.send(x, n.HardwareAddr, a.requests > 0, routes)
		} else {
			err = x.resolve()
		}
		a.at = now
		switch {
		case err == nil:
			a.requests++
			if a.since.IsZero() {
				a.since = now
			}
		case !a.failed: // what was not asked is no failure
			a = asked{at: now}
		}
		r.known[x] = a
	}
}

// first returns at most maxAsked of the routers: those that have not answered, and then those that were not asked for
// the longest time.
func (r *routers) first(all []router) []router {
	slices.SortStableFunc(all, func(x, y router) int {
		a, b := r.known[x], r.known[y]
		switch {
		case a.doubtful() == b.doubtful():
			return a.at.Compare(b.at)
		case a.doubtful():
			return -1
		}
		return 1
	})
	return all[:min(maxAsked, len(all))]
}

// fault returns why packets to a client or a backend do not arrive; "": nothing is known. While one of several routers
// answers, nothing is wrong with the address.
func (r *routers) fault(to netip.Addr, whose string, routes *knownRoutes) string {
	fault, known := r.faults[to]
	if !known {
		hops := routes.nextHops(to)
		if len(hops) > 0 && !slices.ContainsFunc(hops, func(x router) bool { return !r.known[x].failed }) {
			fault = fmt.Sprintf("%s, the next hop %s, does not answer", hops[0].addr, whose)
		}
		r.faults[to] = fault
	}
	return fault
}

// resolve makes the kernel ask all hosts for the MAC address of a router, as if a packet were sent to it (NTF_USE,
// neigh_add in net/core/neighbour.c). While it does already, nothing changes.
func (x router) resolve() error {
	err := netlink.NeighSet(&netlink.Neigh{
		LinkIndex: x.nic, Family: x.family(), IP: x.addr.AsSlice(), Flags: netlink.NTF_USE,
	})
	if err != nil {
		return fmt.Errorf("resolve router %s: %w", x.addr, err)
	}
	return nil
}

func (x router) family() int {
	if x.addr.Is6() {
		return netlink.FAMILY_V6
	}
	return netlink.FAMILY_V4
}

// after returns what is known of a router given its neighbour entry, or, unless that was read, what was known before.
func (a asked) after(n neighbour, read bool) asked {
	switch {
	case !read:
		return a
	case n.State&configured != 0, n.State&valid != 0 && !n.confirmed.Before(a.since):
		return asked{at: a.at}
	}
	a.failed = a.failed || a.requests >= maxRequests
	return a
}

// neighbour is an entry of the kernel. Zero: there is none.
type neighbour struct {
	netlink.Neigh
	confirmed time.Time // when it last answered, at the latest
}

// configured are the states of a neighbour that the kernel does not ask.
const configured = unix.NUD_PERMANENT | unix.NUD_NOARP

// neighbours has the entries of interfaces by family, each read once.
type neighbours map[nicFamily]map[netip.Addr]neighbour

type nicFamily struct{ nic, family int }

// of returns the entry of a router; read is false when the kernel could not be asked.
func (all neighbours) of(x router) (n neighbour, read bool) {
	at := nicFamily{x.nic, x.family()}
	entries, ok := all[at]
	if !ok {
		entries = at.neighbours()
		all[at] = entries
	}
	return entries[x.addr], entries != nil
}

// clockTick is the unit of times of neighbour entries (USER_HZ).
const clockTick = time.Second / 100

func (at nicFamily) neighbours() map[netip.Addr]neighbour {
	list, err := netlink.NeighList(at.nic, at.family)
	if err != nil {
		return nil
	}
	now := time.Now() // afterwards: an answer must not seem older than its request
	entries := make(map[netip.Addr]neighbour, len(list))
	for _, n := range list {
		if a, ok := netip.AddrFromSlice(n.IP); ok {
			entries[a.Unmap()] = neighbour{n, now.Add(-time.Duration(n.Confirmed) * clockTick)}
		}
	}
	return entries
}
