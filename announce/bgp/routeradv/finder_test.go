package routeradv

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// Of several routers on a link each has its turn, until one is in use; silent ones have none.
func TestRoutersTakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second, third := router(1), router(2), router(3)
		var found []netip.Addr
		var inUse netip.Addr
		l := &link{name: "eth0", o: &Options{
			Found: func(_ string, a netip.Addr) { found = append(found, a) }, Log: slog.New(slog.DiscardHandler),
			InUse: func(a netip.Addr) bool { return a == inUse },
		}}
		step := func(name string, d time.Duration, heard []netip.Addr, want ...netip.Addr) {
			t.Helper()
			found = nil
			for range d / time.Second {
				for _, a := range heard {
					l.hear(a)
				}
				l.turn()
				time.Sleep(time.Second)
			}
			if !slices.Equal(found, want) {
				t.Errorf("%s: found %v; want %v", name, found, want)
			}
		}
		all := []netip.Addr{first, second, third}
		step("one alone", time.Hour, all[:1], first)
		step("another one has a turn, and the first one again", 2*turn, all[:2], second, first)
		step("and a third one", 3*turn, all, third, second, first)
		inUse = first
		step("the first one works", time.Hour, all)
		inUse = netip.Addr{}
		step("the others have their turn when it ends", 2*turn+time.Second, all, third, second)
		step("the silent ones have some until a minute is over", time.Hour, all[:1], first, third, second, first)
	})
}

// Who advertises many addresses must let each of them have its turn.
func TestManyRouters(t *testing.T) {
	now := time.Now()
	var c candidates
	for i := range 1000 {
		if first := c.hear(router(i), now); first != (i == 0) {
			t.Fatalf("router %d: first: %t", i, first)
		}
	}
	if len(c.all) != maxCandidates {
		t.Fatalf("%d candidates", len(c.all))
	}
	for i := range 3 * maxCandidates {
		now = now.Add(turn)
		for a := range c.all {
			c.all[a].heard = now
		}
		if next := c.next(false, now); !next.IsValid() {
			t.Fatalf("turn %d: none", i)
		}
		late := router(2000 + i)
		c.hear(late, now)
		if c.all[late] == nil || len(c.all) != maxCandidates {
			t.Fatalf("turn %d: no place for one more after another had its turn", i)
		}
	}
	now = now.Add(silence)
	if c.hear(router(3000), now); c.all[router(3000)] == nil {
		t.Error("no place although all are silent")
	}
	if next := c.next(false, now); next != router(3000) {
		t.Errorf("next is %s", next)
	}
}

func router(n int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("fe80::%x%%eth0", n+1))
}

// An interface that does not exist is a reason, and is tried again.
func TestMissingInterface(t *testing.T) {
	f := New(Options{Log: slog.New(slog.DiscardHandler)})
	done := make(chan struct{})
	f.SetInterfaces([]string{"none0"})
	go func() {
		f.Run(t.Context())
		close(done)
	}()
	t.Cleanup(func() { <-done })
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if strings.HasPrefix(f.Problem("none0"), "interface none0: ") {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the problem is %q", f.Problem("none0"))
		}
	}
}
