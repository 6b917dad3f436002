package lb

import (
	"math/rand/v2"
	"net/netip"
	"slices"
)

// TableFunc fills a lookup table of the given size with indices of targets. It is deterministic: every node with the
// same targets computes the same table. targets is sorted and not empty.
type TableFunc func(targets []Target, size int) []uint16

// tableFuncs has an entry for every Algorithm. The kernel always uses Table[h·len(Table)/2³²]. Algorithms differ in how
// this package fills the table, and in what the kernel uses as h: a hash of the flow, a hash of the source address, a
// counter or a random number. For LeastConnections the kernel compares the live flows of two slots.
var tableFuncs = map[Algorithm]TableFunc{
	AlgorithmMaglev:           Maglev,
	AlgorithmSourceHash:       byHost,
	AlgorithmRoundRobin:       interleaved,
	AlgorithmRandom:           interleaved,
	AlgorithmLeastConnections: interleaved,
}

// tableFor returns the table for targets. If stateful, the kernel has every flow in its flow table, so resizing the
// lookup table moves no flow, and a single target needs only one slot.
func tableFor(a Algorithm, targets []Target, stateful bool) []uint16 {
	size := tableLen(len(targets), stateful)
	if size <= 1 {
		return make([]uint16, size)
	}
	fill, ok := tableFuncs[a]
	if !ok {
		panic("lb: no table function for algorithm " + string(a))
	}
	return fill(targets, size)
}

func tableLen(targets int, stateful bool) int {
	if targets == 0 || targets == 1 && stateful {
		return targets
	}
	return TableSize(targets)
}

// byHost is Maglev without the targets' ports. So a client reaches the same server through all ports of a service.
func byHost(targets []Target, size int) []uint16 {
	hosts := slices.Clone(targets)
	for i, t := range targets {
		if i > 0 && t.Addr.Addr() == targets[i-1].Addr.Addr() {
			return Maglev(targets, size) // two servers with one address need different places
		}
		hosts[i].Addr = netip.AddrPortFrom(t.Addr.Addr(), 0)
	}
	return Maglev(hosts, size)
}

// interleaved gives each target slots in proportion to its weight, spread so that a walk through the table visits
// targets in turn (the smooth weighted round-robin of nginx, precomputed).
func interleaved(targets []Target, size int) []uint16 {
	total := 0
	for _, t := range targets {
		total += t.Weight
	}
	table := make([]uint16, size)
	credit := make([]int, len(targets))
	for i := range credit {
		// Start the targets at different phases; the seed is fixed, so every node computes the same table.
		credit[i] = rand.New(rand.NewPCG(1, uint64(i))).IntN(total)
	}
	for slot := range table {
		best := 0
		for i, t := range targets {
			credit[i] += t.Weight
			if credit[i] > credit[best] {
				best = i
			}
		}
		credit[best] -= total
		table[slot] = uint16(best)
	}
	return table
}
