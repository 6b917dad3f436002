package healthd

import (
	"context"
	"hash/fnv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// phaseOf returns the position of a check in its interval, in [0, 1), derived from its key.
func phaseOf(k lb.CheckKey) float64 {
	h := fnv.New64a()
	h.Write([]byte(k.Service))
	h.Write([]byte(k.Backend.String()))
	h.Write([]byte(k.Port.Name()))
	// The upper bits of FNV hardly depend on the last bytes. Multiplication mixes them (Knuth, 6.4).
	return float64(h.Sum64()*0x9e3779b97f4a7c15>>11) / (1 << 53)
}

// slotAfter returns the first probe start after t. Probes start a whole number of intervals after the check's phase in
// the interval that begins at epoch. So checks with the same interval always stay spread over it, whenever they were
// added and however long their probes take.
func slotAfter(t, epoch time.Time, phase float64, interval time.Duration) time.Time {
	first := epoch.Add(time.Duration(phase*float64(interval)) - interval) // not after t
	return first.Add((t.Sub(first)/interval + 1) * interval)
}

// firstWindow returns the time over which the checks' first probes are spread: a tenth of the interval, at most 200 ms,
// but at least 100 µs per check.
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

// maxProbes returns how many probes may run at once: half of the process's descriptor limit.
func maxProbes() int {
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return 512
	}
	return int(min(max(files.Cur/2, 16), 32768))
}

// slots limits the probes that run at once. Probes of unresponsive backends last until their timeout. Checks whose last
// probe failed may use only half of the slots, so that they do not delay the others.
type slots struct{ healthy, failing chan struct{} }

func newSlots(n int) slots {
	return slots{make(chan struct{}, n-n/2), make(chan struct{}, n/2)}
}

// take waits for a slot. It returns a function that releases the slot, or false if ctx has ended.
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
