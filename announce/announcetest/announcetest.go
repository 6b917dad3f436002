// Package announcetest is the conformance suite for announcers: it checks the guarantees of package announce from a
// neighbour's point of view.
package announcetest

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// timeout limits the time until a neighbour sees a change.
const timeout = time.Minute

type Announcer interface {
	lb.Announcer
	Run(ctx context.Context) error
}

type Bench struct {
	Announcer Announcer
	// Seen returns the VIPs that the neighbour can currently reach through the announcer, in any order. Tests poll it,
	// so it must not cache.
	Seen func() []netip.Addr
	// VIPs are at least three addresses that may be announced.
	VIPs []netip.Addr
	// Bad is an address that can never be announced.
	Bad netip.Addr
}

// Run tests announcers from newBench, one per subtest. newBench may call the subtest's Parallel.
func Run(t *testing.T, newBench func(*testing.T) *Bench) {
	t.Run("set", func(t *testing.T) { testSet(t, newBench(t)) })
	t.Run("nothing before the first set", func(t *testing.T) { testNothingBeforeSet(t, newBench(t)) })
	t.Run("set before run", func(t *testing.T) { testSetBeforeRun(t, newBench(t)) })
	t.Run("unchanged VIPs are never withdrawn", func(t *testing.T) { testUnchanged(t, newBench(t)) })
	t.Run("bad announcement", func(t *testing.T) { testBad(t, newBench(t)) })
	t.Run("cancelled set", func(t *testing.T) { testCancelled(t, newBench(t)) })
	t.Run("run ends", func(t *testing.T) { testRunEnds(t, newBench(t)) })
}

func testSet(t *testing.T, b *Bench) {
	start(t, b)
	for _, n := range []int{1, 3, 3, 2, 0, 0, 2} {
		b.set(t, b.VIPs[:n]...)
		b.await(t, b.VIPs[:n]...)
	}
}

func testNothingBeforeSet(t *testing.T, b *Bench) {
	start(t, b)
	for range 20 {
		if seen := b.Seen(); len(seen) != 0 {
			t.Fatalf("before any Set, %v is announced", seen)
		}
	}
	b.set(t, b.VIPs[0])
	b.await(t, b.VIPs[0])
}

func testSetBeforeRun(t *testing.T, b *Bench) {
	b.set(t, b.VIPs[0])
	b.set(t, b.VIPs[:2]...)
	start(t, b)
	b.await(t, b.VIPs[:2]...)
}

func testUnchanged(t *testing.T, b *Bench) {
	start(t, b)
	b.set(t, b.VIPs[0])
	b.await(t, b.VIPs[0])
	for i := range 20 {
		b.set(t, b.VIPs[:1+i%3]...)
		if seen := b.Seen(); !slices.Contains(seen, b.VIPs[0]) {
			t.Fatalf("round %d: %v was withdrawn, only %v is announced", i, b.VIPs[0], seen)
		}
	}
}

func testBad(t *testing.T, b *Bench) {
	start(t, b)
	list := append(announcements(b.VIPs[:2]), lb.Announcement{VIP: b.Bad, Weight: 1})
	err := b.Announcer.Set(t.Context(), list)
	if err == nil || !strings.Contains(err.Error(), b.Bad.String()) {
		t.Errorf("error %v does not name %v", err, b.Bad)
	}
	b.await(t, b.VIPs[:2]...)
	b.set(t, b.VIPs[0])
	b.await(t, b.VIPs[0])
}

// A cancelled Set does not keep the next one from taking full effect.
func testCancelled(t *testing.T, b *Bench) {
	start(t, b)
	b.set(t, b.VIPs[:2]...)
	b.await(t, b.VIPs[:2]...)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_ = b.Announcer.Set(ctx, announcements(b.VIPs[2:3])) // may or may not fail
	b.set(t, b.VIPs[:1]...)
	b.await(t, b.VIPs[:1]...)
}

func testRunEnds(t *testing.T, b *Bench) {
	stop := start(t, b)
	b.set(t, b.VIPs...)
	b.await(t, b.VIPs...)
	b.set(t)
	b.await(t)
	stop()
	b.await(t)
}

// start runs the announcer. stop, or the end of the test, stops it and checks that Run returns nil.
func start(t *testing.T, b *Bench) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- b.Announcer.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("Run returned %v, want nil", err)
			}
		case <-time.After(timeout):
			t.Errorf("Run has not returned %v after its context ended", timeout)
		}
	}
	t.Cleanup(stop)
	return stop
}

func (b *Bench) set(t *testing.T, vips ...netip.Addr) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	if err := b.Announcer.Set(ctx, announcements(vips)); err != nil {
		t.Fatalf("Set(%v): %v", vips, err)
	}
}

// await waits until the neighbour sees exactly vips.
func (b *Bench) await(t *testing.T, vips ...netip.Addr) {
	t.Helper()
	want := sorted(vips)
	var seen string
	for deadline := time.Now().Add(timeout); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if seen = sorted(b.Seen()); seen == want {
			return
		}
	}
	t.Fatalf("the neighbour sees %s after %v, want %s", seen, timeout, want)
}

func sorted(vips []netip.Addr) string {
	return fmt.Sprint(slices.SortedFunc(slices.Values(vips), netip.Addr.Compare))
}

func announcements(vips []netip.Addr) []lb.Announcement {
	list := make([]lb.Announcement, len(vips))
	for i, v := range vips {
		list[i] = lb.Announcement{VIP: v, Weight: 1}
	}
	return list
}
