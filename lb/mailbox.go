package lb

import "sync"

// mailbox is an unbounded queue of things to do in the engine's goroutine. It is unbounded on purpose: whoever reports
// something must never wait for the engine, which may be handing that very reporter new work.
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
