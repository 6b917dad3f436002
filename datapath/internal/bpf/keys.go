package bpf

import (
	"encoding/binary"
	"net/netip"
)

// ToAddr returns the address of C: IPv4 is ::ffff:a.b.c.d (RFC 4291 §2.5.5.2), and the zero Addr is zero.
func ToAddr(a netip.Addr) (out Addr) {
	if !a.IsValid() {
		return out
	}
	b := a.As16()
	for i := range out.W {
		out.W[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return out
}

// FromAddr returns the zero Addr for the zero address, which no backend has.
func FromAddr(a Addr) netip.Addr {
	if a == (Addr{}) {
		return netip.Addr{}
	}
	var b [16]byte
	for i, w := range a.W {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	return netip.AddrFrom16(b).Unmap()
}

// Swap converts a port between host and network byte order.
func Swap(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}

// Swap32 is Swap for 32 bits.
func Swap32(n uint32) uint32 {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], n)
	return binary.NativeEndian.Uint32(b[:])
}

// ToAllowKey is the key of a source prefix that may open flows of a frontend.
func ToAllowKey(frontend uint32, p netip.Prefix) AllowKey {
	n := p.Bits()
	if p.Addr().Is4() {
		n += 96
	}
	return AllowKey{Prefix: uint32(32 + n), Frontend: Swap32(frontend), Source: ToAddr(p.Addr())}
}

// Proto returns the protocol, which the key has beside the id of the server.
func (k ServerKey) Proto() uint8 { return uint8(k.Server) }

// SameFlow reports whether the entry of a client belongs to that of a server. A client may have opened another flow
// from the same port, which has the same source port if it is to another server.
func (f ClientFlow) SameFlow(k ServerKey, s ServerFlow) bool {
	return f.Backend == s.Backend && f.Source == k.To && f.Sport == k.Dport && f.Dport == k.Sport
}

// Truth returns the value of C.
func Truth(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}
