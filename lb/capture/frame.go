// Package capture shows traced packets: as text, and as a file for Wireshark and tcpdump.
package capture

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"

	"github.com/steelyard-lb/steelyard/lb"
)

// Protocols (IANA), besides those of lb.
const (
	ipv4, ipv6, icmp, icmpv6 = 4, 41, 1, 58
	hopByHop, routing        = 0, 43
	fragment, destination    = 44, 60
)

// Describe returns the addresses, ports and flags of an Ethernet frame, and in parentheses those of the packet in a
// tunnel.
func Describe(f lb.Frame) string {
	b := f.Bytes
	for len(b) >= 18 && (b[12] == 0x81 && b[13] == 0 || b[12] == 0x88 && b[13] == 0xa8) { // VLAN tags (IEEE 802.1Q)
		b = b[4:]
	}
	if len(b) < 14 {
		return "a short frame"
	}
	switch kind := binary.BigEndian.Uint16(b[12:]); kind {
	case 0x0800:
		return describeIP(b[14:], ipv4)
	case 0x86dd:
		return describeIP(b[14:], ipv6)
	default:
		return fmt.Sprintf("ethertype %#04x", kind)
	}
}

// describeIP describes an IP packet of a version, which is given as a protocol number.
func describeIP(b []byte, version byte) string {
	var src, dst netip.Addr
	var proto byte
	later := false // not the first fragment
	switch {
	case version == ipv4 && len(b) >= 20 && int(b[0]&15)*4 <= len(b):
		src, dst = netip.AddrFrom4([4]byte(b[12:])), netip.AddrFrom4([4]byte(b[16:]))
		proto, later = b[9], binary.BigEndian.Uint16(b[6:])&0x1fff != 0
		b = b[int(b[0]&15)*4:]
	case version == ipv6 && len(b) >= 40:
		src, dst = netip.AddrFrom16([16]byte(b[8:])), netip.AddrFrom16([16]byte(b[24:]))
		proto, later, b = skipExtensions(b[6], b[40:])
	default:
		return "a short packet"
	}
	if later {
		return fmt.Sprintf("%s > %s fragment", src, dst)
	}
	switch {
	case proto == ipv4 || proto == ipv6:
		return fmt.Sprintf("%s > %s ipip (%s)", src, dst, describeIP(b, proto))
	case (proto == icmp || proto == icmpv6) && len(b) >= 2:
		return fmt.Sprintf("%s > %s icmp type %d code %d", src, dst, b[0], b[1])
	case len(b) < 8 || proto == icmp || proto == icmpv6:
		return fmt.Sprintf("%s > %s protocol %d", src, dst, proto)
	}
	from := netip.AddrPortFrom(src, binary.BigEndian.Uint16(b))
	to := netip.AddrPortFrom(dst, binary.BigEndian.Uint16(b[2:]))
	switch lb.Protocol(proto) {
	case lb.TCP:
		return fmt.Sprintf("%s > %s tcp%s", from, to, tcpFlags(b))
	case lb.UDP:
		return fmt.Sprintf("%s > %s udp%s", from, to, inGUE(b[8:]))
	case lb.SCTP:
		return fmt.Sprintf("%s > %s sctp", from, to)
	}
	return fmt.Sprintf("%s > %s protocol %d", src, dst, proto)
}

// skipExtensions returns what follows IPv6 extension headers (RFC 8200, 4).
func skipExtensions(next byte, b []byte) (proto byte, later bool, rest []byte) {
	for len(b) >= 8 {
		size := 8
		switch next {
		case hopByHop, routing, destination:
			size += 8 * int(b[1])
		case fragment:
			later = later || binary.BigEndian.Uint16(b[2:])&^7 != 0
		default:
			return next, later, b
		}
		next, b = b[0], b[min(size, len(b)):]
	}
	return next, later, b
}

func tcpFlags(b []byte) (text string) {
	if len(b) < 14 {
		return ""
	}
	for i, name := range []string{"FIN", "SYN", "RST", "PSH", "ACK", "URG"} {
		if b[13]>>i&1 == 1 {
			text += " " + name
		}
	}
	return text
}

// inGUE describes the packet in a datagram if it looks like GUE (draft-ietf-intarea-gue, version 0).
func inGUE(b []byte) string {
	if len(b) < 4 || b[0]>>5 != 0 || b[1] != ipv4 && b[1] != ipv6 {
		return ""
	}
	inner := b[min(len(b), 4+4*int(b[0]&31)):]
	if len(inner) == 0 || inner[0]>>4 != map[byte]byte{ipv4: 4, ipv6: 6}[b[1]] {
		return ""
	}
	return " gue (" + describeIP(inner, b[1]) + ")"
}

// Line describes a packet in one line: when and where it was seen, what was done with it, and why.
func Line(p lb.TracedPacket) string {
	text := fmt.Sprintf("%s %s %s: %s: %s", p.Time.Local().Format("15:04:05.000000"), p.Interface, p.Hook, p.Action,
		Describe(p.Before))
	if len(p.After.Bytes) > 0 {
		text += " => " + Describe(p.After)
		if p.Egress != "" {
			text += " on " + p.Egress
		} else {
			text += " to the stack"
		}
	}
	return text + "; " + about(p)
}

// about returns the service, the backend, and the reason or, of a forwarded packet, the direction.
func about(p lb.TracedPacket) string {
	var parts []string
	if p.Service != "" {
		parts = append(parts, "service "+p.Service)
	}
	if p.Backend.IsValid() {
		parts = append(parts, "backend "+p.Backend.String())
	}
	if p.Forward != "" {
		parts = append(parts, string(p.Forward))
	}
	switch {
	case p.Reason != "forwarded":
		parts = append(parts, p.Reason+": "+p.Meaning)
	case !p.Backend.IsValid(): // only the datapath knows the direction
		parts = append(parts, p.Reason)
	case p.Reply:
		parts = append(parts, "reply")
	default:
		parts = append(parts, "request")
	}
	return strings.Join(parts, ", ")
}
