package lb

import (
	"maps"
	"slices"
)

// reportedMax is the largest weight that a backend may report, as a multiple of the others' median. Without it, one
// backend could take all new flows.
const reportedMax = 4

// weight returns a backend's weight. A node may report it, as the number of its endpoints, unless the backend is not to
// get new flows.
func (s *Service) weight(b Backend, h Health) int {
	if s.Check.Type == CheckNodePort && h.State == StateHealthy && h.Weight >= 0 && b.Weight > 0 {
		return min(h.Weight, MaxWeight)
	}
	return b.Weight
}

// bounded returns health with the reported weights bounded by those of the other backends that may receive new flows.
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
		median := (len(sorted) - 1) / 2 // of the others, so this one is excluded
		if at, _ := slices.BinarySearch(sorted, weight); at <= median {
			median++
		}
		h := out[k]
		h.Weight = min(h.Weight, reportedMax*sorted[median])
		out[k] = h
	}
	return out
}
