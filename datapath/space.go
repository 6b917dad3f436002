package datapath

import "slices"

// span is a range of words.
type span struct{ first, size uint32 }

func (x span) end() uint32 { return x.first + x.size }

// space assigns ranges of words to tables. They are whole lines of sy_slots, so small tables share no cache line.
type space struct {
	free []span // by first; none is empty and none touches the next
	top  uint32 // words from here on were never assigned
	size uint32
}

const lineWords = 16 // LINE_WORDS of bpf/types.h

// newSpace returns a space of size words in which these ranges are assigned. Word 0 is never assigned: a table without
// earlier backends names it (bpf/types.h).
func newSpace(size uint32, used []span) *space {
	s := &space{size: size, top: lineWords}
	slices.SortFunc(used, func(a, b span) int { return int(a.first) - int(b.first) })
	for _, x := range used {
		x = wholeLines(x)
		if x.first > s.top {
			s.free = append(s.free, span{s.top, x.first - s.top})
		}
		s.top = max(s.top, x.end())
	}
	return s
}

func wholeLines(x span) span {
	x.size = (x.size + lineWords - 1) / lineWords * lineWords
	return x
}

// used returns the number of words that are assigned.
func (s *space) used() uint32 {
	n := s.top
	for _, x := range s.free {
		n -= x.size
	}
	return n
}

// take assigns the smallest free range that fits; ok is false when there is none.
func (s *space) take(words uint32) (first uint32, ok bool) {
	n := wholeLines(span{0, words}).size
	best := -1
	for i, x := range s.free {
		if x.size >= n && (best < 0 || x.size < s.free[best].size) {
			best = i
		}
	}
	if best < 0 {
		if n > s.size-s.top {
			return 0, false
		}
		s.top += n
		return s.top - n, true
	}
	x := &s.free[best]
	first = x.first
	if x.first, x.size = x.first+n, x.size-n; x.size == 0 {
		s.free = slices.Delete(s.free, best, best+1)
	}
	return first, true
}

// release makes a range free again.
func (s *space) release(x span) {
	x = wholeLines(x)
	i, _ := slices.BinarySearchFunc(s.free, x, func(a, b span) int { return int(a.first) - int(b.first) })
	if i < len(s.free) && x.end() == s.free[i].first {
		x.size += s.free[i].size
		s.free = slices.Delete(s.free, i, i+1)
	}
	if i > 0 && s.free[i-1].end() == x.first {
		i--
		x = span{s.free[i].first, s.free[i].size + x.size}
		s.free = slices.Delete(s.free, i, i+1)
	}
	if x.end() == s.top {
		s.top = x.first
		return
	}
	s.free = slices.Insert(s.free, i, x)
}
