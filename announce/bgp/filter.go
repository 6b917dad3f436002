package bgp

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"

	api "github.com/osrg/gobgp/v3/api"

	"github.com/steelyard-lb/steelyard/lb"
)

// filter is the set of routes that a peer receives, as disjoint prefixes. A nil filter admits all routes.
type filter []netip.Prefix

func (o *Options) only(p *Peer) filter {
	if len(p.Pools) == 0 {
		return nil
	}
	var ranges []lb.AddrRange
	for _, pool := range o.Pools {
		if slices.Contains(p.Pools, pool.Name) {
			ranges = append(ranges, pool.Ranges...)
		}
	}
	return filterOf(ranges)
}

// filterOf returns the prefixes that cover ranges. An aggregate may span two adjacent ranges.
func filterOf(ranges []lb.AddrRange) filter {
	ranges = slices.Clone(ranges)
	slices.SortFunc(ranges, func(a, b lb.AddrRange) int { return a.From.Compare(b.From) })
	f := filter{}
	for i := 0; i < len(ranges); {
		r := ranges[i]
		for i++; i < len(ranges) && r.To.Next() == ranges[i].From; i++ {
			r.To = ranges[i].To
		}
		f = append(f, r.Prefixes()...)
	}
	return f
}

func (f filter) allows(p netip.Prefix) bool {
	return f == nil || slices.ContainsFunc(f, func(in netip.Prefix) bool {
		return in.Bits() <= p.Bits() && in.Contains(p.Addr())
	})
}

// String returns all prefixes, or "" for a nil filter.
func (f filter) String() string {
	if f == nil {
		return ""
	}
	return fmt.Sprint([]netip.Prefix(f))
}

// sets returns the gobgp sets for a peer's policy, one per family.
func (f filter) sets(peer string) (sets []*api.DefinedSet) {
	byFamily := map[string]*api.DefinedSet{}
	for _, p := range f {
		name := setName(p.Addr().Is4(), peer)
		if byFamily[name] == nil {
			byFamily[name] = &api.DefinedSet{DefinedType: api.DefinedType_PREFIX, Name: name}
			sets = append(sets, byFamily[name])
		}
		byFamily[name].Prefixes = append(byFamily[name].Prefixes, &api.Prefix{
			IpPrefix: p.String(), MaskLengthMin: uint32(p.Bits()), MaskLengthMax: uint32(p.Addr().BitLen()),
		})
	}
	return sets
}

// condition returns the condition that a route of a family is in the filter, or false if the filter has no such routes.
func (f filter) condition(v4 bool, peer string) (*api.MatchSet, bool) {
	if f == nil {
		return nil, true
	}
	some := slices.ContainsFunc(f, func(p netip.Prefix) bool { return p.Addr().Is4() == v4 })
	return &api.MatchSet{Type: api.MatchSet_ANY, Name: setName(v4, peer)}, some
}

func setName(v4 bool, peer string) string {
	if v4 {
		return "ipv4 of " + peer
	}
	return "ipv6 of " + peer
}

// extText formats an extended community as gobgp expects it in a policy, with four-byte AS numbers as two numbers.
func extText(c [8]byte) string {
	kind := map[byte]string{2: "rt", 3: "soo"}[c[1]]
	a, b := binary.BigEndian.Uint16(c[2:]), binary.BigEndian.Uint16(c[4:])
	switch c[0] {
	case 1: // IPv4 address
		return fmt.Sprintf("%s:%v:%d", kind, netip.AddrFrom4([4]byte(c[2:6])), binary.BigEndian.Uint16(c[6:]))
	case 2: // four-byte AS number
		return fmt.Sprintf("%s:%d.%d:%d", kind, a, b, binary.BigEndian.Uint16(c[6:]))
	}
	return fmt.Sprintf("%s:%d:%d", kind, a, binary.BigEndian.Uint32(c[4:]))
}
