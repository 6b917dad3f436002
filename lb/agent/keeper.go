package agent

import (
	"context"
	"sync"
	"time"
)

// keepInterval is the time between two attempts to write what could not be written.
const keepInterval = time.Second

// keeper writes what is to outlive the agent. What cannot be written, for example to a full disk, is a problem in the
// status, and is tried again until it is written or replaced.
type keeper struct {
	part     string // of the problem
	problems *problems
	interval time.Duration

	mu    sync.Mutex   // guards write; held during it, so that an older value does not replace a newer one
	write func() error // what is still to be written; nil: nothing
}

func newKeeper(part string, p *problems) *keeper {
	return &keeper{part: part, problems: p, interval: keepInterval}
}

// save calls write, and again after each failure while run runs. It replaces what is still to be written.
func (k *keeper) save(write func() error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.write = write
	k.try()
}

// try writes what is to be written; k.mu is held.
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

// run tries again until ctx ends, and a last time then.
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
