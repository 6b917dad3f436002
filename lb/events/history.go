package events

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"
)

const (
	// most is the maximum number of events in memory. The files have at least half of them.
	most = 10_000
	// retry is the time between attempts to write.
	retry = time.Second
)

// History holds the last events in memory and in two files with one JSON object per line. When the newer file has
// most/2 lines, it replaces the older one. Its methods may be called from any goroutine, except Run and Flush.
type History struct {
	newer, older string // paths
	inNewer      int    // number of lines in the newer file
	written      int    // how many of total Run has written

	mu      sync.Mutex    // guards all below
	changed chan struct{} // closed at the next event
	lines   [][]byte      // the last ones, without "\n"
	total   int           // number of events, including those read from the files
}

// Open reads the history in a directory, which need not exist, and prepares it for Run.
func Open(dir string) (*History, error) {
	h, err := read(dir)
	if err != nil {
		return h, err
	}
	// An agent that was killed while it wrote leaves part of a line.
	if text, err := os.ReadFile(h.newer); err == nil && !bytes.HasSuffix(text, []byte("\n")) {
		return h, os.Truncate(h.newer, int64(bytes.LastIndexByte(text, '\n')+1))
	}
	return h, nil
}

// Read returns the events in a directory that f selects, oldest first. An agent may be writing there.
func Read(dir string, f Filter) ([]Event, error) {
	h, err := read(dir)
	return decode(h.lines, f), err
}

func read(dir string) (*History, error) {
	h := &History{
		newer: filepath.Join(dir, "events.jsonl"), older: filepath.Join(dir, "events.1.jsonl"),
		changed: make(chan struct{}),
	}
	for _, path := range []string{h.older, h.newer} {
		text, err := os.ReadFile(path)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return h, err
		}
		lines := bytes.Split(text, []byte("\n"))
		lines = lines[:len(lines)-1] // after the last "\n" there is nothing, or part of a line
		h.inNewer = len(lines)
		h.lines = append(h.lines, lines...)
	}
	h.lines = h.lines[max(0, len(h.lines)-most):]
	h.total = len(h.lines)
	h.written = h.total
	return h, nil
}

// add appends an event. It does not wait for the disk.
func (h *History) add(e Event) {
	line, err := json.Marshal(e)
	if err != nil {
		return // strings and a time always have a JSON form
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.lines) == most {
		h.lines = slices.Delete(h.lines, 0, most/10) // rarely, because it moves all
	}
	h.lines = append(h.lines, line)
	h.total++
	close(h.changed)
	h.changed = make(chan struct{})
}

// After skips the first n events and returns the others that f selects, oldest first. It also returns the number of all
// events, and a channel that is closed at the next one.
func (h *History) After(n int, f Filter) (events []Event, total int, changed <-chan struct{}) {
	lines, total, changed := h.after(n)
	return decode(lines, f), total, changed
}

func (h *History) after(n int) (lines [][]byte, total int, changed <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.lines[max(0, len(h.lines)-(h.total-n)):]), h.total, h.changed
}

// Run writes new events to the files until ctx ends. It calls problem with the result of each attempt.
func (h *History) Run(ctx context.Context, problem func(error)) {
	for {
		err := h.Flush()
		problem(err)
		_, _, changed := h.after(h.written)
		var again <-chan time.Time
		if err != nil {
			again, changed = time.After(retry), nil
		}
		select {
		case <-changed:
		case <-again:
		case <-ctx.Done():
			return
		}
	}
}

// Flush writes the events that Run has not written. It must not be called while Run runs.
func (h *History) Flush() error {
	lines, total, _ := h.after(h.written)
	if len(lines) > 0 {
		if err := h.write(lines); err != nil {
			return err
		}
	}
	h.written = total
	return nil
}

// write appends lines to the newer file, all or none of them.
func (h *History) write(lines [][]byte) error {
	if h.inNewer >= most/2 {
		if err := os.Rename(h.newer, h.older); err != nil {
			return err
		}
		h.inNewer = 0
	}
	f, err := os.OpenFile(h.newer, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	end, err := f.Seek(0, 2)
	if err != nil {
		return err
	}
	if _, err := f.Write(append(bytes.Join(lines, []byte("\n")), '\n')); err != nil {
		return errors.Join(err, f.Truncate(end))
	}
	h.inNewer += len(lines)
	return nil
}
