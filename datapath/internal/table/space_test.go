package table

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// With random tables, no word is assigned twice, and released words are assigned again.
func TestSpaceAssignsNoWordTwice(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	s := newSpace(1<<16, nil)
	var held []span
	for step := range 20_000 {
		if len(held) > 0 && r.IntN(100) < 48 {
			i := r.IntN(len(held))
			s.release(held[i])
			held = slices.Delete(held, i, i+1)
			continue
		}
		n := 1 + r.Uint32N(600)
		first, ok := s.take(n)
		if !ok {
			continue
		}
		x := WholeLines(span{first, n})
		for _, h := range held {
			h = WholeLines(h)
			must.Need(t, x.First >= h.End() || h.First >= x.End(), "step %d: %v overlaps %v", step, x, h)
		}
		must.Need(t, x.First >= LineWords && x.End() <= s.size, "step %d: %v is outside of the space", step, x)
		held = append(held, span{first, n})
	}
	again := newSpace(s.size, slices.Clone(held))
	must.True(t, slices.Equal(again.free, s.free) && again.Top == s.Top,
		"after a restart %v, top %d; want %v, top %d", again.free, again.Top, s.free, s.Top)
	for _, h := range held {
		s.release(h)
	}
	must.True(t, len(s.free) == 0 && s.Top == LineWords, "with nothing assigned: free %v, top %d", s.free, s.Top)
}

func TestSpaceIsFull(t *testing.T) {
	s := newSpace(64, nil)
	_, ok := s.take(49)
	must.True(t, !ok, "49 words were assigned in 48")
	first, ok := s.take(48)
	must.True(t, ok && first == LineWords, "48 words: %d, %t", first, ok)
	_, ok = s.take(1)
	must.True(t, !ok, "a word was assigned in a full space")
}
