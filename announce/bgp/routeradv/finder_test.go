package routeradv

import (
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mdlayher/ndp"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"golang.org/x/net/ipv6"
)

// Several routers on a link take turns until one is in use. Silent routers have no turns.
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
			must.True(t, slices.Equal(found, want), "%s: found %v; want %v", name, found, want)
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

// Any number of routers all have turns, but at most maxCandidates are candidates.
func TestManyRouters(t *testing.T) {
	now := time.Now()
	var c candidates
	for i := range 1000 {
		first := c.hear(router(i), now)
		must.Need(t, first == (i == 0), "router %d: first: %t", i, first)
	}
	must.Need(t, len(c.all) == maxCandidates, "%d candidates", len(c.all))
	now = now.Add(silence)
	c.hear(router(3000), now)
	must.True(t, c.all[router(3000)] != nil, "no place although all are silent")
	must.Row(t, "next is", router(3000), c.next(false, now))
}

// flood simulates turns, in each of which the forged addresses are heard twice and the router last. It returns the
// router's turns.
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

// A host that constantly advertises many addresses cannot keep out a router that was never in use: the router has its
// share of turns.
func TestFloodOfRouters(t *testing.T) {
	same := func(_, i int) netip.Addr { return router(1 + i) }
	const few, many, turns = 32, 100, 2000
	its := flood(&candidates{}, time.Now(), 4*few, same, few)
	must.True(t, len(its) >= 3 && its[0] <= few, "of %d addresses, it has the turns %v", few+1, its)
	// On average, each has a 101st of the turns, about 20.
	its = flood(&candidates{}, time.Now(), turns, same, many)
	must.True(t, len(its) >= 3 && len(its) <= 60, "of %d addresses, it has %d of %d turns", many+1, len(its), turns)
}

// The last router in use has every second turn, whoever else advertises and however long ago its last turn began.
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
	its := flood(&c, now, 100, fresh, 1000)
	must.True(t, len(its) == 50 && its[0] == 1, "it has the turns %v", its)
}

func router(n int) netip.Addr {
	return netip.MustParseAddr(fmt.Sprintf("fe80::%x:%x%%eth0", (n+1)>>16, (n+1)&0xffff))
}

// A missing interface is reported as the problem and tried again.
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
		must.Need(t, time.Now().Before(end), "the problem is %q", f.Problem("none0"))
	}
}

// fuzzConn has messages, each preceded by its length, the sender's last byte, its hop limit and its interface.
type fuzzConn struct {
	b       []byte
	hear    func(from netip.Addr) // called for each valid advertisement
	between func()
}

func (c *fuzzConn) ReadFrom() (ndp.Message, *ipv6.ControlMessage, netip.Addr, error) {
	for len(c.b) >= 4 {
		c.between()
		n, cm := min(int(c.b[0]), len(c.b)-4), &ipv6.ControlMessage{HopLimit: int(c.b[2]), IfIndex: int(c.b[3] % 4)}
		from := netip.AddrFrom16([16]byte{0: 0xfe, 1: 0x80, 15: c.b[1]})
		if c.b[3] > 250 {
			from = netip.AddrFrom16([16]byte{0: 0x20, 1: 1, 15: c.b[1]})
		}
		m, err := ndp.ParseMessage(c.b[4 : 4+n])
		c.b = c.b[4+n:]
		if err != nil {
			continue // like an *ndp.Conn
		}
		_, advertises := m.(*ndp.RouterAdvertisement)
		if advertises && cm.HopLimit == 255 && cm.IfIndex == 1 && from.IsLinkLocalUnicast() {
			c.hear(from)
		}
		if len(c.b)%7 == 0 {
			cm = nil
		}
		return m, cm, from, nil
	}
	return nil, nil, netip.Addr{}, os.ErrClosed
}

// Every router has sent a valid advertisement over the link, and there are never more than maxCandidates.
func FuzzAdvertisements(f *testing.F) {
	advertisement, err := ndp.MarshalMessage(&ndp.RouterAdvertisement{RouterLifetime: time.Hour, Options: []ndp.Option{
		&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: []byte{2, 0, 0, 0, 0, 1}}, ndp.NewMTU(1500),
	}})
	must.Do(f, err)
	message := func(from, hops, index byte) []byte {
		return append([]byte{byte(len(advertisement)), from, hops, index}, advertisement...)
	}
	seed := append(message(1, 255, 1), message(2, 64, 1)...)
	f.Add(append(seed, message(3, 255, 253)...))
	var flood []byte
	for from := range 100 {
		flood = append(flood, message(byte(from), 255, 1)...)
	}
	f.Add(flood)
	f.Fuzz(func(t *testing.T, b []byte) {
		heard := map[netip.Addr]bool{}
		found := func(_ string, router netip.Addr) {
			must.True(t, heard[router], "%v has sent no valid advertisement", router)
		}
		l := &link{name: "eth0", o: &Options{Log: slog.New(slog.DiscardHandler), Found: found}}
		conn := &fuzzConn{b: b, hear: func(from netip.Addr) { heard[from] = true }, between: func() { l.turn() }}
		err := l.receive(conn, 1, make(chan struct{}, 1))
		must.True(t, err != nil && len(l.candidates.all) <= maxCandidates, "%v, %d", err, len(l.candidates.all))
	})
}
