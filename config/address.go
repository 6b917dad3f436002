package config

import (
	"fmt"
	"net/netip"
	"strings"
)

// Range is the addresses from From to To, both included and of one family.
type Range struct{ From, To netip.Addr }

// Contains says whether addr is in r.
func (r Range) Contains(addr netip.Addr) bool {
	return r.From.Is4() == addr.Is4() && r.From.Compare(addr) <= 0 && addr.Compare(r.To) <= 0
}

// Overlaps says whether an address is in both.
func (r Range) Overlaps(o Range) bool {
	return r.From.Is4() == o.From.Is4() && r.From.Compare(o.To) <= 0 && o.From.Compare(r.To) <= 0
}

// Prefix returns the prefix that is the same as r, if there is one.
func (r Range) Prefix() (netip.Prefix, bool) {
	for bits := 0; bits <= r.From.BitLen(); bits++ {
		p := netip.PrefixFrom(r.From, bits)
		if p.Masked() == p && last(p) == r.To {
			return p, true
		}
	}
	return netip.Prefix{}, false
}

// String is "203.0.113.0/28", or "203.0.113.40-203.0.113.50", or the address if it is one.
func (r Range) String() string {
	if r.From == r.To {
		return r.From.String()
	}
	if p, ok := r.Prefix(); ok {
		return p.String()
	}
	return r.From.String() + "-" + r.To.String()
}

// last returns the last address of p.
func last(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(b)*8; bit++ {
		b[bit/8] |= 1 << (7 - bit%8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

const likeAddr = "192.0.2.1"

// addr returns an address without zone; an IPv4 address is a plain one.
func (i item) addr() (netip.Addr, bool) {
	s, ok := i.str(likeAddr)
	if !ok {
		return netip.Addr{}, false
	}
	return i.parseAddr(s)
}

func (i item) parseAddr(s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		hint := `write one like "192.0.2.1" or "2001:db8::1"`
		if p, err := netip.ParsePrefix(s); err == nil && (p.IsSingleIP() || p != p.Masked()) {
			hint = fmt.Sprintf("write %q", p.Addr())
		} else if ap, err := netip.ParseAddrPort(s); err == nil {
			hint = fmt.Sprintf("write %q, without a port", ap.Addr())
		}
		i.errorf(hint, "%q is not an IP address", s)
		return netip.Addr{}, false
	}
	if a.Is4In6() {
		i.errorf(fmt.Sprintf("write %q", a.Unmap()), "%q is an IPv4 address in IPv6 form", s)
		return netip.Addr{}, false
	}
	if a.Zone() != "" {
		i.errorf(fmt.Sprintf("write %q", a.WithZone("")), "%q has a zone", s)
		return netip.Addr{}, false
	}
	return a, true
}

// special are the ranges nobody may send to from elsewhere: none of them can be a VIP or a backend.
var special = []struct{ prefix, what string }{
	{"0.0.0.0/8", `"this network" (RFC 1122 §3.2.1.3)`},
	{"127.0.0.0/8", "loopback"},
	{"169.254.0.0/16", "link-local"},
	{"224.0.0.0/4", "multicast"},
	{"240.0.0.0/4", "reserved or broadcast"},
	{"::/128", "the unspecified address"},
	{"::1/128", "loopback"},
	{"::ffff:0:0/96", "IPv4 in IPv6 form"},
	{"fe80::/10", "link-local"},
	{"ff00::/8", "multicast"},
}

// whySpecial says what special addresses r has; "" when it has none.
func whySpecial(r Range) string {
	for _, s := range special {
		p := netip.MustParsePrefix(s.prefix)
		if r.Overlaps(Range{p.Addr(), last(p)}) {
			return s.what
		}
	}
	return ""
}

// unicast is addr for an address that others send to.
func (i item) unicast() (netip.Addr, bool) {
	a, ok := i.addr()
	if ok {
		ok = i.isUnicast(a)
	}
	return a, ok
}

func (i item) isUnicast(a netip.Addr) bool {
	why := whySpecial(Range{a, a})
	if why != "" {
		i.errorf("write an address that others can send to", "%s is %s", a, why)
	}
	return why == ""
}

// host is addr for the address of a machine, in which loopback and link-local have a use.
func (i item) host() (netip.Addr, bool) {
	a, ok := i.addr()
	if ok && (a.IsUnspecified() || a.IsMulticast()) {
		i.errorf("write the address of one machine", "%s is not the address of a machine", a)
		return a, false
	}
	return a, ok
}

// prefix returns a CIDR; a single address stands for itself.
func (i item) prefix() (netip.Prefix, bool) {
	s, ok := i.str("192.0.2.0/24")
	if !ok {
		return netip.Prefix{}, false
	}
	if !strings.Contains(s, "/") {
		a, ok := i.parseAddr(s)
		if !ok {
			return netip.Prefix{}, false
		}
		return netip.PrefixFrom(a, a.BitLen()), true
	}
	p, err := netip.ParsePrefix(s)
	if err != nil || p.Addr().Is4In6() {
		i.errorf(`write one like "192.0.2.0/24" or "2001:db8::/64"`, "%q is not a prefix", s)
		return netip.Prefix{}, false
	}
	if p != p.Masked() {
		i.errorf(fmt.Sprintf("write %q, or %q for the one address", p.Masked(), p.Addr()),
			"%q has bits after its prefix length", s)
		return netip.Prefix{}, false
	}
	return p, true
}

// addrRange returns "a.b.c.d/n", "a-b" or a single address, none of it special.
func (i item) addrRange() (Range, bool) {
	s, ok := i.str("203.0.113.0/28")
	if !ok {
		return Range{}, false
	}
	from, to, isRange := strings.Cut(s, "-")
	var r Range
	if isRange {
		if r.From, ok = i.parseAddr(strings.TrimSpace(from)); !ok {
			return r, false
		}
		if r.To, ok = i.parseAddr(strings.TrimSpace(to)); !ok {
			return r, false
		}
		if r.From.Is4() != r.To.Is4() {
			i.errorf("write both in one family", "%q goes from one address family to the other", s)
			return r, false
		}
		if r.To.Less(r.From) {
			i.errorf(fmt.Sprintf("write %q", Range{r.To, r.From}), "%q ends before it begins", s)
			return r, false
		}
	} else {
		p, ok := i.prefix()
		if !ok {
			return r, false
		}
		r = Range{p.Addr(), last(p)}
	}
	if why := whySpecial(r); why != "" {
		i.errorf("write addresses that others can send to", "%q has addresses that are %s", s, why)
		return r, false
	}
	return r, true
}

// ownAddress is an address of this machine or of one that it talks to.
type ownAddress struct {
	addr netip.Addr
	key  string
}

// isOwn notes that addr belongs to a machine and can be no VIP.
func (d *decoder) isOwn(addr netip.Addr, i item) {
	d.own = append(d.own, ownAddress{addr, i.path})
}
