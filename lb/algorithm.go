package lb

import "math/rand/v2"

// TableFunc fills a lookup table of the given size with indices of targets. It is deterministic: every machine that
// knows the same targets computes the same table. targets is never empty and sorted.
type TableFunc func(targets []Target, size int) []uint16

// tableFuncs has an entry for every Algorithm. The kernel always does Table[h mod len(Table)]; what differs is how the
// table is filled here, and what h is there: a hash of the flow, of the source address, a counter or a random number.
// LeastConnections compares the live flows of two slots there.
var tableFuncs = map[Algorithm]TableFunc{
	AlgorithmMaglev:           Maglev,
	AlgorithmSourceHash:       Maglev,
	AlgorithmRoundRobin:       interleaved,
	AlgorithmRandom:           interleaved,
	AlgorithmLeastConnections: interleaved,
}

// tableFor returns the table of these targets. Stateful says that the flows are kept in a flow table: then nothing depends on a
// change of its size, and one target needs one slot.
func tableFor(a Algorithm, targets []Target, stateful bool) []uint16 {
	if len(targets) == 0 {
		return nil
	}
	if len(targets) == 1 && stateful {
		return []uint16{0}
	}
	fill, ok := tableFuncs[a]
	if !ok {
		panic("lb: no table function for algorithm " + string(a))
	}
	return fill(targets, TableSize(len(targets)))
}

// interleaved gives each target slots in proportion to its weight, spread over the table so that a walk through it
// visits targets in turn (the smooth weighted round-robin of nginx, precomputed).
func interleaved(targets []Target, size int) []uint16 {
	total := 0
	for _, t := range targets {
		total += t.Weight
	}
	table := make([]uint16, size)
	credit := make([]int, len(targets))
	for i := range credit {
		// Start the targets at different phases; the seed is fixed, so every machine agrees.
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
