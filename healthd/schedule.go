package healthd

import (
	"context"
	"hash/fnv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// phaseOf derives a check's position within its interval, in [0, 1), from its key.
func phaseOf(k lb.CheckKey) float64 {
	h := fnv.New64a()
	h.Write([]byte(k.Service))
	h.Write([]byte(k.Backend.String()))
	h.Write([]byte(k.Port.Name()))
	// The upper bits of FNV hardly depend on the last bytes. Multiplication mixes the bits (Knuth, 6.4).
	return float64(h.Sum64()*0x9e3779b97f4a7c15>>11) / (1 << 53)
}

// slotAfter returns the next probe start after t. Starts are whole intervals apart, at the check's phase in intervals
// counted from epoch. So checks with the same interval stay spread over it, whenever they were added and however long
// probes take.
func slotAfter(t, epoch time.Time, phase float64, interval time.Duration) time.Time {
	first := epoch.Add(time.Duration(phase*float64(interval)) - interval) // not after t
	return first.Add((t.Sub(first)/interval + 1) * interval)
}

// firstWindow returns the time over which the first probes are spread: a tenth of the interval or 200 ms, whichever is
// shorter, but at least 100 µs per check.
func (p *Prober) firstWindow(interval time.Duration) time.Duration {
	p.mu.Lock()
	load := time.Duration(p.count) * 100 * time.Microsecond
	p.mu.Unlock()
	return min(interval, max(interval/10, load), max(200*time.Millisecond, load))
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

// maxProbes returns how many probes may run concurrently: half of the process's descriptor limit.
func maxProbes() int {
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return 512
	}
	return int(min(max(files.Cur/2, 16), 32768))
}

// slots limits how many probes run concurrently. Probes of unresponsive backends last until their timeout, so checks
// whose last probe failed may use only half of the slots.
type slots struct{ healthy, failing chan struct{} }

func newSlots(n int) slots {
	return slots{make(chan struct{}, n-n/2), make(chan struct{}, n/2)}
}

// take waits for a slot. It returns a function that releases the slot, or false if ctx ends first.
func (s slots) take(ctx context.Context, failing bool) (release func(), ok bool) {
	healthy := s.healthy
	if failing {
		healthy = nil // never ready
	}
	select {
	case healthy <- struct{}{}:
		return func() { <-s.healthy }, true
	case s.failing <- struct{}{}:
		return func() { <-s.failing }, true
	case <-ctx.Done():
		return nil, false
	}
}
