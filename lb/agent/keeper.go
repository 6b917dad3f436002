package agent

import (
	"context"
	"sync"
	"time"
)

// keepInterval is the time between attempts to write data that could not be written.
const keepInterval = time.Second

// keeper writes data that outlives the agent. If a write fails, for example because the disk is full, the status shows
// a problem, and keeper retries until the data is written or replaced.
type keeper struct {
	part     string // name of the problem
	problems *problems
	interval time.Duration
	failed   chan struct{} // a write is pending

	mu    sync.Mutex   // guards write; held during it, so that an older value does not replace a newer one
	write func() error // pending, or nil
}

func newKeeper(part string, p *problems) *keeper {
	return &keeper{part: part, problems: p, interval: keepInterval, failed: make(chan struct{}, 1)}
}

// save calls write. If that fails, run retries. save replaces a pending write.
func (k *keeper) save(write func() error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.write = write
	k.try()
}

// try calls the pending write; k.mu is held.
func (k *keeper) try() {
	if k.write == nil {
		return
	}
	err := k.write()
	k.problems.set(k.part, err)
	if err == nil {
		k.write = nil
		return
	}
	select {
	case k.failed <- struct{}{}:
	default:
	}
}

// run retries until ctx ends, and then once more.
func (k *keeper) run(ctx context.Context) error {
	for ended := false; !ended; {
		select {
		case <-ctx.Done():
		case <-k.failed:
			select {
			case <-ctx.Done():
			case <-time.After(k.interval):
			}
		}
		ended = ctx.Err() != nil
		k.mu.Lock()
		k.try()
		k.mu.Unlock()
	}
	return nil
}
