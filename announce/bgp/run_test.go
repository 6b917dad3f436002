package bgp

import (
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// refreshNextHops replaces next hops that differ from those that the addresses of this node give. A lost next hop ends
// the session; a session over IPv6 that is its own next hop for both families needs no refresh.
func TestRefreshNextHops(t *testing.T) {
	v6, other := netip.MustParseAddr("2001:db8::11"), netip.MustParseAddr("2001:db8::12")
	unknown := netip.MustParseAddr("192.0.2.77")
	const none = "IPv6 routes are not sent: no IPv6 next hop, lo has no global IPv6 address"
	for _, row := range []struct {
		name          string
		option, local netip.Addr
		before, after nextHops
		peers         int // in gobgp, after
	}{
		{"the same", v6, netip.Addr{}, nextHops{session4: true, addr6: v6}, nextHops{session4: true, addr6: v6}, 1},
		{"changed", v6, netip.Addr{}, nextHops{session4: true, addr6: other}, nextHops{session4: true, addr6: v6}, 1},
		{"gained", v6, netip.Addr{}, nextHops{session4: true, reason6: none}, nextHops{session4: true, addr6: v6}, 1},
		{"lost", netip.Addr{}, netip.Addr{}, nextHops{session4: true, addr6: v6},
			nextHops{session4: true, reason6: none}, 0},
		{"of the session", netip.Addr{}, unknown, nextHops{session4: true},
			nextHops{session4: true, reason6: "IPv6 routes are not sent: no interface has 192.0.2.77"}, 1},
		{"both from the session", v6, netip.Addr{}, nextHops{session4: true, session6: true},
			nextHops{session4: true, session6: true}, 1},
	} {
		s, srv, p := running(t)
		p.addAt = time.Now()
		s.addDue(t.Context(), srv)
		s.o.NextHopV6, p.local, p.nextHops = row.option, row.local, row.before
		if row.local.IsValid() {
			p.state, p.has4, p.has6 = stateEstablished, true, true
		}
		s.refreshNextHops(t.Context(), srv)
		if n := peerCount(t, srv); p.nextHops != row.after || n != row.peers || p.addAt.IsZero() != (n == 1) {
			t.Errorf("%s: %d peers, next hops %+v, want %d, %+v", row.name, n, p.nextHops, row.peers, row.after)
		}
		if tracked := s.withdrawals.pending[p.peer.Address] != nil; tracked != row.local.IsValid() {
			t.Errorf("%s: withdrawals are tracked: %t", row.name, tracked)
		}
	}
}

// close waits until the sessions have ended, 3 s at most, and then no session has a route.
func TestClose(t *testing.T) {
	for _, row := range []struct {
		name  string
		state string
		ends  time.Duration // 0: the peer does not end the session
		took  time.Duration
	}{
		{"no session", "active", 0, 0},
		{"ended", stateEstablished, time.Second, time.Second},
		{"not ended", stateEstablished, 0, 3 * time.Second},
	} {
		synctest.Test(t, func(t *testing.T) {
			s, p, srv := withServer(t, new(strings.Builder))
			defer srv.stop()
			if err := s.Set(t.Context(), announce("203.0.113.1", 1, "2001:db8::1", 1)); err != nil {
				t.Fatal(err)
			}
			peer := p.peer.Address
			p.state, p.has4, p.has6, p.addAt = row.state, true, true, time.Now().Add(time.Hour)
			s.withdrawals.peerUp(peer, netip.Addr.Is4)
			if row.ends > 0 {
				time.AfterFunc(row.ends, func() {
					s.mail.post(peerEvent{peer: peer, kind: eventState, old: stateEstablished, new: "idle"})
				})
			}
			began := time.Now()
			s.close(srv)
			if took := time.Since(began); took != row.took {
				t.Errorf("%s: close took %s, want %s", row.name, took, row.took)
			}
			if p.state != "idle" || p.has4 || p.has6 || !p.addAt.IsZero() || s.withdrawals.pending[peer] != nil {
				t.Errorf("%s: session %+v", row.name, p)
			}
			if s.server != nil || len(s.installed) != 0 || s.v4 != 0 || s.v6 != 0 {
				t.Errorf("%s: %d installed routes, %d IPv4, %d IPv6", row.name, len(s.installed), s.v4, s.v6)
			}
		})
	}
}
