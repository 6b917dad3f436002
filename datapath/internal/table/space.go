package table

import (
	"slices"
)

// span is a range of words.
type span struct{ First, size uint32 }

func (x span) End() uint32 { return x.First + x.size }

// space assigns ranges of words to tables. The ranges are whole lines of sy_slots, so tables never share a cache line.
type space struct {
	free []span // ordered by First; none is empty, and no two are adjacent
	Top  uint32 // words from here on are not assigned
	size uint32
}

// LineWords is LINE_WORDS of bpf/types.h.
const LineWords = 16

// newSpace returns a space of size words with the ranges in used assigned. Word 0 is never assigned, because tables
// without previous backends refer to it (bpf/types.h).
func newSpace(size uint32, used []span) *space {
	s := &space{size: size, Top: LineWords}
	slices.SortFunc(used, func(a, b span) int { return int(a.First) - int(b.First) })
	for _, x := range used {
		x = WholeLines(x)
		if x.First > s.Top {
			s.free = append(s.free, span{s.Top, x.First - s.Top})
		}
		s.Top = max(s.Top, x.End())
	}
	return s
}

// WholeLines rounds a range up to whole lines.
func WholeLines(x span) span {
	x.size = (x.size + LineWords - 1) / LineWords * LineWords
	return x
}

// used returns the number of assigned words.
func (s *space) used() uint32 {
	n := s.Top
	for _, x := range s.free {
		n -= x.size
	}
	return n
}

// take assigns words from the smallest free range that fits. ok is false if there is none.
func (s *space) take(words uint32) (first uint32, ok bool) {
	n := WholeLines(span{0, words}).size
	best := -1
	for i, x := range s.free {
		if x.size >= n && (best < 0 || x.size < s.free[best].size) {
			best = i
		}
	}
	if best < 0 {
		if n > s.size-s.Top {
			return 0, false
		}
		s.Top += n
		return s.Top - n, true
	}
	x := &s.free[best]
	first = x.First
	if x.First, x.size = x.First+n, x.size-n; x.size == 0 {
		s.free = slices.Delete(s.free, best, best+1)
	}
	return first, true
}

func (s *space) release(x span) {
	x = WholeLines(x)
	i, _ := slices.BinarySearchFunc(s.free, x, func(a, b span) int { return int(a.First) - int(b.First) })
	if i < len(s.free) && x.End() == s.free[i].First {
		x.size += s.free[i].size
		s.free = slices.Delete(s.free, i, i+1)
	}
	if i > 0 && s.free[i-1].End() == x.First {
		i--
		x = span{s.free[i].First, s.free[i].size + x.size}
		s.free = slices.Delete(s.free, i, i+1)
	}
	if x.End() == s.Top {
		s.Top = x.First
		return
	}
	s.free = slices.Insert(s.free, i, x)
}
