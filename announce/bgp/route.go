package bgp

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/apiutil"
	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/steelyard-lb/steelyard/lb"
)

// bandwidthUnit is the link bandwidth announced for a weight of one, in bytes a second: 1 Gbit/s. Routers compare the
// values with each other, so only the proportion matters.
const bandwidthUnit = 125e6

// routes is what is to be announced: prefixes, each with the weight of all VIPs in it.
type routes map[netip.Prefix]int

// routesFor returns the routes of announcements, and an error that names every VIP that cannot be announced.
func (o *Options) routesFor(announcements []lb.Announcement) (routes, error) {
	var errs []error
	out := make(routes, len(announcements))
	for _, a := range announcements {
		vip := a.VIP.Unmap().WithZone("")
		if !vip.IsGlobalUnicast() {
			errs = append(errs, fmt.Errorf("announce %v: not a global unicast address", a.VIP))
			continue
		}
		bits := o.AggregateV6
		if vip.Is4() {
			bits = o.AggregateV4
		}
		out[netip.PrefixFrom(vip, bits).Masked()] += max(a.Weight, 1)
	}
	return out, errors.Join(errs...)
}

// change is one step from one set of routes to another.
type change struct {
	prefix netip.Prefix
	weight int // 0: withdraw
}

// changes returns the steps from one set of routes to another, withdrawals first. A change of weight is one only when
// the weight is announced.
func (o *Options) changes(from, to routes) []change {
	var steps []change
	for p := range from {
		if _, ok := to[p]; !ok {
			steps = append(steps, change{prefix: p})
		}
	}
	for p, weight := range to {
		if before, ok := from[p]; !ok || (o.Weighted && before != weight) {
			steps = append(steps, change{p, weight})
		}
	}
	slices.SortFunc(steps, func(a, b change) int {
		return cmp.Or(cmp.Compare(min(a.weight, 1), min(b.weight, 1)), a.prefix.Compare(b.prefix))
	})
	return steps
}

// path returns c as gobgp takes it. The next hop is unspecified: gobgp writes our address of the session into it (table.
// UpdatePathAttrs), and the export policy what else is needed (policy.go).
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
	if c.weight > 0 {
		attrs = append(attrs, o.attributes(c.weight)...)
	}
	p, err := apiutil.NewPath(nlri, c.weight == 0, attrs, time.Now())
	if err != nil {
		return nil, fmt.Errorf("build a path for %v: %w", c.prefix, err)
	}
	return p, nil
}

// attributes returns what is said of every route. LOCAL_PREF is for peers of our own ASN; gobgp drops it for others.
func (o *Options) attributes(weight int) []bgp.PathAttributeInterface {
	attrs := []bgp.PathAttributeInterface{bgp.NewPathAttributeLocalPref(o.LocalPref)}
	if len(o.Communities) > 0 {
		attrs = append(attrs, bgp.NewPathAttributeCommunities(o.Communities))
	}
	if len(o.LargeCommunities) > 0 {
		large := make([]*bgp.LargeCommunity, len(o.LargeCommunities))
		for i, c := range o.LargeCommunities {
			large[i] = bgp.NewLargeCommunity(c[0], c[1], c[2])
		}
		attrs = append(attrs, bgp.NewPathAttributeLargeCommunities(large))
	}
	if o.Weighted {
		asn := uint16(bgp.AS_TRANS) // the community has room for two bytes (RFC 6793)
		if o.ASN <= 65535 {
			asn = uint16(o.ASN)
		}
		bandwidth := bgp.NewLinkBandwidthExtended(asn, float32(weight)*bandwidthUnit)
		attrs = append(attrs, bgp.NewPathAttributeExtendedCommunities([]bgp.ExtendedCommunityInterface{bandwidth}))
	}
	return attrs
}
