package verify

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/internal/flow"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/lb"
)

// Clients chooses the sources of synthetic packets.
type Clients struct {
	v4, v6 netip.Addr
	// Had4 and had6 say which clients were reachable. It is a fault if these no longer are, even if others still are.
	Had4, had6 reach
	// nics holds the interfaces through which replies last left, by whether the client uses IPv4.
	nics map[bool]int
	// Chosen is route.Cache.Since when the clients were chosen.
	Chosen time.Time
}

// reach says which clients behind routers the kernel has routes to.
type reach int

const (
	reachLink   reach = iota // none
	reachSome                // some
	ReachPublic              // clients on the Internet
)

// choose selects a routed address behind a router or, if there is none, an address on a link of this node.
func (c *Clients) choose(v view, routes *route.Cache) {
	c.v4, c.Had4 = chooseClient(route.Far4, c.Had4, v, routes)
	c.v6, c.had6 = chooseClient(route.Far6, c.had6, v, routes)
	c.Chosen = routes.Since
}

func chooseClient(far route.FarAddrs, had reach, v view, routes *route.Cache) (netip.Addr, reach) {
	client, n := routes.Widest(far.Public)
	switch {
	case 2*n > len(far.Public):
		return client, ReachPublic
	case had == ReachPublic:
		if i := slices.IndexFunc(far.Public, func(a netip.Addr) bool { return !routes.Routed(a) }); i >= 0 {
			return far.Public[i], ReachPublic
		}
	}
	if client, n := routes.Widest(far.All()); n > 0 {
		return client, reachSome
	}
	if had == reachSome {
		return far.Public[0], reachSome
	}
	return neighbour(far.Public[0], v, routes), reachLink
}

// neighbour returns another host's address on the link of an interface with programs, or other, of the same family, if
// there is none.
func neighbour(other netip.Addr, v view, routes *route.Cache) netip.Addr {
	addrs, _ := netlink.AddrList(nil, netlink.FAMILY_ALL) // after an error there is none
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		ip = ip.Unmap()
		ones, bits := a.Mask.Size()
		if !ok || !v.Attached[a.LinkIndex] || ip.Is4() != other.Is4() || !ip.IsGlobalUnicast() || ones == bits {
			continue
		}
		p := netip.PrefixFrom(ip, ones)
		x := p.Masked().Addr().Next()
		for v.own[x] {
			x = x.Next()
		}
		if p.Contains(x) && routes.Routed(x) {
			return x
		}
	}
	return other
}

// Of returns a client that may use a VIP, for synthetic packets. It returns false if none may.
func (c *Clients) Of(vip netip.Addr, allow []netip.Prefix) (netip.Addr, bool) {
	client := c.v6
	if vip.Is4() {
		client = c.v4
	}
	if len(allow) == 0 || route.Contains(allow, client) {
		return client, true
	}
	for _, p := range allow {
		if p.Addr().Is4() == vip.Is4() {
			if p.IsSingleIP() {
				return p.Addr(), true
			}
			return p.Masked().Addr().Next(), true
		}
	}
	return client, false
}

// LostClients returns a phrase about the sampled clients that would not receive a reply, or "" if all would. Later
// samples do not contain these clients, so it checks them again until they receive replies, or for flow.KeepClients.
func (v *Verifier) LostClients(sample []lb.Question, now time.Time) string {
	was := v.warned.lostSince
	v.warned.lostSince = map[lb.Question]time.Time{}
	all := map[lb.Question]time.Time{}
	for q, since := range was {
		if now.Sub(since) < flow.KeepClients {
			all[q] = since
		}
	}
	for _, q := range sample {
		if _, ok := all[q]; !ok {
			all[q] = now
		}
	}
	first, text := netip.Addr{}, ""
	for q, since := range all {
		fault := v.clientFault(q)
		if fault == "" {
			continue
		}
		v.warned.lostSince[q] = since
		if a := q.Client.Addr(); !first.IsValid() || a.Less(first) {
			first, text = a, fmt.Sprintf("%s: %s", a, fault)
		}
	}
	if text == "" {
		return ""
	}
	return fmt.Sprintf("replies do not reach %d of %d sampled clients, such as %s",
		len(v.warned.lostSince), len(all), text)
}

// clientFault returns why a client would not receive a reply although its packets are forwarded, or "" if it would.
func (v *Verifier) clientFault(q lb.Question) string {
	if !q.To.Addr().IsValid() {
		return "" // the frontend was removed
	}
	x, ok := v.run(opening(q))
	if !ok || v.Names.Actions[x.V.Action] != "forward" {
		return ""
	}
	return v.replyFault(q, x, x.V.Local == 1)
}
