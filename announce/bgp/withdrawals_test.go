package bgp

import (
	"context"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/osrg/gobgp/v3/pkg/log"
	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// Pending are the withdrawals of peers that have a session and carry that family.
func TestWithdrawalTracker(t *testing.T) {
	v4, v6 := netip.MustParsePrefix("203.0.113.1/32"), netip.MustParsePrefix("2001:db8::1/128")
	all, only4 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.5")
	withdraw4 := log.Fields{"withdrawals": []*bgp.IPAddrPrefix{bgp.NewIPAddrPrefix(32, "203.0.113.1")}}
	withdraw6 := log.Fields{"attributes": []bgp.PathAttributeInterface{
		bgp.NewPathAttributeMpUnreachNLRI([]bgp.AddrPrefixInterface{bgp.NewIPv6AddrPrefix(128, "2001:db8::1")})}}
	announcement := log.Fields{"nlri": []*bgp.IPAddrPrefix{bgp.NewIPAddrPrefix(32, "203.0.113.2")}}
	announcement6 := log.Fields{"attributes": []bgp.PathAttributeInterface{bgp.NewPathAttributeOrigin(0)}}
	endOfRIB6 := log.Fields{"attributes": []bgp.PathAttributeInterface{bgp.NewPathAttributeMpUnreachNLRI(nil)}}
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
			w.updateSent(all, announcement)
			w.updateSent(only4, announcement)
		}, 3},
		{"withdrawn from one peer", func(w *withdrawalTracker) {
			w.updateSent(all, withdraw4)
			w.updateSent(all, withdraw6)
		}, 1},
		{"withdrawn from both", func(w *withdrawalTracker) {
			w.updateSent(all, withdraw4)
			w.updateSent(all, withdraw6)
			w.updateSent(only4, withdraw4)
		}, 0},
		{"one session lost", func(w *withdrawalTracker) {
			w.updateSent(all, withdraw4)
			w.updateSent(all, withdraw6)
			w.peerDown(only4)
		}, 0},
		{"End-of-RIB", func(w *withdrawalTracker) {
			w.updateSent(all, log.Fields{})
			w.updateSent(only4, log.Fields{})
		}, 0},
		{"End-of-RIB, IPv6", func(w *withdrawalTracker) {
			w.updateSent(all, endOfRIB6)
			w.peerDown(only4)
		}, 0},
		{"announced IPv6 route", func(w *withdrawalTracker) { w.updateSent(all, announcement6) }, 3},
		{"session up again", func(w *withdrawalTracker) {
			w.peerUp(all, func(netip.Addr) bool { return true })
			w.updateSent(unknown, withdraw4)
		}, 3},
	} {
		t.Run(row.name, func(t *testing.T) {
			w := newWithdrawalTracker()
			w.peerUp(all, func(netip.Addr) bool { return true })
			w.peerUp(only4, netip.Addr.Is4)
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

// wait returns as soon as the last withdrawal is written, and reports what is pending when its context ends.
func TestWithdrawalTrackerWait(t *testing.T) {
	peer, prefix := netip.MustParseAddr("192.0.2.1"), netip.MustParsePrefix("203.0.113.1/32")
	written := log.Fields{"withdrawals": []*bgp.IPAddrPrefix{bgp.NewIPAddrPrefix(32, "203.0.113.1")}}
	for _, row := range []struct {
		name  string
		event func(w *withdrawalTracker)
		took  time.Duration
		left  int
	}{
		{"written", func(w *withdrawalTracker) { w.updateSent(peer, written) }, time.Second, 0},
		{"session lost", func(w *withdrawalTracker) { w.peerDown(peer) }, time.Second, 0},
		{"neither", func(*withdrawalTracker) {}, time.Minute, 1},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newWithdrawalTracker()
			w.peerUp(peer, netip.Addr.Is4)
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
