package agent

import (
	"context"
	"sync"
	"time"
)

// keepInterval is the time between attempts to write data that could not be written.
const keepInterval = time.Second

// keeper writes data that outlives the agent. Data that cannot be written, for example because the disk is full, is a
// problem in the status, and keeper retries until it is written or replaced.
type keeper struct {
	part     string // name of the problem
	problems *problems
	interval time.Duration

	mu    sync.Mutex   // guards write; held during it, so that an older value does not replace a newer one
	write func() error // still to be done; may be nil
}

func newKeeper(part string, p *problems) *keeper {
	return &keeper{part: part, problems: p, interval: keepInterval}
}

// save calls write, and calls it again after each failure while run runs. It replaces a write that is still to be done.
func (k *keeper) save(write func() error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.write = write
	k.try()
}

// try writes what is still to be written; k.mu is held.
func (k *keeper) try() {
	if k.write == nil {
		return
	}
	err := k.write()
	if err == nil {
		k.write = nil
	}
	k.problems.set(k.part, err)
}

// run retries until ctx ends, and once more then.
func (k *keeper) run(ctx context.Context) error {
	tick := time.NewTicker(k.interval)
	defer tick.Stop()
	for ended := false; !ended; {
		select {
		case <-ctx.Done():
			ended = true
		case <-tick.C:
		}
		k.mu.Lock()
		k.try()
		k.mu.Unlock()
	}
	return nil
}
