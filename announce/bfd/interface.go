package bfd

import (
	"time"

	"github.com/vishvananda/netlink"
)

// lookupInterval is the minimum time between lookups of a session's interface. A packet from another interface triggers
// a lookup, because the route may have changed, but a flood of packets must cost little.
const lookupInterval = 100 * time.Millisecond

// arrivesBy reports whether an interface leads to the neighbor. A single-hop session is bound to it (RFC 5881, section
// 3), so that hosts on other links cannot send packets for this session.
func (s *session) arrivesBy(ifindex int) bool {
	if now := time.Now(); ifindex != s.ifindex && now.Sub(s.lookedUp) >= lookupInterval {
		s.ifindex, s.lookedUp = s.lookup(), now
	}
	return ifindex != 0 && ifindex == s.ifindex
}

// lookup returns the index of the interface that leads to the neighbor, or 0 if none does.
func (s *session) lookup() int {
	if zone := s.Addr.Zone(); zone != "" {
		return int(zoneID(zone))
	}
	r, _ := s.route()
	return r.LinkIndex
}

// route returns the route to the neighbor, or false if there is none.
func (s *session) route() (netlink.Route, bool) {
	o := netlink.RouteGetOptions{Oif: s.Device}
	if s.Source.IsValid() {
		o.SrcAddr = s.Source.AsSlice() // routing rules may depend on it
	}
	routes, err := netlink.RouteGetWithOptions(s.Addr.AsSlice(), &o)
	if err != nil || len(routes) == 0 {
		return netlink.Route{}, false
	}
	return routes[0], true
}
