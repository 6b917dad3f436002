package inside

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/steelyard-lb/steelyard/datapath/inside/internal/prog"
)

// maxRanges is IN_RANGES.
const maxRanges = len(prog.Ranges{}.Net4)

// cover returns at most most prefixes that contain all the addresses, which are of one family and sorted. It merges
// those that are closest to each other, so the prefixes contain as few other addresses as possible.
func cover(addrs []netip.Addr, most int) (out []netip.Prefix) {
	for _, a := range slices.Compact(slices.Clone(addrs)) {
		out = append(out, netip.PrefixFrom(a, a.BitLen()))
	}
	for len(out) > most {
		bits := 0
		for i := range len(out) - 1 {
			bits = max(bits, join(out[i], out[i+1]).Bits())
		}
		merged := out[:0:0]
		for _, p := range out {
			if n := len(merged) - 1; n >= 0 && join(merged[n], p).Bits() >= bits {
				merged[n] = join(merged[n], p)
				continue
			}
			merged = append(merged, p)
		}
		out = merged
	}
	return out
}

// join returns the smallest prefix that contains both.
func join(a, b netip.Prefix) netip.Prefix {
	for bits := min(a.Bits(), b.Bits()); ; bits-- {
		p, _ := a.Addr().Prefix(bits)
		if p.Contains(b.Addr()) {
			return p
		}
	}
}

// encode returns the form of the map.
func encode(v4, v6 []netip.Prefix) (r prog.Ranges) {
	r.N4, r.N6 = uint32(len(v4)), uint32(len(v6))
	for i, p := range v4 {
		a := p.Masked().Addr().As4()
		r.Net4[i] = binary.NativeEndian.Uint32(a[:])
		r.Mask4[i] = binary.NativeEndian.Uint32(mask(p.Bits(), 4))
	}
	for i, p := range v6 {
		a, m := p.Masked().Addr().As16(), mask(p.Bits(), 16)
		for w := range 4 {
			r.Net6[i].W[w] = binary.NativeEndian.Uint32(a[4*w:])
			r.Mask6[i].W[w] = binary.NativeEndian.Uint32(m[4*w:])
		}
	}
	return r
}

func mask(bits, size int) []byte {
	m := make([]byte, size)
	for i := range bits {
		m[i/8] |= 0x80 >> (i % 8)
	}
	return m
}
