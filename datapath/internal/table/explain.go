package table

import (
	"github.com/steelyard-lb/steelyard/lb"
)

// Find returns the frontend of a packet, or false if there is none.
func (s *Services) Find(q lb.Question) (lb.Frontend, bool) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	for _, state := range s.vips[q.To.Addr()] {
		f := state.is
		if f.Protocol == q.Protocol && !f.Decap && q.To.Port() >= f.Port && q.To.Port() <= max(f.Port, f.Last) {
			return f, true
		}
	}
	return lb.Frontend{}, false
}
