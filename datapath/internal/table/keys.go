package table

import (
	"errors"
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

// prefixesOf returns the number of prefixes that cover a frontend's port range, or 0 for a single port.
func prefixesOf(f lb.Frontend) int {
	if f.Last == 0 {
		return 0
	}
	return len(toRangeKeys(f))
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

// putFrontend writes a frontend's entries in the maps that the programs look up. If it fails for a new frontend, it
// leaves none.
func (s *Services) putFrontend(f lb.Frontend, value bpf.Frontend, isNew bool) error {
	if err := s.objects.SyFrontendVips.Put(value.Id, bpf.ToAddr(f.VIP)); err != nil {
		return err
	}
	if f.Last == 0 {
		return s.objects.SyFrontends.Put(ToFrontendKey(f), value)
	}
	for _, k := range toRangeKeys(f) {
		if err := s.objects.SyPortRanges.Put(k, value); err != nil {
			if isNew {
				err = errors.Join(err, s.deleteFrontend(f, value.Id))
			}
			return err
		}
	}
	return nil
}

// deleteFrontend removes a frontend's entries. Another range of the same ports may have replaced some.
func (s *Services) deleteFrontend(f lb.Frontend, id uint32) error {
	if f.Last == 0 {
		return IgnoreMissing(s.objects.SyFrontends.Delete(ToFrontendKey(f)))
	}
	for _, k := range toRangeKeys(f) {
		var value bpf.Frontend
		err := s.objects.SyPortRanges.Lookup(k, &value)
		if err == nil && value.Id == id {
			err = s.objects.SyPortRanges.Delete(k)
		}
		if err := IgnoreMissing(err); err != nil {
			return err
		}
	}
	return nil
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
