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
		step("every second turn is its own when it ends", 4*turn+time.Second, all, third, first, second, first)
		step("although it is silent", 4*turn, all[1:], third, first, second, first)
		step("the other silent ones have some until a minute is over", time.Minute, all[:1], third, first, second)
		step("then none", time.Hour, all[:1], first)
		step("and it has them as long as it is silent itself", 3*turn, all[1:2], second, first, second)
	})
}

// All of many routers have their turns, and there are no more of them than places.
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
	now = now.Add(silence)
	if c.hear(router(3000), now); c.all[router(3000)] == nil {
		t.Error("no place although all are silent")
	}
	if next := c.next(false, now); next != router(3000) {
		t.Errorf("next is %s", next)
	}
}

// flood passes turns, in each of which forged addresses are heard twice and the router last, and returns which of them
// the router has.
func flood(c *candidates, now time.Time, turns int, forged func(turn, i int) netip.Addr, n int) (its []int) {
	for i := range turns {
		for range 2 {
			for k := range n {
				c.hear(forged(i, k), now)
			}
		}
		c.hear(router(0), now)
		now = now.Add(turn)
		if c.next(false, now) == router(0) {
			its = append(its, i)
		}
	}
	return its
}

// A host that advertises many addresses, all the time, does not keep a router out that was never in use: it has its
// share of the turns.
func TestFloodOfRouters(t *testing.T) {
	same := func(_, i int) netip.Addr { return router(1 + i) }
	const few, many, turns = 32, 100, 2000
	its := flood(&candidates{}, time.Now(), 4*few, same, few)
	if len(its) < 3 || its[0] > few {
		t.Errorf("of %d addresses, it has the turns %v", few+1, its)
	}
	// Each has a 101st of them on average: about 20.
	if its := flood(&candidates{}, time.Now(), turns, same, many); len(its) < 3 || len(its) > 60 {
		t.Errorf("of %d addresses, it has %d of %d turns", many+1, len(its), turns)
	}
}

// The router that was in use last has every second turn, whoever else advertises, and although its last turn began long
// ago.
func TestFloodAfterUse(t *testing.T) {
	now := time.Now()
	var c candidates
	c.hear(router(0), now)
	for range 3600 {
		now = now.Add(time.Second)
		c.hear(router(1), now)
		c.next(true, now)
	}
	fresh := func(turn, i int) netip.Addr { return router(1 + 1000*turn + i) }
	if its := flood(&c, now, 100, fresh, 1000); len(its) != 50 || its[0] != 1 {
		t.Errorf("it has the turns %v", its)
	}
}

func router(n int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("fe80::%x:%x%%eth0", (n+1)>>16, (n+1)&0xffff))
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
