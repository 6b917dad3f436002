package lb

import (
	"hash/fnv"
	"sort"
)

// TableSize returns the number of slots in a table with n targets: a prime of at least 100 × n, so that shares are
// accurate to about one per cent (Maglev, §5.3), but at most MaxTableSize, to bound memory.
func TableSize(n int) int {
	i := sort.SearchInts(tablePrimes, 100*n)
	return tablePrimes[min(i, len(tablePrimes)-1)]
}

// tablePrimes are about a factor of two apart, so that the table of a growing service is rarely resized. Resizing moves
// most flows that have no entry in a flow table.
var tablePrimes = []int{1009, 2039, 4093, 8191, 16381, 32749, 65521}

// MaxTableSize is the size of the largest table, in slots.
const MaxTableSize = 65521

// Maglev fills a table by the algorithm of Eisenbud et al., "Maglev: A Fast and Reliable Software Network Load
// Balancer", NSDI 2016, §3.4: each target walks its own permutation of the slots and takes the next free one in turn.
// A target of weight w takes turns in proportion to w. When a target is removed, its slots are spread over the others,
// and few other slots change.
func Maglev(targets []Target, size int) []uint16 {
	type walk struct{ next, skip int }
	walks := make([]walk, len(targets))
	heaviest := 0
	for i, t := range targets {
		h := fnv.New64a()
		key, _ := t.Addr.MarshalBinary() // never fails
		h.Write(key)
		sum := mix(h.Sum64())
		walks[i] = walk{next: int(sum % uint64(size)), skip: int((sum>>32)%uint64(size-1)) + 1}
		heaviest = max(heaviest, t.Weight)
	}

	const free = ^uint16(0)
	table := make([]uint16, size)
	for i := range table {
		table[i] = free
	}
	credit := make([]int, len(targets))
	for taken := 0; ; {
		for i := range targets {
			// One turn each time the accumulated weight passes the heaviest target's.
			if credit[i] += targets[i].Weight; credit[i] < heaviest {
				continue
			}
			credit[i] -= heaviest
			w := &walks[i]
			for table[w.next] != free {
				w.next = (w.next + w.skip) % size
			}
			table[w.next] = uint16(i)
			if taken++; taken == size {
				return table
			}
		}
	}
}

// mix finalises a hash so that all of its bits depend on all of the input (splitmix64).
func mix(h uint64) uint64 {
	h = (h ^ h>>30) * 0xbf58476d1ce4e5b9
	h = (h ^ h>>27) * 0x94d049bb133111eb
	return h ^ h>>31
}
