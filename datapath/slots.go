package datapath

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

// slotChanged marks a slot that has earlier backends (bpf/types.h).
const slotChanged = 0x80000000

// spareWords is the room that is made ahead of need: for as many changes of services of ten backends as are made, one
// after the other, in the time in which the words of earlier tables become free.
const spareWords = 1 << 18

// slotStore keeps the tables of all frontends in sy_slots. A table is written where no frontend refers to. The words of
// a table that was replaced are used again after a grace period, because a program may still read them.
type slotStore struct {
	words  *chunked
	window window
	log    *slog.Logger

	mu      sync.Mutex // guards all below
	space   *space
	retired []span
	wakeup  chan struct{} // capacity 1: tables were written or retired
}

// openSlotStore opens the tables that these frontends of an earlier agent have.
func openSlotStore(words *chunked, used []bpf.Frontend, log *slog.Logger) *slotStore {
	var spans []span
	for _, f := range used {
		spans = append(spans, spansOf(f)...)
	}
	size := words.outer.MaxEntries() * words.spec.MaxEntries * lineWords
	return &slotStore{words: words, log: log, space: newSpace(size, spans), wakeup: make(chan struct{}, 1)}
}

// spansOf returns the words of a frontend's tables.
func spansOf(f bpf.Frontend) (spans []span) {
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

// write writes a table and sets the fields of f that refer to it. After an error f refers to nothing.
func (s *slotStore) write(t table, f *bpf.Frontend) error {
	var err error
	if f.Table, err = s.writeSlots(t.slots); err != nil {
		return err
	}
	if f.Older, err = s.writeSlots(t.older); err != nil {
		s.retire(*f)
		f.Table = bpf.Table{}
	}
	return err
}

func (s *slotStore) writeSlots(slots []slot) (t bpf.Table, err error) {
	if len(slots) == 0 {
		return t, nil
	}
	words, previous, changed := make([]uint32, 0, len(slots)), make([]uint32, 0, len(slots)*previousMax), false
	for _, x := range slots {
		word := x.backend
		if x.changed() {
			word, changed = word|slotChanged, true
		}
		words, previous = append(words, word), append(previous, x.previous[:]...)
	}
	t.Slots = uint32(len(slots))
	if t.First, err = s.put(words); err != nil {
		return bpf.Table{}, err
	}
	if changed {
		if t.Previous, err = s.put(previous); err != nil {
			s.retire(bpf.Frontend{Table: t})
			return bpf.Table{}, err
		}
	}
	return t, nil
}

// put writes words where nobody reads, and returns the first one.
func (s *slotStore) put(words []uint32) (first uint32, err error) {
	n := uint32(len(words))
	s.mu.Lock()
	first, ok := s.space.take(n)
	s.mu.Unlock()
	if !ok {
		return 0, fmt.Errorf("%w: tables full (%d slots)", lb.ErrRefused, s.space.size)
	}
	if err = s.words.grow((first + n + lineWords - 1) / lineWords); err == nil {
		err = s.each(first, n, func(memory []byte, from, to uint32) {
			for i, w := range words[from:to] {
				binary.NativeEndian.PutUint32(memory[4*i:], w)
			}
		})
	}
	if err != nil {
		s.mu.Lock()
		s.space.release(span{first, n})
		s.mu.Unlock()
		return 0, fmt.Errorf("write a table: %w", err)
	}
	return first, nil
}

// each calls do for each chunk that has some of n words from first on, with the memory from there, and which words.
func (s *slotStore) each(first, n uint32, do func(memory []byte, from, to uint32)) error {
	perChunk := s.words.spec.MaxEntries * lineWords
	for from := uint32(0); from < n; {
		at := first + from
		to := min(n, from+perChunk-at%perChunk)
		chunk, _ := s.words.at(at / lineWords)
		err := s.window.open(chunk, func(memory []byte) { do(memory[at%perChunk*4:], from, to) })
		if err != nil {
			return err
		}
		from = to
	}
	return nil
}

// read returns the table of a frontend.
func (s *slotStore) read(f bpf.Frontend) (t table, err error) {
	if t.slots, err = s.readSlots(f.Table); err != nil {
		return table{}, err
	}
	t.older, err = s.readSlots(f.Older)
	return t, err
}

func (s *slotStore) readSlots(t bpf.Table) ([]slot, error) {
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
	slots := make([]slot, len(words))
	for i, w := range words {
		slots[i] = slot{w &^ slotChanged, [previousMax]uint32{noBackend, noBackend, noBackend}}
		if previous != nil {
			copy(slots[i].previous[:], previous[i*previousMax:])
		}
	}
	return slots, nil
}

func (s *slotStore) get(first, n uint32) ([]uint32, error) {
	words := make([]uint32, n)
	if uint64(first)+uint64(n) > uint64(s.words.len())*lineWords {
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

// retire gives the words of a frontend's tables back. No frontend in the kernel refers to them any longer.
func (s *slotStore) retire(f bpf.Frontend) {
	s.mu.Lock()
	s.retired = append(s.retired, spansOf(f)...)
	s.mu.Unlock()
	s.wake()
}

// wake makes run make room, and look for retired tables.
func (s *slotStore) wake() {
	select {
	case s.wakeup <- struct{}{}:
	default:
	}
}

// reserve makes room for tables of n words in all, lines included.
func (s *slotStore) reserve(n uint32) error {
	s.mu.Lock()
	end := min(s.space.top+n, s.space.size)
	s.mu.Unlock()
	return s.words.grow(end / lineWords)
}

// run makes room for the next tables, and the words of retired ones free, until ctx ends.
func (s *slotStore) run(ctx context.Context) error {
	for {
		if err := s.reserve(spareWords); err != nil {
			s.log.Error("no room made for tables", "err", err)
		}
		if err := s.collect(); err != nil {
			s.log.Error("words of earlier tables not released", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-s.wakeup:
		}
	}
}

// collect waits until no program reads the tables that are retired now, and makes their words free.
func (s *slotStore) collect() error {
	s.mu.Lock()
	retired := s.retired
	s.retired = nil
	s.mu.Unlock()
	if len(retired) == 0 {
		return nil
	}
	err := s.words.barrier()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.retired = append(s.retired, retired...)
		return errors.Join(errors.New("wait for the programs"), err)
	}
	for _, x := range retired {
		s.space.release(x)
	}
	return nil
}
