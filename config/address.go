package config

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/steelyard-lb/steelyard/lb"
)

func overlap(a, b lb.AddrRange) bool {
	return a.From.Is4() == b.From.Is4() && a.From.Compare(b.To) <= 0 && b.From.Compare(a.To) <= 0
}

// formatRange formats r as a prefix or a single address if it is one, otherwise as "203.0.113.40-203.0.113.50".
func formatRange(r lb.AddrRange) string {
	if r.From == r.To {
		return r.From.String()
	}
	if all := r.Prefixes(); len(all) == 1 {
		return all[0].String()
	}
	return r.From.String() + "-" + r.To.String()
}

const likeAddr = "192.0.2.1"

// addr reads an address. A zone or an IPv4-mapped address is an error.
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

// specialRange is a range of addresses that other hosts cannot send to, which makes them useless as VIPs and backends.
type specialRange struct {
	lb.AddrRange
	what string
}

var special = []specialRange{
	specialPrefix("0.0.0.0/8", `"this network" (RFC 1122 §3.2.1.3)`),
	specialPrefix("127.0.0.0/8", "loopback"),
	specialPrefix("169.254.0.0/16", "link-local"),
	specialPrefix("224.0.0.0/4", "multicast"),
	specialPrefix("240.0.0.0/4", "reserved or broadcast"),
	specialPrefix("::/128", "the unspecified address"),
	specialPrefix("::1/128", "loopback"),
	specialPrefix("::ffff:0:0/96", "IPv4 in IPv6 form"),
	specialPrefix("fe80::/10", "link-local"),
	specialPrefix("ff00::/8", "multicast"),
}

func specialPrefix(text, what string) specialRange {
	p := netip.MustParsePrefix(text)
	return specialRange{lb.AddrRange{From: p.Addr(), To: lb.LastOf(p)}, what}
}

// specialIn names the special addresses in r, or returns "" if there are none.
func specialIn(r lb.AddrRange) string {
	for _, s := range special {
		if overlap(r, s.AddrRange) {
			return s.what
		}
	}
	return ""
}

// unicast reads an address that is not special.
func (i item) unicast() (netip.Addr, bool) {
	a, ok := i.addr()
	if ok {
		ok = i.isUnicast(a)
	}
	return a, ok
}

func (i item) isUnicast(a netip.Addr) bool {
	what := specialIn(lb.AddrRange{From: a, To: a})
	if what != "" {
		i.errorf("write an address that other hosts can send to", "%s is %s", a, what)
	}
	return what == ""
}

// host reads the address of a machine, which may be loopback or link-local.
func (i item) host() (netip.Addr, bool) {
	a, ok := i.addr()
	if ok && (a.IsUnspecified() || a.IsMulticast()) {
		i.errorf("write the address of a single host", "%s is not the address of a single host", a)
		return a, false
	}
	return a, ok
}

// prefix reads a CIDR prefix. A single address becomes a full-length prefix.
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
		i.errorf(fmt.Sprintf("write %q, or %q for the single address", p.Masked(), p.Addr()),
			"%q has bits after its prefix length", s)
		return netip.Prefix{}, false
	}
	return p, true
}

// addrRange reads "a.b.c.d/n", "a-b" or a single address. Special addresses are an error.
func (i item) addrRange() (lb.AddrRange, bool) {
	s, ok := i.str("203.0.113.0/28")
	if !ok {
		return lb.AddrRange{}, false
	}
	from, to, isRange := strings.Cut(s, "-")
	var r lb.AddrRange
	if isRange {
		if r.From, ok = i.parseAddr(strings.TrimSpace(from)); !ok {
			return r, false
		}
		if r.To, ok = i.parseAddr(strings.TrimSpace(to)); !ok {
			return r, false
		}
		if r.From.Is4() != r.To.Is4() {
			i.errorf("write two addresses of the same family", "%q mixes IPv4 and IPv6", s)
			return r, false
		}
		if r.To.Less(r.From) {
			reversed := lb.AddrRange{From: r.To, To: r.From}
			i.errorf(fmt.Sprintf("write %q", formatRange(reversed)), "%q ends before it begins", s)
			return r, false
		}
	} else {
		p, ok := i.prefix()
		if !ok {
			return r, false
		}
		r = lb.AddrRange{From: p.Addr(), To: lb.LastOf(p)}
	}
	if what := specialIn(r); what != "" {
		i.errorf("write addresses that other hosts can send to", "%q has addresses that are %s", s, what)
		return r, false
	}
	return r, true
}

// ownAddress is an address of this node or of one of its peers.
type ownAddress struct {
	addr netip.Addr
	key  string
}

// isOwn records that addr belongs to a machine, so it cannot be a VIP.
func (d *decoder) isOwn(addr netip.Addr, i item) {
	d.own = append(d.own, ownAddress{addr, i.where()})
}
