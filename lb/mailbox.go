package lb

import "sync"

// mailbox is a queue of functions to run in the engine's goroutine. It is unbounded: if post blocked until the engine
// has room, a prober that posts while the engine calls it would deadlock.
type mailbox struct {
	wake  chan struct{} // capacity 1: there may be mail
	mu    sync.Mutex    // guards queue
	queue []func()
}

func (m *mailbox) post(f func()) {
	m.mu.Lock()
	m.queue = append(m.queue, f)
	m.mu.Unlock()
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

func (m *mailbox) take() []func() {
	m.mu.Lock()
	defer m.mu.Unlock()
	q := m.queue
	m.queue = nil
	return q
}
