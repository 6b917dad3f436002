package lb

import (
	"encoding/binary"
	"hash/fnv"
	"net/netip"
)

// scanned is the maximum number of a pool's addresses that are compared for one service. In a larger pool, up to this
// many addresses are drawn by hash, and the first free one is taken.
const scanned = 1 << 16

// byName returns the free address in a pool with the highest hash of address and service name (rendezvous hashing), or
// zero. The result does not depend on the order of assignments, except when two services prefer the same address.
func (a *Allocator) byName(r *Request, f Family, pool int) netip.Addr {
	p := a.pools[pool]
	free := func(addr netip.Addr) bool { return a.isFree(r, pool, addr) }
	var ranges []AddrRange
	size := uint64(0)
	for _, ar := range p.Ranges {
		if FamilyOf(ar.From) == f {
			ranges, size = append(ranges, ar), size+ar.size()
		}
	}
	h := fnv.New64a()
	h.Write([]byte(r.Service))
	name := h.Sum64()
	if size > scanned {
		for n := range uint64(scanned) {
			at := mix(name+n) % size
			for _, r := range ranges {
				if at < r.size() {
					if addr := r.at(at); free(addr) {
						return addr
					}
					break
				}
				at -= r.size()
			}
		}
		return netip.Addr{}
	}
	var best netip.Addr
	var highest uint64
	for _, r := range ranges {
		for addr := r.From; addr.IsValid(); addr = r.after(addr) {
			b := addr.As16()
			score := mix(name ^ mix(binary.BigEndian.Uint64(b[:8])^mix(binary.BigEndian.Uint64(b[8:]))))
			if (!best.IsValid() || score > highest) && free(addr) {
				best, highest = addr, score
			}
		}
	}
	return best
}

// sizeMax bounds the size of a range, so that the sum over a pool fits in a uint64.
const sizeMax = 1 << 48

// size returns the number of addresses in r, at most sizeMax: addresses beyond it are never drawn.
func (r AddrRange) size() uint64 {
	from, to := r.From.As16(), r.To.As16()
	if binary.BigEndian.Uint64(from[:8]) != binary.BigEndian.Uint64(to[:8]) {
		return sizeMax
	}
	return min(binary.BigEndian.Uint64(to[8:])-binary.BigEndian.Uint64(from[8:]), sizeMax-1) + 1
}

// at returns the nth address of r; n is less than its size.
func (r AddrRange) at(n uint64) netip.Addr {
	b := r.From.As16()
	low := binary.BigEndian.Uint64(b[8:])
	binary.BigEndian.PutUint64(b[8:], low+n)
	if low+n < low {
		binary.BigEndian.PutUint64(b[:8], binary.BigEndian.Uint64(b[:8])+1)
	}
	addr := netip.AddrFrom16(b)
	if r.From.Is4() {
		return addr.Unmap()
	}
	return addr
}
