// Package dptest builds and parses packets for tests of the datapath, and checks the lengths and checksums of sent
// packets.
package dptest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net"
	"net/netip"

	"github.com/steelyard-lb/steelyard/datapath/checksum"
)

// Protocol numbers and TCP flags, as on the wire.
const (
	ICMP, IPIP, TCP, UDP, IPv6, ICMPv6, SCTP = 1, 4, 6, 17, 41, 58, 132

	// GUEPort is the UDP port on which Parse expects a tunnel.
	GUEPort = 6090

	FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16
)

// MAC is the default destination address of frames.
var MAC = net.HardwareAddr{2, 0, 0, 0, 0, 1}

// Packet is an Ethernet frame with IPv4 or IPv6 and one transport header.
type Packet struct {
	To       net.HardwareAddr // if nil, MAC
	Src, Dst netip.AddrPort   // of the same family
	Proto    uint8
	TTL      uint8  // if 0, 64
	TOS      uint8  // or the IPv6 traffic class
	ID       uint16 // IPv4 only
	Label    uint32 // IPv6 flow label, 20 bits
	// TCP only.
	Flags     uint8
	Seq, Ack  uint32
	Window    uint16
	MSS       uint16 // an option, unless 0
	Timestamp uint32 // an option after the MSS, unless 0
	// ICMP does not use the ports. With SCTP, Type is the chunk type, Ack the verification tag, and Seq the initiate
	// tag.
	Type, Code uint8
	Rest       uint32 // the second word of an ICMP header
	Payload    []byte
	NoSum      bool // send UDP without a checksum
	DF         bool // IPv4 only
	// Tags are VLAN ids, the outer one first.
	Tags []uint16
	// Inner is the packet that a tunnel packet carries.
	Inner *Packet
	// Private is the private data of the GUE header that carries Inner.
	Private []byte
	// Fragment makes the packet a non-first fragment of a datagram.
	Fragment bool
	// Options adds 8 bytes of padding as IPv4 options or an IPv6 destination options header.
	Options bool
}

func (p Packet) v4() bool { return p.Src.Addr().Is4() }

// Frame returns p encoded with correct lengths and checksums.
func (p Packet) Frame() []byte {
	l4 := p.transport()
	f := make([]byte, 14, 128)
	to := p.To
	if to == nil {
		to = MAC
	}
	copy(f, to)
	copy(f[6:], []byte{2, 0, 0, 0, 0, 2})
	for _, id := range p.Tags {
		binary.BigEndian.PutUint16(f[len(f)-2:], 0x8100)
		f = binary.BigEndian.AppendUint16(f, id)
		f = append(f, 0, 0)
	}
	ttl := p.TTL
	if ttl == 0 {
		ttl = 64
	}
	if p.v4() {
		binary.BigEndian.PutUint16(f[len(f)-2:], 0x0800)
		ip := make([]byte, 20)
		if p.Options {
			ip = append(ip, 1, 1, 1, 1, 1, 1, 1, 0)
		}
		ip[0] = 0x40 | byte(len(ip)/4)
		binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)+len(l4)))
		switch {
		case p.Fragment:
			binary.BigEndian.PutUint16(ip[6:], 100)
		case p.DF:
			binary.BigEndian.PutUint16(ip[6:], 0x4000)
		}
		ip[1], ip[8], ip[9] = p.TOS, ttl, p.Proto
		binary.BigEndian.PutUint16(ip[4:], p.ID)
		copy(ip[12:], p.Src.Addr().AsSlice())
		copy(ip[16:], p.Dst.Addr().AsSlice())
		binary.BigEndian.PutUint16(ip[10:], checksum.Internet(ip))
		return append(append(f, ip...), l4...)
	}
	binary.BigEndian.PutUint16(f[len(f)-2:], 0x86dd)
	ip := make([]byte, 40)
	next := p.Proto
	var ext []byte
	if p.Options {
		ext, next = append(ext, next, 0, 1, 4, 0, 0, 0, 0), 60
	}
	if p.Fragment {
		ext, next = append(ext, next, 0, 0, 8, 0, 0, 0, 1), 44
	}
	binary.BigEndian.PutUint32(ip, 6<<28|uint32(p.TOS)<<20|p.Label)
	ip[6], ip[7] = next, ttl
	binary.BigEndian.PutUint16(ip[4:], uint16(len(ext)+len(l4)))
	copy(ip[8:], p.Src.Addr().AsSlice())
	copy(ip[24:], p.Dst.Addr().AsSlice())
	return append(append(append(f, ip...), ext...), l4...)
}

func (p Packet) transport() []byte {
	var h []byte
	at := 0 // offset of the checksum
	switch p.Proto {
	case TCP:
		h, at = make([]byte, 20), 16
		binary.BigEndian.PutUint32(h[4:], p.Seq)
		binary.BigEndian.PutUint32(h[8:], p.Ack)
		h[12], h[13] = 5<<4, p.Flags
		binary.BigEndian.PutUint16(h[14:], p.Window)
		if p.MSS != 0 {
			h[12] = 6 << 4
			h = binary.BigEndian.AppendUint16(append(h, 2, 4), p.MSS)
		}
		if p.Timestamp != 0 {
			h[12] += 3 << 4
			h = binary.BigEndian.AppendUint32(append(h, 1, 1, 8, 10), p.Timestamp)
			h = append(h, 0, 0, 0, 0)
		}
	case UDP:
		h, at = make([]byte, 8), 6
		binary.BigEndian.PutUint16(h[4:], uint16(8+len(p.Payload)))
	case ICMP, ICMPv6:
		h, at = make([]byte, 8), 2
		h[0], h[1] = p.Type, p.Code
		binary.BigEndian.PutUint32(h[4:], p.Rest)
	case SCTP:
		return p.sctp()
	case IPIP, IPv6:
		if p.Inner == nil {
			break
		}
		return p.Inner.Frame()[14:]
	}
	if h == nil {
		return append(make([]byte, 8), p.Payload...)
	}
	if p.Proto == TCP || p.Proto == UDP {
		binary.BigEndian.PutUint16(h[0:], p.Src.Port())
		binary.BigEndian.PutUint16(h[2:], p.Dst.Port())
	}
	h = append(h, p.Payload...)
	if !p.NoSum {
		sum := checksum.Internet(p.pseudo(len(h)), h)
		if p.Proto == UDP && sum == 0 {
			sum = 0xffff
		}
		binary.BigEndian.PutUint16(h[at:], sum)
	}
	return h
}

// sctp returns one chunk with the common header (RFC 9260, 3).
func (p Packet) sctp() []byte {
	h := make([]byte, 20, 20+len(p.Payload))
	binary.BigEndian.PutUint16(h[0:], p.Src.Port())
	binary.BigEndian.PutUint16(h[2:], p.Dst.Port())
	binary.BigEndian.PutUint32(h[4:], p.Ack)
	h[12] = p.Type
	binary.BigEndian.PutUint16(h[14:], uint16(8+len(p.Payload)))
	binary.BigEndian.PutUint32(h[16:], p.Seq)
	h = append(h, p.Payload...)
	binary.LittleEndian.PutUint32(h[8:], crc32.Checksum(h, crc32.MakeTable(crc32.Castagnoli)))
	return h
}

// GUE returns the payload of a UDP packet that carries p with private data (draft-ietf-intarea-gue, version 0). The
// length of private must be a multiple of four bytes.
func GUE(p Packet, private ...byte) []byte {
	proto := byte(IPv6)
	if p.v4() {
		proto = IPIP
	}
	return append(append([]byte{byte(len(private) / 4), proto, 0, 0}, private...), p.Frame()[14:]...)
}

// pseudo returns the pseudo-header, or nil for ICMP over IPv4, which has none.
func (p Packet) pseudo(n int) []byte {
	if p.Proto == ICMP {
		return nil
	}
	b := append(p.Src.Addr().AsSlice(), p.Dst.Addr().AsSlice()...)
	return append(b, 0, p.Proto, byte(n>>8), byte(n))
}

// ParseWhole is Parse, but also fails if encoding the result does not reproduce every byte after the MAC addresses.
func ParseWhole(f []byte) (Packet, error) {
	p, err := Parse(f)
	if err != nil {
		return p, err
	}
	whole := p.Frame()
	if !bytes.Equal(whole[12:], f[12:]) {
		return p, fmt.Errorf("parsed %x as %+v, which encodes to %x", f, p, whole)
	}
	if p.Inner != nil && p.Proto == UDP && !bytes.Equal(GUE(*p.Inner, p.Private...), p.Payload) {
		return p, fmt.Errorf("parsed the tunnel payload %x as %+v, which does not encode to it", p.Payload, *p.Inner)
	}
	return p, nil
}

// Parse parses a frame, and fails if a length or checksum in it is wrong.
func Parse(f []byte) (Packet, error) {
	var p Packet
	if len(f) < 34 {
		return p, fmt.Errorf("frame of only %d bytes", len(f))
	}
	at := 12
	for binary.BigEndian.Uint16(f[at:]) == 0x8100 {
		p.Tags = append(p.Tags, binary.BigEndian.Uint16(f[at+2:]))
		at += 4
	}
	return p, p.parseIP(f[at+2:], binary.BigEndian.Uint16(f[at:]))
}

func (p *Packet) parseIP(ip []byte, kind uint16) error {
	var l4 []byte
	var src, dst netip.Addr
	switch kind {
	case 0x0800:
		n, total := int(ip[0]&15)*4, int(binary.BigEndian.Uint16(ip[2:]))
		if total != len(ip) || n > total {
			return fmt.Errorf("IPv4 length is %d, but there are %d bytes", total, len(ip))
		}
		if checksum.Internet(ip[:n]) != 0 {
			return fmt.Errorf("IPv4 checksum is wrong")
		}
		p.Proto, p.TTL, p.TOS, l4 = ip[9], ip[8], ip[1], ip[n:]
		p.ID, p.DF, p.Options = binary.BigEndian.Uint16(ip[4:]), ip[6]&0x40 != 0, n > 20
		src, _ = netip.AddrFromSlice(ip[12:16])
		dst, _ = netip.AddrFromSlice(ip[16:20])
	case 0x86dd:
		if n := int(binary.BigEndian.Uint16(ip[4:])); n != len(ip)-40 {
			return fmt.Errorf("IPv6 length is %d, but there are %d bytes", n, len(ip)-40)
		}
		p.Proto, p.TTL, p.TOS, l4 = ip[6], ip[7], ip[0]<<4|ip[1]>>4, ip[40:]
		p.Label = binary.BigEndian.Uint32(ip) & 0xfffff
		if p.Proto == 60 {
			p.Proto, p.Options, l4 = l4[0], true, l4[8:]
		}
		src, _ = netip.AddrFromSlice(ip[8:24])
		dst, _ = netip.AddrFromSlice(ip[24:40])
	default:
		return fmt.Errorf("unexpected EtherType %#x", kind)
	}
	p.Src, p.Dst = netip.AddrPortFrom(src, 0), netip.AddrPortFrom(dst, 0)
	if p.Proto == IPIP || p.Proto == IPv6 {
		return p.parseInner(l4, p.Proto)
	}
	return p.parseTransport(l4)
}

func (p *Packet) parseInner(ip []byte, proto byte) error {
	kind := uint16(0x0800)
	if proto == IPv6 {
		kind = 0x86dd
	}
	p.Inner = &Packet{}
	if err := p.Inner.parseIP(ip, kind); err != nil {
		return fmt.Errorf("in the tunnel: %w", err)
	}
	return nil
}

func (p *Packet) parseTransport(l4 []byte) error {
	if len(l4) < 8 || p.Proto == TCP && len(l4) < 20 || p.Proto == SCTP && len(l4) < 20 {
		return fmt.Errorf("transport header of only %d bytes", len(l4))
	}
	switch p.Proto {
	case TCP:
		p.Seq, p.Ack, p.Flags = binary.BigEndian.Uint32(l4[4:]), binary.BigEndian.Uint32(l4[8:]), l4[13]
		n := int(l4[12]>>4) * 4
		if n > len(l4) {
			return fmt.Errorf("TCP header of %d bytes, but there are %d", n, len(l4))
		}
		p.Window = binary.BigEndian.Uint16(l4[14:])
		options := l4[20:max(20, n)]
		if len(options) >= 4 && options[0] == 2 {
			p.MSS, options = binary.BigEndian.Uint16(options[2:]), options[4:]
		}
		if len(options) >= 8 && options[2] == 8 {
			p.Timestamp = binary.BigEndian.Uint32(options[4:])
		}
		p.Payload = bytes.Clone(l4[n:])
	case UDP:
		if n := int(binary.BigEndian.Uint16(l4[4:])); n != len(l4) {
			return fmt.Errorf("UDP length is %d, but there are %d bytes", n, len(l4))
		}
		p.NoSum = l4[6] == 0 && l4[7] == 0
		p.Payload = bytes.Clone(l4[8:])
	case ICMP, ICMPv6:
		p.Type, p.Code, p.Rest, p.Payload = l4[0], l4[1], binary.BigEndian.Uint32(l4[4:]), bytes.Clone(l4[8:])
	case SCTP:
		p.Ack, p.Type, p.Seq, p.Payload = binary.BigEndian.Uint32(l4[4:]), l4[12], binary.BigEndian.Uint32(l4[16:]),
			bytes.Clone(l4[20:])
	}
	if p.Proto == TCP || p.Proto == UDP || p.Proto == SCTP {
		p.Src = netip.AddrPortFrom(p.Src.Addr(), binary.BigEndian.Uint16(l4[0:]))
		p.Dst = netip.AddrPortFrom(p.Dst.Addr(), binary.BigEndian.Uint16(l4[2:]))
	}
	if p.Proto == SCTP {
		b := bytes.Clone(l4)
		copy(b[8:12], []byte{0, 0, 0, 0})
		if crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) != binary.LittleEndian.Uint32(l4[8:]) {
			return fmt.Errorf("checksum of SCTP is wrong")
		}
		return nil
	}
	if !p.NoSum && checksum.Internet(p.pseudo(len(l4)), l4) != 0 {
		return fmt.Errorf("checksum of protocol %d is wrong", p.Proto)
	}
	if p.Proto == UDP && p.Dst.Port() == GUEPort && len(p.Payload) > 4 {
		n := 4 + 4*int(p.Payload[0])
		if n > len(p.Payload) {
			return fmt.Errorf("GUE header of %d bytes, but there are %d", n, len(p.Payload))
		}
		p.Private = p.Payload[4:n]
		return p.parseInner(p.Payload[n:], p.Payload[1])
	}
	return nil
}
