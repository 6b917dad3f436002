package bgp

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func announce(pairs ...any) (list []lb.Announcement) {
	for i := 0; i < len(pairs); i += 2 {
		a, _ := netip.ParseAddr(pairs[i].(string))
		list = append(list, lb.Announcement{VIP: a, Weight: pairs[i+1].(int)})
	}
	return list
}

func TestRoutesFor(t *testing.T) {
	bad := func(vips ...string) string {
		var lines []string
		for _, v := range vips {
			lines = append(lines, v+": not a global unicast address")
		}
		return strings.Join(lines, "; ")
	}
	for _, row := range []struct {
		name   string
		v4, v6 int
		in     []lb.Announcement
		want   map[string]int
		err    string
	}{
		{"nothing", 32, 128, nil, map[string]int{}, ""},
		{"hosts", 32, 128, announce("203.0.113.1", 2, "2001:db8::1", 3),
			map[string]int{"203.0.113.1/32": 2, "2001:db8::1/128": 3}, ""},
		{"mapped and zoned", 32, 128, announce("::ffff:203.0.113.1", 1, "2001:db8::1%eth0", 1),
			map[string]int{"203.0.113.1/32": 1, "2001:db8::1/128": 1}, ""},
		{"a weight below one counts as one", 32, 128, announce("203.0.113.1", 0),
			map[string]int{"203.0.113.1/32": 1}, ""},
		{"weights add up", 24, 64,
			announce("203.0.113.1", 2, "203.0.113.2", 3, "2001:db8::1", 1, "2001:db8::2", 1),
			map[string]int{"203.0.113.0/24": 5, "2001:db8::/64": 2}, ""},
		{"addresses that cannot be routed", 32, 128,
			announce("", 1, "0.0.0.0", 1, "127.0.0.1", 1, "224.0.0.1", 1, "fe80::1", 1, "::", 1, "255.255.255.255", 1,
				"203.0.113.1", 1),
			map[string]int{"203.0.113.1/32": 1},
			bad("invalid IP", "0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "::", "fe80::1")},
	} {
		t.Run(row.name, func(t *testing.T) {
			o := Options{AggregateV4: row.v4, AggregateV6: row.v6, Weighted: lb.WeightedAlways}
			routes, err := o.routesFor(row.in)
			got := map[string]int{}
			for p, w := range routes {
				got[p.String()] = w
			}
			must.Equal(t, row.want, got)
			if text := errText(err.OrNil()); text != row.err {
				t.Errorf("error\n%s\nwant\n%s", text, row.err)
			}
		})
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestChanges(t *testing.T) {
	p := netip.MustParsePrefix
	from := routes{p("203.0.113.1/32"): 1, p("203.0.113.2/32"): 1, p("203.0.113.3/32"): 1}
	to := routes{p("203.0.113.0/32"): 1, p("203.0.113.2/32"): 2, p("203.0.113.3/32"): 1}
	want := []change{{p("203.0.113.1/32"), 0}, {p("203.0.113.0/32"), 1}, {p("203.0.113.2/32"), 2}}
	if got := changes(from, to); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

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
