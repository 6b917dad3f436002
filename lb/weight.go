package lb

import (
	"maps"
	"slices"
)

// reportedMax is the largest weight that a backend may report, as a multiple of the other backends' median. Without it,
// one backend could receive all new flows.
const reportedMax = 4

// weight returns a backend's weight. A node may report its own, the number of its endpoints, unless the backend is not
// to receive new flows.
func (s *Service) weight(b Backend, h Health) int {
	if s.Check.Type == CheckNodePort && h.State == StateHealthy && h.Weight >= 0 && b.Weight > 0 {
		return min(h.Weight, MaxWeight)
	}
	return b.Weight
}

// bounded returns health with each reported weight bounded by reportedMax. Only backends that may receive new flows
// count.
func (s *Service) bounded(health map[CheckKey]Health) map[CheckKey]Health {
	if s.Check.Type != CheckNodePort {
		return health
	}
	weights := map[CheckKey]int{}
	s.eachChecked(func(k CheckKey, b Backend) {
		if h := health[k]; StateOf(s, b, h) == StateHealthy && s.weight(b, h) > 0 {
			weights[k] = s.weight(b, h)
		}
	})
	if len(weights) < 2 {
		return health
	}
	out, sorted := maps.Clone(health), slices.Sorted(maps.Values(weights))
	for k, weight := range weights {
		median := (len(sorted) - 1) / 2 // of the other backends, so this one is excluded
		if at, _ := slices.BinarySearch(sorted, weight); at <= median {
			median++
		}
		h := out[k]
		h.Weight = min(h.Weight, reportedMax*sorted[median])
		out[k] = h
	}
	return out
}
