package lb

import (
	"net/netip"
	"slices"
)

// Pool is a named set of address ranges from which VIPs are assigned. Ranges of all pools are disjoint.
type Pool struct {
	Name   string
	Ranges []AddrRange
	// AutoAssign lets the pool serve requests that name no pool. Pools are tried by Priority, lowest first, then in
	// list order.
	AutoAssign bool
	Priority   int
	// AvoidBuggy excludes IPv4 addresses that end in .0 or .255 from assignment, because some old equipment drops them.
	AvoidBuggy bool
	// AvoidAnycast excludes IPv6 addresses for which IsSubnetRouterAnycast is true.
	AvoidAnycast bool
	// ShareAcross lets services in all namespaces share addresses by key.
	ShareAcross bool
	Announce    []AnnouncerKind
}

// Contains reports whether addr is in a range of p.
func (p Pool) Contains(addr netip.Addr) bool {
	return slices.ContainsFunc(p.Ranges, func(r AddrRange) bool { return r.Contains(addr) })
}

// assignable reports whether p assigns addr to a service that does not request it explicitly.
func (p Pool) assignable(addr netip.Addr) bool {
	if addr.Is6() {
		return !p.AvoidAnycast || !IsSubnetRouterAnycast(addr)
	}
	last := addr.As4()[3]
	return !p.AvoidBuggy || last != 0 && last != 255
}

// IsSubnetRouterAnycast reports whether an address is the first one of a /64: on a link with this prefix it belongs to
// the routers (RFC 4291, section 2.6.1).
func IsSubnetRouterAnycast(a netip.Addr) bool {
	b := a.As16()
	return a.Is6() && [8]byte(b[8:]) == [8]byte{}
}

// AddrRange is From to To, inclusive, both of the same family.
type AddrRange struct{ From, To netip.Addr }

// Contains reports whether a is in r.
func (r AddrRange) Contains(a netip.Addr) bool {
	return r.From.Is4() == a.Is4() && r.From.Compare(a) <= 0 && a.Compare(r.To) <= 0
}

// Size returns the number of addresses in r, which is inexact above 2^53.
func (r AddrRange) Size() float64 {
	n, from, to := 0.0, r.From.As16(), r.To.As16()
	for i := range from {
		n = n*256 + float64(to[i]) - float64(from[i])
	}
	return n + 1
}

// Without returns the parts of r that are not in p, which may be zero.
func (r AddrRange) Without(p netip.Prefix) (rest []AddrRange) {
	first := p.Masked().Addr()
	if r.From.BitLen() != first.BitLen() || r.To.Less(first) || LastOf(p).Less(r.From) {
		return []AddrRange{r}
	}
	if r.From.Less(first) {
		rest = append(rest, AddrRange{r.From, first.Prev()})
	}
	if last := LastOf(p); last.Less(r.To) {
		rest = append(rest, AddrRange{last.Next(), r.To})
	}
	return rest
}

// after returns the address in r that follows a, or zero if a is the last one.
func (r AddrRange) after(a netip.Addr) netip.Addr {
	if next := a.Next(); r.Contains(next) {
		return next
	}
	return netip.Addr{}
}

// Prefixes returns the prefixes that cover exactly r, in ascending order.
func (r AddrRange) Prefixes() (all []netip.Prefix) {
	for a := r.From; a.IsValid(); {
		p := netip.PrefixFrom(a, a.BitLen())
		for p.Bits() > 0 {
			wider := netip.PrefixFrom(a, p.Bits()-1)
			if wider.Masked() != wider || !r.Contains(LastOf(wider)) {
				break
			}
			p = wider
		}
		all, a = append(all, p), r.after(LastOf(p))
	}
	return all
}

// LastOf returns the last address of p.
func LastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 1 << (7 - bit%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// Family is an IP version.
type Family uint8

const (
	IPv4 Family = 4
	IPv6 Family = 6
)

// FamilyOf returns the family of a valid address.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() {
		return IPv4
	}
	return IPv6
}

// String returns "IPv4" or "IPv6".
func (f Family) String() string {
	if f == IPv4 {
		return "IPv4"
	}
	return "IPv6"
}
