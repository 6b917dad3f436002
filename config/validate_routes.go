package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/steelyard-lb/steelyard/lb"
)

// aggregates reports announced prefixes with addresses outside all pools. If the pool has its own prefix length, or
// peers choose pools, it also reports prefixes with addresses of other pools.
func (d *decoder) aggregates() {
	b := d.config.BGP
	if b == nil || d.pools.broken {
		return
	}
	d.aggregatesOf(true, prefixRule{item: d.bgpItem("aggregate_v4"), bits: b.AggregateV4, full: 32})
	d.aggregatesOf(false, prefixRule{item: d.bgpItem("aggregate_v6"), bits: b.AggregateV6, full: 128})
}

func (d *decoder) bgpItem(key string) item { return item{d: d, path: joinKey("bgp", key)} }

// prefixRule says which prefixes may be announced: prefixes of one length within one of the ranges.
type prefixRule struct {
	item       item
	bits, full int
	ranges     []lb.AddrRange
	own        bool // all ranges belong to one pool
}

// allows reports whether the prefix of addr may be announced, and reports an error if not.
func (r *prefixRule) allows(addr netip.Addr) bool {
	p, _ := addr.Prefix(r.bits)
	for _, in := range r.ranges {
		if in.Contains(p.Addr()) && in.Contains(lb.LastOf(p)) {
			return true
		}
	}
	where, problem := "pools that are announced by bgp", "but no pool contains all of it"
	if r.own {
		where, problem = "this pool", "but the pool does not contain all of it"
	}
	r.item.errorf(fmt.Sprintf("write %d, or put all of %s in %s", r.full, p, where),
		"%d would announce %s for %s, %s", r.bits, p, addr, problem)
	return false
}

// aggregatesOf checks the pools of one family against [bgp]'s rule, or against their own rules if they have them.
func (d *decoder) aggregatesOf(v4 bool, global prefixRule) {
	for n := range d.config.Pools {
		p, rule, only := &d.config.Pools[n], global, joined(d.config.Pools[n:n+1], v4)
		rule.ranges, rule.own = joined(d.config.Pools, v4), false
		if d.choosesPools() {
			rule.ranges, rule.own = only, true
		}
		own := p.aggregate(v4)
		if own != 0 {
			key := strings.TrimPrefix(global.item.where(), "bgp.")
			rule.item = item{d: d, path: "pool" + index(n) + "." + key, object: fmt.Sprintf("pool %q", p.Name)}
			rule.bits, rule.ranges, rule.own = own, only, true
		}
		if rule.bits == rule.full {
			continue
		}
		for _, r := range only {
			if rule.allows(r.From) && rule.allows(r.To) {
				continue
			}
			if own == 0 {
				return
			}
			break
		}
	}
	if len(d.config.Pools) > 0 || global.bits == global.full {
		return // all service addresses are in pools, and so already checked
	}
	for _, s := range d.config.Services {
		for _, a := range s.Addresses {
			if a.Is4() == v4 && !global.allows(a) {
				return
			}
		}
	}
}

// aggregate returns the length of announced prefixes of a family, or 0 for [bgp]'s length.
func (p *Pool) aggregate(v4 bool) int {
	if v4 {
		return p.AggregateV4
	}
	return p.AggregateV6
}

// choosesPools reports whether any peer receives the routes of only some pools.
func (d *decoder) choosesPools() bool {
	return slices.ContainsFunc(d.config.BGP.Peers, func(p Peer) bool { return len(p.Pools) > 0 })
}

// poolsOfPeers reports peers' pools that do not exist or are not announced over BGP.
func (d *decoder) poolsOfPeers() {
	if d.config.BGP == nil || d.pools.broken {
		return
	}
	var names []string
	for _, p := range d.config.Pools {
		names = append(names, p.Name)
	}
	for n, peer := range d.config.BGP.Peers {
		for m, name := range peer.Pools {
			i := item{d: d, path: "bgp.peers" + index(n) + ".pools" + index(m)}
			switch p := d.poolNamed(name); {
			case p == nil && suggest(name, names) != "":
				i.errorf("did you mean "+suggest(name, names)+"?", "there is no pool %q", name)
			case p == nil:
				i.errorf("add a [[pool]] with this name, or leave it out", "there is no pool %q", name)
			case len(p.Announce) > 0 && !slices.Contains(p.Announce, lb.AnnounceBGP):
				i.errorf(`add "bgp" to its announce, or leave it out`, "pool %q is not announced by bgp", name)
			}
		}
	}
}

// joined returns the ranges of the pools announced over BGP, and joins adjacent ones.
func joined(pools []Pool, v4 bool) []lb.AddrRange {
	var ranges []lb.AddrRange
	for _, p := range pools {
		if len(p.Announce) > 0 && !slices.Contains(p.Announce, lb.AnnounceBGP) {
			continue
		}
		for _, r := range p.Ranges {
			if r.From.Is4() == v4 {
				ranges = append(ranges, r)
			}
		}
	}
	slices.SortFunc(ranges, func(a, b lb.AddrRange) int { return a.From.Compare(b.From) })
	var joined []lb.AddrRange
	for _, r := range ranges {
		if n := len(joined); n > 0 && joined[n-1].To.Next() == r.From {
			joined[n-1].To = r.To
			continue
		}
		joined = append(joined, r)
	}
	return joined
}
