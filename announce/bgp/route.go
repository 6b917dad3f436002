package bgp

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/apiutil"
	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/steelyard-lb/steelyard/lb"
)

// routes are prefixes to announce, each with the sum of its VIPs' weights, unweighted or lowered.
type routes map[netip.Prefix]int

// unweighted is the weight of a route without a link bandwidth community.
const unweighted = -3

// lowered is the weight of a route that routers should use only as a last resort.
const lowered = -1

// outdated is the weight of a route whose attributes in gobgp are from previous options.
const outdated = -2

// routesFor returns the routes for announcements, and an error with every VIP that cannot be announced.
func (o *Options) routesFor(announcements []lb.Announcement) (routes, lb.VIPErrors) {
	errs := lb.VIPErrors{}
	out := make(routes, len(announcements))
	for _, a := range announcements {
		vip := a.VIP.Unmap().WithZone("")
		if !vip.IsGlobalUnicast() {
			errs.Add(a.VIP, errors.New("not a global unicast address"))
			continue
		}
		p := o.prefixOf(vip)
		switch have := out[p]; {
		case a.LowerPreference && have == 0:
			out[p] = lowered
		case a.LowerPreference, have == unweighted:
		case !o.includes(a):
			out[p] = unweighted
		default:
			out[p] = max(have, 0) + max(a.Weight, 1)
		}
	}
	return out, errs
}

// limit removes routes beyond MaxRoutes, new ones first, and adds an error for each of their VIPs.
func (o *Options) limit(out, before routes, announcements []lb.Announcement, errs lb.VIPErrors) {
	if o.MaxRoutes == 0 || len(out) <= o.MaxRoutes {
		return
	}
	added := func(p netip.Prefix) int {
		if _, had := before[p]; had {
			return 0
		}
		return 1
	}
	all := slices.SortedFunc(maps.Keys(out), func(p, q netip.Prefix) int {
		return cmp.Or(added(p)-added(q), p.Compare(q))
	})
	for _, p := range all[o.MaxRoutes:] {
		delete(out, p)
	}
	for _, a := range announcements {
		if _, kept := out[o.prefixOf(a.VIP.Unmap().WithZone(""))]; !kept && errs[a.VIP] == nil {
			errs.Add(a.VIP, fmt.Errorf("%d routes are already announced, which is max_routes of [bgp]", o.MaxRoutes))
		}
	}
}

// prefixOf returns the prefix announced for a VIP.
func (o *Options) prefixOf(vip netip.Addr) netip.Prefix {
	pool := o.poolOf(vip)
	bits := cmp.Or(pool.AggregateV6, o.AggregateV6)
	if vip.Is4() {
		bits = cmp.Or(pool.AggregateV4, o.AggregateV4)
	}
	return netip.PrefixFrom(vip, bits).Masked()
}

type change struct {
	prefix netip.Prefix
	weight int // 0 to withdraw
}

// changes returns the changes from one set of routes to another, withdrawals first.
func changes(from, to routes) []change {
	var steps []change
	for p := range from {
		if _, ok := to[p]; !ok {
			steps = append(steps, change{prefix: p})
		}
	}
	for p, weight := range to {
		if from[p] != weight {
			steps = append(steps, change{p, weight})
		}
	}
	slices.SortFunc(steps, func(a, b change) int {
		if withdrawn := a.weight == 0; withdrawn != (b.weight == 0) {
			if withdrawn {
				return -1
			}
			return 1
		}
		return a.prefix.Compare(b.prefix)
	})
	return steps
}

// path returns c as a gobgp path. The next hop is unspecified, because gobgp replaces it with the session's local
// address (table.UpdatePathAttrs), or the export policy sets it (policy.go).
func (o *Options) path(c change) (*api.Path, error) {
	addr, bits := c.prefix.Addr(), uint8(c.prefix.Bits())
	attrs := []bgp.PathAttributeInterface{bgp.NewPathAttributeOrigin(bgp.BGP_ORIGIN_ATTR_TYPE_IGP)}
	var nlri bgp.AddrPrefixInterface
	if addr.Is4() {
		nlri = bgp.NewIPAddrPrefix(bits, addr.String())
		attrs = append(attrs, bgp.NewPathAttributeNextHop("0.0.0.0"))
	} else {
		nlri = bgp.NewIPv6AddrPrefix(bits, addr.String())
		attrs = append(attrs, bgp.NewPathAttributeMpReachNLRI("::", []bgp.AddrPrefixInterface{nlri}))
	}
	if c.weight != 0 {
		attrs = append(attrs, o.attributes(c.prefix, c.weight)...)
	}
	p, err := apiutil.NewPath(nlri, c.weight == 0, attrs, time.Now())
	if err != nil {
		return nil, fmt.Errorf("build a path for %v: %w", c.prefix, err)
	}
	return p, nil
}

// gracefulShutdown is the community that requests the lowest preference (RFC 8326); lowestMED is for routers that do
// not support it. Within one AS, LOCAL_PREF 0 has the same effect.
const (
	gracefulShutdown = 0xffff0000
	lowestMED        = 1<<32 - 1
)

// poolOf returns the pool of an address, or an empty pool if there is none.
func (o *Options) poolOf(addr netip.Addr) *Pool {
	for i := range o.Pools {
		for _, r := range o.Pools[i].Ranges {
			if r.Contains(addr) {
				return &o.Pools[i]
			}
		}
	}
	return &noPool
}

var noPool Pool

// attributes returns the attributes of an announced route. An aggregate has the attributes of its first address's pool.
// gobgp removes LOCAL_PREF for eBGP peers.
func (o *Options) attributes(prefix netip.Prefix, weight int) []bgp.PathAttributeInterface {
	pool := o.poolOf(prefix.Addr())
	localPref, med := o.LocalPref, pool.MED
	if pool.LocalPref != nil {
		localPref = *pool.LocalPref
	}
	communities := slices.Concat(o.Communities, pool.Communities)
	largeCommunities := slices.Concat(o.LargeCommunities, pool.LargeCommunities)
	var attrs []bgp.PathAttributeInterface
	if weight == lowered {
		lowest := uint32(lowestMED)
		localPref, med, communities = 0, &lowest, append(communities, gracefulShutdown)
	}
	if med != nil {
		attrs = append(attrs, bgp.NewPathAttributeMultiExitDisc(*med))
	}
	attrs = append(attrs, bgp.NewPathAttributeLocalPref(localPref))
	if len(communities) > 0 {
		attrs = append(attrs, bgp.NewPathAttributeCommunities(communities))
	}
	if len(largeCommunities) > 0 {
		large := make([]*bgp.LargeCommunity, len(largeCommunities))
		for i, c := range largeCommunities {
			large[i] = bgp.NewLargeCommunity(c[0], c[1], c[2])
		}
		attrs = append(attrs, bgp.NewPathAttributeLargeCommunities(large))
	}
	var ext []bgp.ExtendedCommunityInterface
	for _, c := range slices.Concat(o.ExtCommunities, pool.ExtCommunities) {
		if parsed, err := bgp.ParseExtended(c[:]); err == nil { // fails only for too few bytes
			ext = append(ext, parsed)
		}
	}
	if weight > 0 {
		asn := uint16(bgp.AS_TRANS) // the community has only two bytes (RFC 6793)
		if o.ASN <= 65535 {
			asn = uint16(o.ASN)
		}
		ext = append(ext, bgp.NewLinkBandwidthExtended(asn, float32(weight)*bandwidthUnit))
	}
	if len(ext) > 0 {
		attrs = append(attrs, bgp.NewPathAttributeExtendedCommunities(ext))
	}
	return attrs
}
