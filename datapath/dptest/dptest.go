// Package dptest builds and reads packets for tests of the datapath, and checks what comes out: lengths, checksums, TTL.
package dptest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
)

// Protocol numbers and TCP flags, as on the wire.
const (
	ICMP, TCP, UDP, ICMPv6 = 1, 6, 17, 58

	FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16
)

// Packet is an Ethernet frame with IPv4 or IPv6 and one transport header.
type Packet struct {
	Src, Dst netip.AddrPort // of one family
	Proto    uint8
	TTL      uint8 // 0: 64
	// TCP
	Flags    uint8
	Seq, Ack uint32
	// ICMP: Type and Code; the ports are not used
	Type, Code uint8
	Payload    []byte
	// Fragment makes it a later fragment of a datagram.
	Fragment bool
	// Options are IPv4 options or an IPv6 destination options header, of 8 bytes that say nothing.
	Options bool
}

func (p Packet) v4() bool { return p.Src.Addr().Is4() }

// Frame returns p as bytes, with every length and checksum right.
func (p Packet) Frame() []byte {
	l4 := p.transport()
	f := make([]byte, 14, 128)
	copy(f, []byte{2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2})
	ttl := p.TTL
	if ttl == 0 {
		ttl = 64
	}
	if p.v4() {
		binary.BigEndian.PutUint16(f[12:], 0x0800)
		ip := make([]byte, 20)
		if p.Options {
			ip = append(ip, 1, 1, 1, 1, 1, 1, 1, 0)
		}
		ip[0] = 0x40 | byte(len(ip)/4)
		binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+len(l4)))
		if p.Fragment {
			binary.BigEndian.PutUint16(ip[6:], 100)
		}
		ip[8], ip[9] = ttl, p.Proto
		copy(ip[12:], p.Src.Addr().AsSlice())
		copy(ip[16:], p.Dst.Addr().AsSlice())
		binary.BigEndian.PutUint16(ip[10:], Checksum(ip))
		return append(append(f, ip...), l4...)
	}
	binary.BigEndian.PutUint16(f[12:], 0x86dd)
	ip := make([]byte, 40)
	next := p.Proto
	var ext []byte
	if p.Options {
		ext, next = append(ext, next, 0, 1, 4, 0, 0, 0, 0), 60
	}
	if p.Fragment {
		ext, next = append(ext, next, 0, 0, 8, 0, 0, 0, 1), 44
	}
	ip[0], ip[6], ip[7] = 0x60, next, ttl
	binary.BigEndian.PutUint16(ip[4:], uint16(len(ext)+len(l4)))
	copy(ip[8:], p.Src.Addr().AsSlice())
	copy(ip[24:], p.Dst.Addr().AsSlice())
	return append(append(append(f, ip...), ext...), l4...)
}

func (p Packet) transport() []byte {
	var h []byte
	at := 0 // of the checksum
	switch p.Proto {
	case TCP:
		h, at = make([]byte, 20), 16
		binary.BigEndian.PutUint32(h[4:], p.Seq)
		binary.BigEndian.PutUint32(h[8:], p.Ack)
		h[12], h[13] = 5<<4, p.Flags
	case UDP:
		h, at = make([]byte, 8), 6
		binary.BigEndian.PutUint16(h[4:], uint16(8+len(p.Payload)))
	case ICMP, ICMPv6:
		h, at = make([]byte, 8), 2
		h[0], h[1] = p.Type, p.Code
	default:
		return append(make([]byte, 8), p.Payload...)
	}
	if p.Proto == TCP || p.Proto == UDP {
		binary.BigEndian.PutUint16(h[0:], p.Src.Port())
		binary.BigEndian.PutUint16(h[2:], p.Dst.Port())
	}
	h = append(h, p.Payload...)
	sum := Checksum(append(p.pseudo(len(h)), h...))
	binary.BigEndian.PutUint16(h[at:], sum)
	return h
}

// pseudo is the pseudo header; ICMP for IPv4 has none.
func (p Packet) pseudo(n int) []byte {
	if p.Proto == ICMP {
		return nil
	}
	b := append(p.Src.Addr().AsSlice(), p.Dst.Addr().AsSlice()...)
	return append(b, 0, p.Proto, byte(n>>8), byte(n))
}

// Checksum is the Internet checksum (RFC 1071).
func Checksum(b []byte) uint16 {
	var sum uint32
	for i, x := range b {
		if i%2 == 0 {
			sum += uint32(x) << 8
		} else {
			sum += uint32(x)
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// Parse reads a frame and fails when a length or checksum in it is wrong.
func Parse(f []byte) (Packet, error) {
	var p Packet
	if len(f) < 34 {
		return p, fmt.Errorf("frame of %d bytes", len(f))
	}
	ip := f[14:]
	var l4 []byte
	var src, dst netip.Addr
	switch kind := binary.BigEndian.Uint16(f[12:]); kind {
	case 0x0800:
		n, total := int(ip[0]&15)*4, int(binary.BigEndian.Uint16(ip[2:]))
		if total != len(ip) || n > total {
			return p, fmt.Errorf("IPv4 length is %d, there are %d bytes", total, len(ip))
		}
		if Checksum(ip[:n]) != 0 {
			return p, fmt.Errorf("IPv4 checksum is wrong")
		}
		p.Proto, p.TTL, l4 = ip[9], ip[8], ip[n:]
		src, _ = netip.AddrFromSlice(ip[12:16])
		dst, _ = netip.AddrFromSlice(ip[16:20])
	case 0x86dd:
		if n := int(binary.BigEndian.Uint16(ip[4:])); n != len(ip)-40 {
			return p, fmt.Errorf("IPv6 length is %d, there are %d bytes", n, len(ip)-40)
		}
		p.Proto, p.TTL, l4 = ip[6], ip[7], ip[40:]
		if p.Proto == 60 {
			p.Proto, l4 = l4[0], l4[8:]
		}
		src, _ = netip.AddrFromSlice(ip[8:24])
		dst, _ = netip.AddrFromSlice(ip[24:40])
	default:
		return p, fmt.Errorf("ethertype %#x", kind)
	}
	p.Src, p.Dst = netip.AddrPortFrom(src, 0), netip.AddrPortFrom(dst, 0)
	return p, p.parseTransport(l4)
}

func (p *Packet) parseTransport(l4 []byte) error {
	if len(l4) < 8 || p.Proto == TCP && len(l4) < 20 {
		return fmt.Errorf("transport header of %d bytes", len(l4))
	}
	switch p.Proto {
	case TCP:
		p.Seq, p.Ack, p.Flags = binary.BigEndian.Uint32(l4[4:]), binary.BigEndian.Uint32(l4[8:]), l4[13]
		p.Payload = bytes.Clone(l4[20:])
	case UDP:
		if n := int(binary.BigEndian.Uint16(l4[4:])); n != len(l4) {
			return fmt.Errorf("UDP length is %d, there are %d bytes", n, len(l4))
		}
		p.Payload = bytes.Clone(l4[8:])
	case ICMP, ICMPv6:
		p.Type, p.Code, p.Payload = l4[0], l4[1], bytes.Clone(l4[8:])
	}
	if p.Proto == TCP || p.Proto == UDP {
		p.Src = netip.AddrPortFrom(p.Src.Addr(), binary.BigEndian.Uint16(l4[0:]))
		p.Dst = netip.AddrPortFrom(p.Dst.Addr(), binary.BigEndian.Uint16(l4[2:]))
	}
	if Checksum(append(p.pseudo(len(l4)), l4...)) != 0 {
		return fmt.Errorf("checksum of protocol %d is wrong", p.Proto)
	}
	return nil
}
