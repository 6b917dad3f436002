package lb

import (
	"sync"
	"time"
)

// mailbox is a queue of functions to run in the engine's goroutine. It is unbounded, because a prober that posts while
// the engine calls it would deadlock if post could block.
type mailbox struct {
	wake   chan struct{} // capacity 1: there may be mail
	mu     sync.Mutex    // guards all below
	queue  []func()
	posted time.Time // when the first entry of queue was posted
	taken  time.Time // when the first entry being handled was posted, or zero
}

func (m *mailbox) post(f func()) {
	m.mu.Lock()
	if len(m.queue) == 0 {
		m.posted = time.Now()
	}
	m.queue = append(m.queue, f)
	m.mu.Unlock()
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// take removes and returns the queued functions. The caller runs them and then calls done.
func (m *mailbox) take() []func() {
	m.mu.Lock()
	defer m.mu.Unlock()
	q := m.queue
	m.queue, m.taken = nil, time.Now()
	if len(q) > 0 {
		m.taken = m.posted
	}
	return q
}

// done records that the mail returned by take has been handled.
func (m *mailbox) done() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.taken = time.Time{}
}

// waiting returns when the oldest unhandled mail was posted, or zero if there is none.
func (m *mailbox) waiting() time.Time {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.taken.IsZero() && len(m.queue) > 0 {
		return m.posted
	}
	return m.taken
}
