package table

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// Random tables come and go: no word is assigned twice, and what was released is assigned again.
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
			if h = WholeLines(h); x.First < h.End() && h.First < x.End() {
				t.Fatalf("step %d: %v overlaps %v", step, x, h)
			}
		}
		if x.First < LineWords || x.End() > s.size {
			t.Fatalf("step %d: %v is outside of the space", step, x)
		}
		held = append(held, span{first, n})
	}
	again := newSpace(s.size, slices.Clone(held))
	if !slices.Equal(again.free, s.free) || again.Top != s.Top {
		t.Errorf("after a restart %v, top %d; want %v, top %d", again.free, again.Top, s.free, s.Top)
	}
	for _, h := range held {
		s.release(h)
	}
	if len(s.free) != 0 || s.Top != LineWords {
		t.Errorf("with nothing assigned: free %v, top %d", s.free, s.Top)
	}
}

func TestSpaceIsFull(t *testing.T) {
	s := newSpace(64, nil)
	if _, ok := s.take(49); ok {
		t.Error("49 words were assigned in 48")
	}
	if first, ok := s.take(48); !ok || first != LineWords {
		t.Errorf("48 words: %d, %t", first, ok)
	}
	if _, ok := s.take(1); ok {
		t.Error("a word was assigned in a full space")
	}
}
