package table

import (
	"encoding/binary"
	"fmt"
	"math/bits"
	"net/netip"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

// Filter maintains sy_addr_filter. The programs process only packets from or to an address in it. An address is added
// before Apply returns, and so before it is announced. It is removed when no other map contains it.
type Filter struct {
	Bits *ebpf.Map
	keys [10]uint32 // hash keys

	mu     sync.Mutex // guards all below
	counts map[uint32]int
	words  []uint64 // copy of the kernel's bits
}

// OpenFilter opens the filter, and keeps a previous agent's bits until Sync.
func OpenFilter(bits *ebpf.Map, keys [10]uint32) (*Filter, error) {
	f := &Filter{Bits: bits, keys: keys, counts: map[uint32]int{}, words: make([]uint64, bits.MaxEntries())}
	at, words := make([]uint32, len(f.words)), make([]uint64, len(f.words))
	var cursor ebpf.MapBatchCursor
	if n, err := bits.BatchLookup(&cursor, at, words, nil); n != len(words) {
		return nil, fmt.Errorf("read the filter of addresses: %w", err)
	}
	for i, word := range at {
		f.words[word] = words[i]
	}
	return f, nil
}

// bit returns the bit for an address and a kind (addr_kinds of bpf/frontend.h).
func (f *Filter) bit(addr netip.Addr, kind bpf.AddrKind) uint32 {
	b := addr.As16()
	w := func(i int) uint32 { return binary.NativeEndian.Uint32(b[4*i:]) }
	pair := func(x, y uint32, i int) uint64 { return uint64(x+f.keys[i]) * uint64(y+f.keys[i+1]) }
	h := pair(w(3), w(0), 0)
	if !addr.Is4() {
		h += pair(w(1), w(2), 2)
	}
	return uint32(h>>32)%(16*f.Bits.MaxEntries())*4 + uint32(bits.TrailingZeros32(uint32(kind)))
}

// Add makes the programs process packets from and to an address, until Remove was called as often as Add.
func (f *Filter) Add(addr netip.Addr, kind bpf.AddrKind) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	bit := f.bit(addr, kind)
	if f.counts[bit]++; f.counts[bit] > 1 {
		return nil
	}
	return f.write(bit/64, f.words[bit/64]|1<<(bit%64))
}

// Remove undoes one Add.
func (f *Filter) Remove(addr netip.Addr, kind bpf.AddrKind) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	bit := f.bit(addr, kind)
	if f.counts[bit]--; f.counts[bit] > 0 {
		return nil
	}
	delete(f.counts, bit)
	return f.write(bit/64, f.words[bit/64]&^(1<<(bit%64)))
}

func (f *Filter) write(i uint32, word uint64) error {
	f.words[i] = word
	if err := f.Bits.Put(i, word); err != nil {
		return fmt.Errorf("filter addresses: %w", err)
	}
	return nil
}

// Sync removes a previous agent's bits that this one does not have. Call it when all addresses are added and no program
// of the previous agent, which may use another hash, is attached.
func (f *Filter) Sync() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	words := make([]uint64, len(f.words))
	for bit := range f.counts {
		words[bit/64] |= 1 << (bit % 64)
	}
	for i, word := range words {
		if word == f.words[i] {
			continue
		}
		if err := f.write(uint32(i), word); err != nil {
			return err
		}
	}
	return nil
}
