package config

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// subtypes are the configurable extended communities: route target and route origin (RFC 4360, sections 4 and 5). [bgp]
// weighted sets the link bandwidth community.
var subtypes = map[string]byte{"rt": 2, "soo": 3}

// Types of extended communities (RFC 4360, sections 3.1 and 3.2; RFC 5668).
const (
	twoOctetAS = iota
	ipv4Address
	fourOctetAS
)

// parseExtended reads the value of an extended community: "64512:100" with a 32-bit second number, or with a 16-bit
// second number if the first is an IPv4 address or an AS number over 16 bits.
func parseExtended(s string, subtype byte, value string) (Community, error) {
	c := Community{kind: extended, extended: [8]byte{1: subtype}}
	wrong := fmt.Errorf("%q is not an extended community", s)
	administrator, text, ok := strings.Cut(value, ":")
	if !ok {
		return Community{}, wrong
	}
	bits := 16
	if a, err := netip.ParseAddr(administrator); err == nil && a.Is4() {
		c.extended[0] = ipv4Address
		copy(c.extended[2:], a.AsSlice())
	} else if n, err := strconv.ParseUint(administrator, 10, 32); err != nil {
		return Community{}, wrong
	} else if n > 0xffff {
		c.extended[0] = fourOctetAS
		binary.BigEndian.PutUint32(c.extended[2:], uint32(n))
	} else {
		bits = 32
		binary.BigEndian.PutUint16(c.extended[2:], uint16(n))
	}
	n, err := strconv.ParseUint(text, 10, bits)
	if err != nil {
		return Community{}, fmt.Errorf("%q in community %q is not a number from 0 to %d", text, s, uint64(1)<<bits-1)
	}
	if bits == 32 {
		binary.BigEndian.PutUint32(c.extended[4:], uint32(n))
	} else {
		binary.BigEndian.PutUint16(c.extended[6:], uint16(n))
	}
	return c, nil
}

// extendedText is the inverse of parseExtended.
func extendedText(b [8]byte) string {
	name := ""
	for s, subtype := range subtypes {
		if subtype == b[1] {
			name = s
		}
	}
	switch b[0] {
	case ipv4Address:
		return fmt.Sprintf("%s:%v:%d", name, netip.AddrFrom4([4]byte(b[2:6])), binary.BigEndian.Uint16(b[6:]))
	case fourOctetAS:
		return fmt.Sprintf("%s:%d:%d", name, binary.BigEndian.Uint32(b[2:]), binary.BigEndian.Uint16(b[6:]))
	}
	return fmt.Sprintf("%s:%d:%d", name, binary.BigEndian.Uint16(b[2:]), binary.BigEndian.Uint32(b[4:]))
}
