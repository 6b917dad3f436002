package route

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A route says where packets go, not whether a host is there. The kernel learns whether a router answers ARP or NDP
// only if it is made to ask. Without this check, an address could be announced to one router while replies go to
// another router that is down.

// Intervals and limits of requests to routers. A tick may come early or late by tickSlack.
const (
	tickSlack    = Tick / 2
	routersEvery = time.Second - tickSlack
	// againEvery applies to a router that has not answered.
	againEvery = 500*time.Millisecond - tickSlack
	// maxRequests is the number of unanswered requests after which a router has failed. A router under load may
	// rate-limit its answers.
	maxRequests = 5
	// maxAsked bounds the number of routers asked per round. In a cluster every node can be a router. If there are
	// more, they take turns.
	maxAsked = 64
)

// Routers tracks the next hops of packets to clients and backends behind routers.
type Routers struct {
	At        time.Time
	Known     map[Router]Asked
	faults    map[netip.Addr]string // by client or backend, since At
	waiting   bool                  // some were not asked at At, because of maxAsked
	requester requester
}

// Asked is what is known about a router.
type Asked struct {
	at time.Time // time of the last request
	// since is the time of the oldest unanswered request, or zero if all were answered.
	since time.Time
	// requests is the number of unanswered requests. The first goes to the router's MAC address, if known. Some routers
	// do not answer such requests, so the others go to all hosts.
	requests int
	Failed   bool
}

// doubtful reports whether requests are unanswered and the router has not failed.
func (a Asked) doubtful() bool { return a.requests > 0 && !a.Failed }

func (a Asked) due(now time.Time) bool { return a.doubtful() || now.Sub(a.at) >= routersEvery }

// Router is a next hop.
type Router struct {
	NIC  int
	Addr netip.Addr
	// Server says that this is a backend on the link. It is asked because its MAC address may change. Health checks
	// find out whether it is alive.
	Server bool
}

// Valid holds the states of a neighbour whose MAC address is known (NUD_VALID).
const Valid = unix.NUD_PERMANENT | unix.NUD_NOARP | unix.NUD_REACHABLE | unix.NUD_PROBE | unix.NUD_STALE |
	unix.NUD_DELAY

func (r *Routers) Close() { r.requester.close() }

// Due reports whether it is time to call Look again.
func (r *Routers) Due(now time.Time) bool { return now.Sub(r.At) >= againEvery }

// Look reads whether the next hops towards clients and backends have answered, and asks them again. It covers the
// sample addresses (FarAddrs) in addition to clients.
func (r *Routers) Look(now time.Time, routes *Cache, clients []netip.Addr, towards []Router) {
	was := r.Known
	r.At, r.Known, r.faults = now, map[Router]Asked{}, map[netip.Addr]string{}
	hops := slices.Clone(towards)
	for _, client := range slices.Concat(Far4.All(), Far6.All(), clients) {
		hops = append(hops, routes.NextHops(client)...)
	}
	entries := NewNeighbours(routes.Kernel)
	var ask []Router
	for _, x := range hops {
		if _, seen := r.Known[x]; seen {
			continue
		}
		n, read := entries.Of(x)
		r.Known[x] = was[x].after(n, read)
		recent := x.Server && now.Sub(n.confirmed) < routersEvery
		if read && n.State&configured == 0 && r.Known[x].due(now) && !recent {
			ask = append(ask, x)
		}
	}
	r.ask(ask, entries, routes)
	for x, a := range r.Known {
		if a.requests > 1 && !x.Server { // the kernel may have switched to another router (IPv6: RFC 4191, 3.2)
			routes.Forget(now, routesFor)
			return
		}
	}
}

// ask sends requests to up to maxAsked of the routers.
func (r *Routers) ask(all []Router, entries Neighbours, routes *Cache) {
	r.requester.begin(routes)
	for _, x := range r.first(all) {
		n, _ := entries.Of(x)
		a, now, err := r.Known[x], time.Now(), error(nil)
		if n.State&Valid != 0 {
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
		case !a.Failed: // failing to send is not the router's failure
			a = Asked{at: now}
		}
		r.Known[x] = a
	}
}

// Doubtful reports whether a next hop must be asked soon: it has left a request unanswered and has not failed yet, or
// was not asked because others were.
func (r *Routers) Doubtful() bool {
	for _, a := range r.Known {
		if a.requests > 1 && !a.Failed {
			return true
		}
	}
	return r.waiting
}

// first returns at most maxAsked of the routers: the doubtful ones first, then the least recently asked.
func (r *Routers) first(all []Router) []Router {
	slices.SortStableFunc(all, func(x, y Router) int {
		a, b := r.Known[x], r.Known[y]
		switch {
		case a.doubtful() == b.doubtful():
			return a.at.Compare(b.at)
		case a.doubtful():
			return -1
		}
		return 1
	})
	r.waiting = len(all) > maxAsked
	return all[:min(maxAsked, len(all))]
}

// Fault returns why packets to a client or backend do not arrive, or "" if nothing is known. It is enough if one of
// several routers answers.
func (r *Routers) Fault(to netip.Addr, whose string, routes *Cache) string {
	fault, known := r.faults[to]
	if !known {
		hops := routes.NextHops(to)
		if len(hops) > 0 && !slices.ContainsFunc(hops, func(x Router) bool { return !r.Known[x].Failed }) {
			fault = fmt.Sprintf("%s, the next hop %s, does not answer", hops[0].Addr, whose)
		}
		r.faults[to] = fault
	}
	return fault
}

// resolve makes the kernel ask all hosts for a router's MAC address, as if it sent a packet to the router (NTF_USE,
// neigh_add in net/core/neighbour.c). It has no effect if the kernel is already asking.
func (x Router) resolve() error {
	err := netlink.NeighSet(&netlink.Neigh{
		LinkIndex: x.NIC, Family: x.family(), IP: x.Addr.AsSlice(), Flags: netlink.NTF_USE,
	})
	if err != nil {
		return fmt.Errorf("resolve router %s: %w", x.Addr, err)
	}
	return nil
}

func (x Router) family() int {
	if x.Addr.Is6() {
		return netlink.FAMILY_V6
	}
	return netlink.FAMILY_V4
}

// after returns what is known about a router given its neighbour entry, or a unchanged if the entry was not read.
func (a Asked) after(n neighbour, read bool) Asked {
	switch {
	case !read:
		return a
	case n.State&configured != 0, n.State&Valid != 0 && !n.confirmed.Before(a.since):
		return Asked{at: a.at}
	}
	a.Failed = a.Failed || a.requests >= maxRequests
	return a
}

// neighbour is a kernel neighbour entry, or zero if there is none.
type neighbour struct {
	netlink.Neigh
	confirmed time.Time // upper bound for the time of its last answer
}

// configured holds the states of a neighbour that the kernel does not probe.
const configured = unix.NUD_PERMANENT | unix.NUD_NOARP

// Neighbours caches the neighbour entries by interface and family, each read once.
type Neighbours struct {
	handle *netlink.Handle
	read   map[nicFamily]map[netip.Addr]neighbour
}

// NewNeighbours returns an empty cache.
func NewNeighbours(k *Kernel) Neighbours {
	return Neighbours{k.Handle(), map[nicFamily]map[netip.Addr]neighbour{}}
}

type nicFamily struct{ nic, family int }

// Of returns a router's entry. read is false if the kernel's entries could not be read.
func (all Neighbours) Of(x Router) (n neighbour, read bool) {
	at := nicFamily{x.NIC, x.family()}
	entries, ok := all.read[at]
	if !ok {
		entries = at.neighbours(all.handle)
		all.read[at] = entries
	}
	return entries[x.Addr], entries != nil
}

// clockTick is the time unit of neighbour entries (USER_HZ).
const clockTick = time.Second / 100

func (at nicFamily) neighbours(h *netlink.Handle) map[netip.Addr]neighbour {
	list, err := h.NeighList(at.nic, at.family)
	if err != nil {
		return nil
	}
	now := time.Now() // read after the list, so that an answer never seems older than its request
	entries := make(map[netip.Addr]neighbour, len(list))
	for _, n := range list {
		if a, ok := netip.AddrFromSlice(n.IP); ok {
			entries[a.Unmap()] = neighbour{n, now.Add(-time.Duration(n.Confirmed) * clockTick)}
		}
	}
	return entries
}
