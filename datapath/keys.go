package datapath

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// This file has all conversions between the addresses and ports of Go and of C. IPv4 is ::ffff:a.b.c.d (RFC 4291
// §2.5.5.2).

func toAddr(a netip.Addr) (out syAddr) {
	if !a.IsValid() {
		return out
	}
	b := a.As16()
	for i := range out.W {
		out.W[i] = binary.NativeEndian.Uint32(b[4*i:])
	}
	return out
}

// fromAddr returns the zero Addr for the zero address, which no backend has.
func fromAddr(a syAddr) netip.Addr {
	if a == (syAddr{}) {
		return netip.Addr{}
	}
	var b [16]byte
	for i, w := range a.W {
		binary.NativeEndian.PutUint32(b[4*i:], w)
	}
	return netip.AddrFrom16(b).Unmap()
}

// swap converts a port between host and network byte order.
func swap(port uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], port)
	return binary.NativeEndian.Uint16(b[:])
}

func swap32(n uint32) uint32 {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], n)
	return binary.NativeEndian.Uint32(b[:])
}

func toFrontendKey(f lb.Frontend) syFrontendKey {
	return syFrontendKey{Vip: toAddr(f.VIP), Port: swap(f.Port), Proto: uint8(f.Protocol), Decap: truth(f.Decap)}
}

func fromFrontendKey(k syFrontendKey) lb.Frontend {
	return lb.Frontend{VIP: fromAddr(k.Vip), Port: swap(k.Port), Protocol: lb.Protocol(k.Proto), Decap: k.Decap == 1}
}

// rangeBits is the number of bits before the port in a key of the ranges map (bpf/types.h).
const rangeBits = 128 + 16

// toRangeKeys returns the prefixes that cover a range of ports exactly.
func toRangeKeys(f lb.Frontend) (keys []syRangeKey) {
	for first, last := int(f.Port), int(f.Last); first <= last; {
		size := 1
		for first%(2*size) == 0 && first+2*size-1 <= last {
			size *= 2
		}
		keys = append(keys, syRangeKey{
			Prefix: uint32(rangeBits + 16 - bits.TrailingZeros(uint(size))), Vip: toAddr(f.VIP),
			Proto: swap(uint16(f.Protocol)), Port: swap(uint16(first)),
		})
		first += size
	}
	return keys
}

// fromRangeKey returns the part of a range that a key covers.
func fromRangeKey(k syRangeKey) lb.Frontend {
	first := swap(k.Port)
	last := first + 1<<(rangeBits+16-k.Prefix) - 1
	return lb.Frontend{VIP: fromAddr(k.Vip), Port: first, Last: last, Protocol: lb.Protocol(swap(k.Proto))}
}

// toAllowKey is the key of a source prefix that may open flows of a frontend.
func toAllowKey(frontend uint32, p netip.Prefix) syAllowKey {
	n := p.Bits()
	if p.Addr().Is4() {
		n += 96
	}
	return syAllowKey{Prefix: uint32(32 + n), Frontend: swap32(frontend), Source: toAddr(p.Addr())}
}

func toBackend(b *backend, server uint32) syBackend {
	value := syBackend{Addr: toAddr(b.at.Addr()), Port: swap(b.at.Port()), Local: truth(b.local), Server: server,
		Keyed: truth(b.keyed), Generation: b.generation}
	for i := range min(len(b.ours), len(value.Snat)) {
		value.Snat[i] = toAddr(b.ours[i])
	}
	return value
}

func fromBackend(b syBackend) (at netip.AddrPort, ours []netip.Addr) {
	for _, a := range b.Snat {
		if a != (syAddr{}) {
			ours = append(ours, fromAddr(a))
		}
	}
	return netip.AddrPortFrom(fromAddr(b.Addr), swap(b.Port)), ours
}

// flowClockShift is FLOW_CLOCK_SHIFT of bpf/flow.h: the unit in which flows have the time of their last packet.
const flowClockShift = 22

func flowClock(uptime time.Duration) uint32 { return uint32(uptime >> flowClockShift) }

// idle returns how long ago a flow was seen.
func idle(now time.Duration, seen uint32) time.Duration {
	return time.Duration(int32(flowClock(now)-seen)) << flowClockShift
}

func (k syServerKey) proto() uint8 { return uint8(k.Server) }

// sameFlow reports whether the entry of a client belongs to that of a server. A client may have opened another flow
// from the same port, which has the same source port if it is to another server.
func (f syClientFlow) sameFlow(k syServerKey, s syServerFlow) bool {
	return f.Backend == s.Backend && f.Source == k.To && f.Sport == k.Dport && f.Dport == k.Sport
}
