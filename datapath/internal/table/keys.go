package table

import (
	"math/bits"
	"net/netip"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

func ToFrontendKey(f lb.Frontend) bpf.FrontendKey {
	return bpf.FrontendKey{
		Vip: bpf.ToAddr(f.VIP), Port: bpf.Swap(f.Port), Proto: uint8(f.Protocol), Decap: bpf.Truth(f.Decap),
	}
}

func fromFrontendKey(k bpf.FrontendKey) lb.Frontend {
	return lb.Frontend{
		VIP: bpf.FromAddr(k.Vip), Port: bpf.Swap(k.Port), Protocol: lb.Protocol(k.Proto), Decap: k.Decap == 1,
	}
}

// rangeBits is the number of key bits before the port in the map of port ranges (bpf/types.h).
const rangeBits = 128 + 16

// toRangeKeys returns the prefixes that exactly cover a port range.
func toRangeKeys(f lb.Frontend) (keys []bpf.RangeKey) {
	for first, last := int(f.Port), int(f.Last); first <= last; {
		size := 1
		for first%(2*size) == 0 && first+2*size-1 <= last {
			size *= 2
		}
		keys = append(keys, bpf.RangeKey{
			Prefix: uint32(rangeBits + 16 - bits.TrailingZeros(uint(size))), Vip: bpf.ToAddr(f.VIP),
			Proto: bpf.Swap(uint16(f.Protocol) | uint16(bpf.Truth(f.Decap))<<8), Port: bpf.Swap(uint16(first)),
		})
		first += size
	}
	return keys
}

// fromRangeKey returns the part of a port range that a key covers.
func fromRangeKey(k bpf.RangeKey) lb.Frontend {
	first := bpf.Swap(k.Port)
	last := first + 1<<(rangeBits+16-k.Prefix) - 1
	proto := bpf.Swap(k.Proto)
	return lb.Frontend{
		VIP: bpf.FromAddr(k.Vip), Port: first, Last: last, Protocol: lb.Protocol(uint8(proto)), Decap: proto>>8 == 1,
	}
}

func toBackend(b *backend, server uint32) bpf.Backend {
	value := bpf.Backend{
		Addr: bpf.ToAddr(b.at.Addr()), Port: bpf.Swap(b.at.Port()), Local: bpf.Truth(b.local), Server: server,
		Keyed: bpf.Truth(b.keyed), Generation: b.generation,
	}
	for i := range min(len(b.ours), len(value.Snat)) {
		value.Snat[i] = bpf.ToAddr(b.ours[i])
	}
	return value
}

func fromBackend(b bpf.Backend) (at netip.AddrPort, ours []netip.Addr) {
	for _, a := range b.Snat {
		if a != (bpf.Addr{}) {
			ours = append(ours, bpf.FromAddr(a))
		}
	}
	return netip.AddrPortFrom(bpf.FromAddr(b.Addr), bpf.Swap(b.Port)), ours
}
