package bgp

import (
	"context"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Withdrawals are pending only for peers that have a session and carry the family.
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
	type updates map[netip.Addr][]*guard.Update
	writes := func(to updates) func(w *withdrawalTracker) {
		return func(w *withdrawalTracker) {
			for peer, list := range to {
				for _, u := range list {
					w.sent(peer, u)
				}
			}
		}
	}
	for _, row := range []struct {
		name string
		do   func(w *withdrawalTracker)
		left int // 0 if wait returns before its context ends
	}{
		{"no UPDATE", func(*withdrawalTracker) {}, 3},
		{"UPDATE without withdrawals", writes(updates{all: {announcement}, only4: {announcement}}), 3},
		{"withdrawn from one peer", writes(updates{all: {withdraw4, withdraw6}}), 1},
		{"withdrawn from both", writes(updates{all: {withdraw4, withdraw6}, only4: {withdraw4}}), 0},
		{"one session lost", func(w *withdrawalTracker) {
			writes(updates{all: {withdraw4, withdraw6}})(w)
			w.peerDown(only4)
		}, 0},
		{"End-of-RIB", writes(updates{all: {endOfRIB4, endOfRIB6}, only4: {endOfRIB4}}), 0},
		{"End-of-RIB of one family", func(w *withdrawalTracker) {
			w.sent(all, endOfRIB6)
			w.peerDown(only4)
		}, 1},
		{"End-of-RIB after the route", writes(updates{all: {same, endOfRIB4, endOfRIB6}, only4: {endOfRIB4}}), 1},
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
			must.Row(t, "withdrawals left", row.left, w.count())
			must.Row(t, "wait returned", row.left, w.wait(ctx))
			must.Row(t, "withdrawals left after wait", 0, w.count())
		})
	}
}

// routes returns the number of routes written and not withdrawn.
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
		w.sent(peer, &row.u)
		must.Row(t, row.u, row.want, w.routes(peer))
	}
	w.peerDown(peer)
	must.Row(t, "without a session", 0, w.routes(peer))
}

// wait returns when the last withdrawal is written, or reports what is pending when its context ends.
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
			must.Row(t, row.name, row.left, w.wait(ctx))
			must.Row(t, row.name, row.took, time.Since(began))
		})
	}
}

func isIPv4(p netip.Prefix) bool { return p.Addr().Is4() }

// A route is lowered while none of its addresses is announced normally.
func TestLoweredRoutes(t *testing.T) {
	o := Options{AggregateV4: 24, AggregateV6: 128, LocalPref: 100, Weighted: lb.WeightedAlways}
	o.Communities = []uint32{1}
	a, b := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")
	prefix := netip.MustParsePrefix("203.0.113.0/24")
	for which, want := range map[[2]bool]int{
		{true, true}: lowered, {true, false}: 3, {false, true}: 2, {false, false}: 5,
	} {
		got, refused := o.routesFor([]lb.Announcement{
			{VIP: a, Weight: 2, LowerPreference: which[0]}, {VIP: b, Weight: 3, LowerPreference: which[1]},
		})
		must.True(t, len(refused) == 0 && got[prefix] == want, "%v: %v, %v; want %d", which, got, refused, want)
	}
	gone := netip.MustParsePrefix("198.51.100.0/24")
	got := changes(routes{prefix: 5, gone: 1}, routes{prefix: lowered})
	must.Row(t, "changes", []change{{gone, 0}, {prefix, lowered}}, got)
	must.Row(t, "without a change", nil, changes(routes{prefix: lowered}, routes{prefix: lowered}))
	var types []bgp.BGPAttrType
	for _, x := range o.attributes(prefix, lowered) {
		types = append(types, x.GetType())
		switch x := x.(type) {
		case *bgp.PathAttributeLocalPref:
			must.Row(t, "LOCAL_PREF", 0, x.Value)
		case *bgp.PathAttributeMultiExitDisc:
			must.Row(t, "MED", lowestMED, x.Value)
		case *bgp.PathAttributeCommunities:
			must.Row(t, "communities", []uint32{1, gracefulShutdown}, x.Value)
		}
	}
	must.True(t, len(types) == 3 && len(o.Communities) == 1,
		"attributes %v, communities of the configuration %x", types, o.Communities)
}
