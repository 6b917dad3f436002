package l2

import (
	"context"
	"sync"
	"time"
)

// bucket is a token bucket: it allows a burst of events and then one per interval. It is safe for concurrent use.
type bucket struct {
	interval time.Duration
	burst    int

	mu   sync.Mutex
	full time.Time // when the bucket is full again
}

// reserve takes a token and returns how long to wait until it is available. If wait is false, it takes a token only if
// one is available now.
func (b *bucket) reserve(now time.Time, wait bool) (delay time.Duration, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	full := b.full
	if full.Before(now) {
		full = now
	}
	full = full.Add(b.interval)
	if delay = full.Sub(now) - time.Duration(b.burst)*b.interval; delay > 0 && !wait {
		return delay, false
	}
	b.full = full
	return delay, true
}

func (b *bucket) allow(now time.Time) bool {
	_, ok := b.reserve(now, false)
	return ok
}

// wait waits until the next event is within the limit or ctx ends.
func (b *bucket) wait(ctx context.Context) {
	if delay, _ := b.reserve(time.Now(), true); delay > 0 {
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
	}
}
