package lb

import "math"

// Handshakes counts the times of a backend's handshakes: from a client's first SYN to the SYN-ACK.
type Handshakes struct {
	Sum    float64 // seconds
	Counts [16]float64
}

// HandshakeBound returns the upper bound in seconds of the times in Counts[i]. The last one has none.
func HandshakeBound(i int) float64 {
	if i == len(Handshakes{}.Counts)-1 {
		return math.Inf(1)
	}
	return float64(int64(131072)<<i) / 1e9
}

// Add adds the counts of o, multiplied by factor.
func (h *Handshakes) Add(o Handshakes, factor float64) {
	h.Sum += factor * o.Sum
	for i, n := range o.Counts {
		h.Counts[i] += factor * n
	}
}

// Exceeds reports whether h has more handshakes than o in any range.
func (h Handshakes) Exceeds(o Handshakes) bool {
	for i, n := range h.Counts {
		if n > o.Counts[i] {
			return true
		}
	}
	return false
}

// Total returns the number of handshakes.
func (h Handshakes) Total() (n float64) {
	for _, c := range h.Counts {
		n += c
	}
	return n
}

// Quantile returns an estimate of the time in seconds below which this part of the times is: it assumes that the times
// in a range are spread evenly. Times above the largest bound count as this bound. Without handshakes it is 0.
func (h Handshakes) Quantile(part float64) float64 {
	left, low := part*h.Total(), 0.0
	if left == 0 {
		return 0
	}
	for i, n := range h.Counts[:len(h.Counts)-1] {
		high := HandshakeBound(i)
		if left <= n {
			return low + (high-low)*left/n
		}
		left, low = left-n, high
	}
	return low
}

// Cumulated returns the number of handshakes, and of those below each bound.
func (h Handshakes) Cumulated() (n uint64, below map[float64]uint64) {
	below = map[float64]uint64{}
	for i, c := range h.Counts[:len(h.Counts)-1] {
		n += uint64(c)
		below[HandshakeBound(i)] = n
	}
	return n + uint64(h.Counts[len(h.Counts)-1]), below
}
