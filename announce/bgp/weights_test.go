package bgp

import (
	"maps"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// A router that gets another weight moves flows between nodes, so by default an address has one only if its connections
// survive that.
func TestWhichRoutesHaveWeights(t *testing.T) {
	nat, moves := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")
	announcements := []lb.Announcement{{VIP: nat, Weight: 2}, {VIP: moves, Weight: 3, Movable: true}}
	for _, tt := range []struct {
		weighted   lb.Weighted
		nat, moves int
		both       int // of the prefix of both
	}{
		{lb.WeightedNever, unweighted, unweighted, unweighted},
		{lb.WeightedMovable, unweighted, 3, unweighted},
		{lb.WeightedAlways, 2, 3, 5},
	} {
		o := Options{Weighted: tt.weighted, AggregateV4: 32, AggregateV6: 128}
		got, _ := o.routesFor(announcements)
		if n, m := got[o.prefixOf(nat)], got[o.prefixOf(moves)]; n != tt.nat || m != tt.moves {
			t.Errorf("%v: weights %d and %d; want %d and %d", tt.weighted, n, m, tt.nat, tt.moves)
		}
		o.AggregateV4 = 24
		if got, _ := o.routesFor(announcements); got[o.prefixOf(nat)] != tt.both {
			t.Errorf("%v: the prefix of both has %d; want %d", tt.weighted, got[o.prefixOf(nat)], tt.both)
		}
		if n := len(o.attributes(o.prefixOf(nat), unweighted)); n != 1 {
			t.Errorf("a route without a weight has %d attributes; want LOCAL_PREF alone", n)
		}
	}
}

// A weight is announced once it has not changed for weightSettles; all else of a route at once.
func TestWeightsSettle(t *testing.T) {
	p, other := netip.MustParsePrefix("203.0.113.1/32"), netip.MustParsePrefix("203.0.113.2/32")
	s, announced, start := settling{}, routes{}, time.Now()
	for _, step := range []struct {
		at           time.Duration
		wanted, want routes
		waiting      int
	}{
		{0, routes{p: 3}, routes{p: 3}, 0},
		{time.Second, routes{p: 2}, routes{p: 3}, 1},
		{20 * time.Second, routes{p: 1}, routes{p: 3}, 1},                     // it changed again
		{40 * time.Second, routes{p: 1, other: 7}, routes{p: 3, other: 7}, 1}, // a new route does not wait
		{50 * time.Second, routes{p: 1, other: 7}, routes{p: 1, other: 7}, 0},
		{51 * time.Second, routes{p: 2, other: 7}, routes{p: 1, other: 7}, 1},
		{60 * time.Second, routes{p: 1, other: 7}, routes{p: 1, other: 7}, 0}, // as announced: no matter
		{70 * time.Second, routes{p: 2, other: lowered}, routes{p: 1, other: lowered}, 1},
		{80 * time.Second, routes{other: lowered}, routes{other: lowered}, 0}, // withdrawn
		{81 * time.Second, routes{other: 9}, routes{other: 9}, 0},
	} {
		announced = s.settle(announced, step.wanted, start.Add(step.at))
		if !maps.Equal(announced, step.want) || len(s) != step.waiting {
			t.Errorf("after %s: %v, %d wait; want %v, %d", step.at, announced, len(s), step.want, step.waiting)
		}
	}
}
