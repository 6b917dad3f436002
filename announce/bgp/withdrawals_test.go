package bgp

import (
	"context"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"github.com/steelyard-lb/steelyard/lb"
)

// Pending are the withdrawals of peers that have a session and carry that family.
func TestWithdrawalTracker(t *testing.T) {
	v4, v6 := netip.MustParsePrefix("203.0.113.1/32"), netip.MustParsePrefix("2001:db8::1/128")
	all, only4 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.5")
	withdraw4 := &guard.Update{Withdrawn: []netip.Prefix{v4}}
	withdraw6 := &guard.Update{Withdrawn: []netip.Prefix{v6}}
	announcement := &guard.Update{Announced: []netip.Prefix{netip.MustParsePrefix("203.0.113.2/32")}}
	same := &guard.Update{Announced: []netip.Prefix{v4}}
	endOfRIB4, endOfRIB6 := &guard.Update{EndOfRIB4: true}, &guard.Update{EndOfRIB6: true}
	unknown := netip.MustParseAddr("192.0.2.9")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for _, row := range []struct {
		name string
		do   func(w *withdrawalTracker)
		left int // 0: wait returns before its context ends
	}{
		{"no UPDATE", func(*withdrawalTracker) {}, 3},
		{"UPDATE without withdrawals", func(w *withdrawalTracker) {
			w.sent(all, announcement)
			w.sent(only4, announcement)
		}, 3},
		{"withdrawn from one peer", func(w *withdrawalTracker) {
			w.sent(all, withdraw4)
			w.sent(all, withdraw6)
		}, 1},
		{"withdrawn from both", func(w *withdrawalTracker) {
			w.sent(all, withdraw4)
			w.sent(all, withdraw6)
			w.sent(only4, withdraw4)
		}, 0},
		{"one session lost", func(w *withdrawalTracker) {
			w.sent(all, withdraw4)
			w.sent(all, withdraw6)
			w.peerDown(only4)
		}, 0},
		{"End-of-RIB", func(w *withdrawalTracker) {
			w.sent(all, endOfRIB4)
			w.sent(all, endOfRIB6)
			w.sent(only4, endOfRIB4)
		}, 0},
		{"End-of-RIB of one family", func(w *withdrawalTracker) {
			w.sent(all, endOfRIB6)
			w.peerDown(only4)
		}, 1},
		{"End-of-RIB after the route", func(w *withdrawalTracker) {
			w.sent(all, same)
			w.sent(all, endOfRIB4)
			w.sent(all, endOfRIB6)
			w.sent(only4, endOfRIB4)
		}, 1},
		{"session up again", func(w *withdrawalTracker) {
			w.peerUp(all, func(netip.Prefix) bool { return true })
			w.sent(unknown, withdraw4)
		}, 3},
	} {
		t.Run(row.name, func(t *testing.T) {
			w := newWithdrawalTracker()
			w.peerUp(all, func(netip.Prefix) bool { return true })
			w.peerUp(only4, isIPv4)
			w.expect([]netip.Prefix{v4, v6})
			row.do(w)
			ctx := ended
			if row.left == 0 {
				ctx = t.Context()
			}
			if left := w.count(); left != row.left {
				t.Errorf("%d withdrawals left, want %d", left, row.left)
			}
			if left := w.wait(ctx); left != row.left {
				t.Errorf("wait returned %d, want %d", left, row.left)
			}
			if left := w.count(); left != 0 {
				t.Errorf("%d withdrawals left after wait", left)
			}
		})
	}
}

// routes is the number of routes that were written and not withdrawn.
func TestRibOut(t *testing.T) {
	peer, w := netip.MustParseAddr("192.0.2.1"), newWithdrawalTracker()
	a, b := netip.MustParsePrefix("203.0.113.1/32"), netip.MustParsePrefix("2001:db8::1/128")
	w.peerUp(peer, func(netip.Prefix) bool { return true })
	for _, row := range []struct {
		u    guard.Update
		want int
	}{
		{guard.Update{Announced: []netip.Prefix{a, b}}, 2}, {guard.Update{Announced: []netip.Prefix{a}}, 2},
		{guard.Update{EndOfRIB4: true}, 2}, {guard.Update{Withdrawn: []netip.Prefix{a}}, 1},
		{guard.Update{Withdrawn: []netip.Prefix{a}}, 1},
	} {
		if w.sent(peer, &row.u); w.routes(peer) != row.want {
			t.Errorf("after %+v: %d routes, want %d", row.u, w.routes(peer), row.want)
		}
	}
	if w.peerDown(peer); w.routes(peer) != 0 {
		t.Errorf("%d routes without a session", w.routes(peer))
	}
}

// wait returns as soon as the last withdrawal is written, and reports what is pending when its context ends.
func TestWithdrawalTrackerWait(t *testing.T) {
	peer, prefix := netip.MustParseAddr("192.0.2.1"), netip.MustParsePrefix("203.0.113.1/32")
	written := &guard.Update{Withdrawn: []netip.Prefix{prefix}}
	for _, row := range []struct {
		name  string
		event func(w *withdrawalTracker)
		took  time.Duration
		left  int
	}{
		{"written", func(w *withdrawalTracker) { w.sent(peer, written) }, time.Second, 0},
		{"session lost", func(w *withdrawalTracker) { w.peerDown(peer) }, time.Second, 0},
		{"neither", func(*withdrawalTracker) {}, time.Minute, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWithdrawalTracker()
			w.peerUp(peer, isIPv4)
			w.expect([]netip.Prefix{prefix})
			time.AfterFunc(time.Second, func() { row.event(w) })
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			began := time.Now()
			left := w.wait(ctx)
			if took := time.Since(began); left != row.left || took != row.took {
				t.Errorf("%s: %d pending after %s, want %d after %s", row.name, left, took, row.left, row.took)
			}
		})
	}
}

func isIPv4(p netip.Prefix) bool { return p.Addr().Is4() }

// A route is lowered while none of its addresses is announced normally.
func TestLoweredRoutes(t *testing.T) {
	o := Options{
		AggregateV4: 24, AggregateV6: 128, LocalPref: 100, Weighted: lb.WeightedAlways, Communities: []uint32{1},
	}
	a, b := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")
	prefix := netip.MustParsePrefix("203.0.113.0/24")
	for _, tt := range []struct {
		lowered [2]bool
		want    int
	}{
		{[2]bool{true, true}, lowered}, {[2]bool{true, false}, 3}, {[2]bool{false, true}, 2},
		{[2]bool{false, false}, 5},
	} {
		got, refused := o.routesFor([]lb.Announcement{
			{VIP: a, Weight: 2, LowerPreference: tt.lowered[0]}, {VIP: b, Weight: 3, LowerPreference: tt.lowered[1]},
		})
		if len(refused) > 0 || got[prefix] != tt.want {
			t.Errorf("%v: %v, %v; want %d", tt.lowered, got, refused, tt.want)
		}
	}
	gone := netip.MustParsePrefix("198.51.100.0/24")
	got := changes(routes{prefix: 5, gone: 1}, routes{prefix: lowered})
	if want := []change{{gone, 0}, {prefix, lowered}}; !slices.Equal(got, want) {
		t.Errorf("changes %v; want %v", got, want)
	}
	if got := changes(routes{prefix: lowered}, routes{prefix: lowered}); len(got) > 0 {
		t.Errorf("changes %v; want none", got)
	}
	var types []bgp.BGPAttrType
	for _, x := range o.attributes(prefix, lowered) {
		types = append(types, x.GetType())
		switch x := x.(type) {
		case *bgp.PathAttributeLocalPref:
			if x.Value != 0 {
				t.Errorf("LOCAL_PREF %d", x.Value)
			}
		case *bgp.PathAttributeMultiExitDisc:
			if x.Value != lowestMED {
				t.Errorf("MED %d", x.Value)
			}
		case *bgp.PathAttributeCommunities:
			if !slices.Equal(x.Value, []uint32{1, gracefulShutdown}) {
				t.Errorf("communities %x", x.Value)
			}
		}
	}
	if len(types) != 3 || len(o.Communities) != 1 {
		t.Errorf("attributes %v, communities of the configuration %x", types, o.Communities)
	}
}
