package guard

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// Path attributes (RFC 4271, section 5; RFC 4760).
const (
	attrMPReach   = 14
	attrMPUnreach = 15
	flagExtended  = 0x10
)

// Update has the unicast routes of an UPDATE. The slices are valid until the next message is read.
type Update struct {
	Withdrawn, Announced []netip.Prefix
	// EndOfRIB4 and EndOfRIB6 say that the UPDATE is an End-of-RIB marker for that family (RFC 4724, section 2).
	EndOfRIB4, EndOfRIB6 bool
	// Attributes are the path attributes except MP_REACH_NLRI and MP_UNREACH_NLRI. NextHop is the routes' next hop.
	Attributes []byte
	NextHop    netip.Addr
	families   [3]bool // by AFI: has routes, or is an End-of-RIB
	other      bool    // has routes of other families, not in the fields above
}

var errUpdate = errors.New("malformed UPDATE")

// parseUpdate parses the body of an UPDATE into u, reusing its slices. Of the attributes it decodes only those with
// routes or next hops.
func parseUpdate(body []byte, u *Update) error {
	*u = Update{Withdrawn: u.Withdrawn[:0], Announced: u.Announced[:0], Attributes: u.Attributes[:0]}
	withdrawn, rest, ok := cut16(body)
	if !ok {
		return errUpdate
	}
	attrs, nlri, ok := cut16(rest)
	if !ok {
		return errUpdate
	}
	if u.Withdrawn, ok = appendPrefixes(u.Withdrawn, withdrawn, afiIPv4); !ok {
		return errUpdate
	}
	if u.Announced, ok = appendPrefixes(u.Announced, nlri, afiIPv4); !ok {
		return errUpdate
	}
	u.families[afiIPv4] = len(withdrawn)+len(nlri) > 0
	if len(body) == 4 { // IPv4 End-of-RIB
		u.EndOfRIB4, u.families[afiIPv4] = true, true
	}
	only := len(withdrawn)+len(nlri) == 0 // whether a single attribute may be the only content
	for len(attrs) > 0 {
		flags, kind, value, whole, ok := nextAttribute(attrs)
		if !ok {
			return errUpdate
		}
		_ = flags
		alone := only && len(whole) == len(attrs)
		attrs, only = attrs[len(whole):], false
		switch kind {
		case attrMPReach:
			ok = u.reach(value)
		case attrMPUnreach:
			ok = u.unreach(value, alone && len(attrs) == 0)
		case 3: // NEXT_HOP
			u.NextHop, _ = netip.AddrFromSlice(value)
			fallthrough
		default:
			u.Attributes = append(u.Attributes, whole...)
		}
		if !ok {
			return errUpdate
		}
	}
	return nil
}

func cut16(b []byte) (field, rest []byte, ok bool) {
	if len(b) < 2 {
		return nil, nil, false
	}
	n := int(binary.BigEndian.Uint16(b))
	if len(b) < 2+n {
		return nil, nil, false
	}
	return b[2 : 2+n], b[2+n:], true
}

// nextAttribute splits off the first path attribute (RFC 4271, section 4.3).
func nextAttribute(b []byte) (flags, kind byte, value, whole []byte, ok bool) {
	if len(b) < 3 {
		return 0, 0, nil, nil, false
	}
	head, n := 3, int(b[2])
	if b[0]&flagExtended != 0 {
		if len(b) < 4 {
			return 0, 0, nil, nil, false
		}
		head, n = 4, int(binary.BigEndian.Uint16(b[2:]))
	}
	if len(b) < head+n {
		return 0, 0, nil, nil, false
	}
	return b[0], b[1], b[head : head+n], b[:head+n], true
}

// reach reads MP_REACH_NLRI (RFC 4760, section 3).
func (u *Update) reach(b []byte) (ok bool) {
	if len(b) < 5 || len(b) < 5+int(b[3]) {
		return false
	}
	afi, hop, nlri := binary.BigEndian.Uint16(b), b[4:4+int(b[3])], b[5+int(b[3]):]
	if b[2] != safiUnicast || afi != afiIPv4 && afi != afiIPv6 {
		u.other = true
		return true
	}
	if len(hop) > 16 {
		hop = hop[:16] // drop the link-local address (RFC 2545)
	}
	u.NextHop, _ = netip.AddrFromSlice(hop)
	u.families[afi] = true
	u.Announced, ok = appendPrefixes(u.Announced, nlri, afi)
	return ok
}

// unreach reads MP_UNREACH_NLRI (RFC 4760, section 4). Without routes, as the only attribute, it is an End-of-RIB.
func (u *Update) unreach(b []byte, alone bool) (ok bool) {
	if len(b) < 3 {
		return false
	}
	afi := binary.BigEndian.Uint16(b)
	if b[2] != safiUnicast || afi != afiIPv4 && afi != afiIPv6 {
		u.other = true
		return true
	}
	u.families[afi] = true
	if alone && len(b) == 3 {
		u.EndOfRIB4, u.EndOfRIB6 = afi == afiIPv4, afi == afiIPv6
	}
	u.Withdrawn, ok = appendPrefixes(u.Withdrawn, b[3:], afi)
	return ok
}

// appendPrefixes parses prefixes, each a length in bits followed by the necessary bytes (RFC 4271, section 4.3).
func appendPrefixes(list []netip.Prefix, b []byte, afi uint16) ([]netip.Prefix, bool) {
	size := 16
	if afi == afiIPv4 {
		size = 4
	}
	for len(b) > 0 {
		bits := int(b[0])
		n := (bits + 7) / 8
		if len(b) < 1+n || bits > 8*size {
			return list, false
		}
		var a [16]byte
		copy(a[:], b[1:1+n])
		addr, _ := netip.AddrFromSlice(a[:size])
		list = append(list, netip.PrefixFrom(addr, bits).Masked())
		b = b[1+n:]
	}
	return list, true
}
