// Package logqueue makes a log that never blocks its writers. Otherwise a pipe that nobody reads, a full disk or a hung
// journal would stop the engine while BGP and BFD continue. Lines keep their order. Lines that do not fit into the
// queue are lost, counted, and reported in their place.
package logqueue

import (
	"bytes"
	"fmt"
	"io"
	"sync"
	"time"
)

const (
	// size is the size of the queue in bytes: some 5,000 lines.
	size = 1 << 20
	// flushTimeout bounds Flush, because a log that nobody reads must not delay the end of the process.
	flushTimeout = 2 * time.Second
	// recent is how long lost lines remain a problem after the last one.
	recent = 10 * time.Minute
)

// Queue is an io.Writer that never blocks: a goroutine passes its lines to another writer. Its methods may be called
// from any goroutine; Flush and Problems may also be called on a nil Queue.
type Queue struct {
	out    io.Writer
	report func(out io.Writer, lines int) error

	mu      sync.Mutex // guards all below
	changed *sync.Cond
	lines   []byte    // not yet taken by the writer
	dropped int       // lines that came after those; until the writer takes them, no more are queued
	writing bool      // the writer has lines
	lost    int       // number of lines, for Problems
	lostAt  time.Time // when the last one was lost
}

// New starts a queue for out. It runs until the process ends. report writes to out that this many lines were lost.
func New(out io.Writer, report func(out io.Writer, lines int) error) *Queue {
	q := &Queue{out: out, report: report}
	q.changed = sync.NewCond(&q.mu)
	go q.run()
	return q
}

// Write queues one line, or counts it as lost. It always returns the full length and no error.
func (q *Queue) Write(line []byte) (int, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.dropped > 0 || len(q.lines)+len(line) > size {
		q.dropped++
		q.lose(1)
	} else {
		q.lines = append(q.lines, line...)
	}
	q.changed.Broadcast()
	return len(line), nil
}

// lose counts lost lines for Problems. The caller holds mu.
func (q *Queue) lose(lines int) {
	if time.Since(q.lostAt) > recent {
		q.lost = 0
	}
	q.lost, q.lostAt = q.lost+lines, time.Now()
}

// run passes on all queued lines each time, and reports lost lines in their place.
func (q *Queue) run() {
	var lines []byte
	unsaid := 0
	say := func() {
		if unsaid > 0 && q.report(q.out, unsaid) == nil {
			unsaid = 0
		}
	}
	for {
		var dropped int
		lines, dropped = q.take(lines[:0])
		say()
		if n, err := q.out.Write(lines); err != nil {
			failed := bytes.Count(lines[n:], []byte("\n"))
			q.mu.Lock()
			q.lose(failed)
			q.mu.Unlock()
			unsaid += failed
		}
		unsaid += dropped
		say()
	}
}

// take waits for lines. It returns them, and how many were dropped after them; free is the buffer for the next ones.
func (q *Queue) take(free []byte) (lines []byte, dropped int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.writing = false
	q.changed.Broadcast()
	for len(q.lines) == 0 {
		q.changed.Wait()
	}
	lines, dropped = q.lines, q.dropped
	q.lines, q.dropped, q.writing = free, 0, true
	return lines, dropped
}

// Flush waits, for a limited time, until all lines are written. It must be called before the process ends, even by a
// panic: defer it in each goroutine that may panic.
func (q *Queue) Flush() {
	if q == nil {
		return
	}
	late := false
	defer time.AfterFunc(flushTimeout, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		late = true
		q.changed.Broadcast()
	}).Stop()
	q.mu.Lock()
	defer q.mu.Unlock()
	for (len(q.lines) > 0 || q.writing) && !late {
		q.changed.Wait()
	}
}

// Problems reports recently lost lines, for the status.
func (q *Queue) Problems() []string {
	if q == nil {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.lost == 0 || q.dropped == 0 && time.Since(q.lostAt) > recent {
		return nil
	}
	return []string{Lost(q.lost)}
}

// Lost is the text used by Problems and in reports.
func Lost(lines int) string { return fmt.Sprintf("%d lines of the log were lost", lines) }
