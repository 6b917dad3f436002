package table

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
	"github.com/steelyard-lb/steelyard/lb"
)

// slotChanged marks a slot that has previous backends (bpf/types.h).
const slotChanged = 0x80000000

// SpareWords is the number of words reserved in advance. It is enough for all successive changes of services with ten
// backends in the time until the words of replaced tables become free.
const SpareWords = 1 << 18

// slotStore stores the tables of all frontends in sy_slots. It writes a table to words that no frontend refers to. It
// reuses a replaced table's words after a grace period, because a program may still read them.
type slotStore struct {
	Words  *Chunked
	window window
	log    *slog.Logger

	Mu      sync.Mutex // guards all below
	Space   *space
	retired []span
	wakeup  chan struct{} // capacity 1: tables were written or retired
}

// openSlotStore opens the tables that a previous agent wrote for the frontends in used.
func openSlotStore(words *Chunked, used map[uint32]*frontend, log *slog.Logger) *slotStore {
	var spans []span
	for _, f := range used {
		spans = append(spans, SpansOf(f.Value)...)
	}
	size := words.outer.MaxEntries() * words.Spec.MaxEntries * LineWords
	return &slotStore{Words: words, log: log, Space: newSpace(size, spans), wakeup: make(chan struct{}, 1)}
}

// SpansOf returns the word ranges of a frontend's tables.
func SpansOf(f bpf.Frontend) (spans []span) {
	for _, t := range []bpf.Table{f.Table, f.Older} {
		if t.Slots > 0 {
			spans = append(spans, span{t.First, t.Slots})
		}
		if t.Previous > 0 {
			spans = append(spans, span{t.Previous, t.Slots * previousMax})
		}
	}
	return spans
}

// Write writes a table and sets the fields of f that refer to it. After an error, f refers to no table.
func (s *slotStore) Write(t Table, f *bpf.Frontend) error {
	var err error
	if f.Table, err = s.writeSlots(t.Slots); err != nil {
		return err
	}
	if f.Older, err = s.writeSlots(t.Older); err != nil {
		s.Retire(*f)
		f.Table = bpf.Table{}
	}
	return err
}

func (s *slotStore) writeSlots(slots []Slot) (t bpf.Table, err error) {
	if len(slots) == 0 {
		return t, nil
	}
	words, previous, changed := make([]uint32, 0, len(slots)), make([]uint32, 0, len(slots)*previousMax), false
	for _, x := range slots {
		word := x.Backend
		if x.Changed() {
			word, changed = word|slotChanged, true
		}
		words, previous = append(words, word), append(previous, x.Previous[:]...)
	}
	t.Slots = uint32(len(slots))
	if t.First, err = s.put(words); err != nil {
		return bpf.Table{}, err
	}
	if changed {
		if t.Previous, err = s.put(previous); err != nil {
			s.Retire(bpf.Frontend{Table: t})
			return bpf.Table{}, err
		}
	}
	return t, nil
}

// put writes words to a free range, and returns the index of the first.
func (s *slotStore) put(words []uint32) (first uint32, err error) {
	n := uint32(len(words))
	s.Mu.Lock()
	first, ok := s.Space.take(n)
	s.Mu.Unlock()
	if !ok {
		return 0, fmt.Errorf("%w: tables full (%d slots)", lb.ErrRefused, s.Space.size)
	}
	if err = s.Words.grow((first + n + LineWords - 1) / LineWords); err == nil {
		err = s.each(first, n, func(memory []byte, from, to uint32) {
			for i, w := range words[from:to] {
				binary.NativeEndian.PutUint32(memory[4*i:], w)
			}
		})
	}
	if err != nil {
		s.Mu.Lock()
		s.Space.release(span{first, n})
		s.Mu.Unlock()
		return 0, fmt.Errorf("write a table: %w", err)
	}
	return first, nil
}

// each calls do for each chunk that contains some of the n words starting at first. memory starts at word first+from,
// and the chunk has the words before first+to.
func (s *slotStore) each(first, n uint32, do func(memory []byte, from, to uint32)) error {
	perChunk := s.Words.Spec.MaxEntries * LineWords
	for from := uint32(0); from < n; {
		at := first + from
		to := min(n, from+perChunk-at%perChunk)
		chunk, _ := s.Words.at(at / LineWords)
		err := s.window.open(chunk, func(memory []byte) { do(memory[at%perChunk*4:], from, to) })
		if err != nil {
			return err
		}
		from = to
	}
	return nil
}

// Read returns a frontend's table.
func (s *slotStore) Read(f bpf.Frontend) (t Table, err error) {
	if t.Slots, err = s.readSlots(f.Table); err != nil {
		return Table{}, err
	}
	t.Older, err = s.readSlots(f.Older)
	return t, err
}

func (s *slotStore) readSlots(t bpf.Table) ([]Slot, error) {
	words, err := s.get(t.First, t.Slots)
	if err != nil {
		return nil, err
	}
	var previous []uint32
	if t.Previous > 0 {
		if previous, err = s.get(t.Previous, t.Slots*previousMax); err != nil {
			return nil, err
		}
	}
	slots := make([]Slot, len(words))
	for i, w := range words {
		slots[i] = Slot{w &^ slotChanged, [previousMax]uint32{NoBackend, NoBackend, NoBackend}}
		if previous != nil {
			copy(slots[i].Previous[:], previous[i*previousMax:])
		}
	}
	return slots, nil
}

func (s *slotStore) get(first, n uint32) ([]uint32, error) {
	words := make([]uint32, n)
	if uint64(first)+uint64(n) > uint64(s.Words.Len())*LineWords {
		return nil, fmt.Errorf("read a table: words %d to %d do not exist", first, first+n)
	}
	err := s.each(first, n, func(memory []byte, from, to uint32) {
		for i := range words[from:to] {
			words[from+uint32(i)] = binary.NativeEndian.Uint32(memory[4*i:])
		}
	})
	if err != nil {
		return nil, fmt.Errorf("read a table: %w", err)
	}
	return words, nil
}

// Retire marks the words of a frontend's tables for reuse. No frontend in the kernel may refer to them.
func (s *slotStore) Retire(f bpf.Frontend) {
	s.Mu.Lock()
	s.retired = append(s.retired, SpansOf(f)...)
	s.Mu.Unlock()
	s.wake()
}

// wake makes Run reserve words and free retired ones.
func (s *slotStore) wake() {
	select {
	case s.wakeup <- struct{}{}:
	default:
	}
}

// Reserve adds chunks until n more words can be assigned.
func (s *slotStore) Reserve(n uint32) error {
	s.Mu.Lock()
	end := min(s.Space.Top+n, s.Space.size)
	s.Mu.Unlock()
	return s.Words.grow(end / LineWords)
}

// Run reserves words for the next tables, and frees the words of retired tables, until ctx ends.
func (s *slotStore) Run(ctx context.Context) error {
	for {
		if err := s.Reserve(SpareWords); err != nil {
			s.log.Error("could not reserve space for tables", "err", err)
		}
		if err := s.Collect(); err != nil {
			s.log.Error("memory of replaced tables not released", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-s.wakeup:
		}
	}
}

// Collect waits until no program reads the tables retired so far, and frees their words.
func (s *slotStore) Collect() error {
	s.Mu.Lock()
	retired := s.retired
	s.retired = nil
	s.Mu.Unlock()
	if len(retired) == 0 {
		return nil
	}
	err := s.Words.barrier()
	s.Mu.Lock()
	defer s.Mu.Unlock()
	if err != nil {
		s.retired = append(s.retired, retired...)
		return errors.Join(errors.New("wait for the programs"), err)
	}
	for _, x := range retired {
		s.Space.release(x)
	}
	return nil
}
