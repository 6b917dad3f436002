package bgp_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
)

// wantRoute waits until the kernel of r has exactly this next hop for a prefix, or none.
func wantRoute(t *testing.T, r *peers.Router, prefix string, via ...netip.Addr) {
	t.Helper()
	if _, err := r.WaitNextHops(t.Context(), timeout, netip.MustParsePrefix(prefix), via...); err != nil {
		t.Fatalf("%s: %v", r.Kind, err)
	}
}

// Each router gets the routes of its pools only. A pool has a prefix of its own length while it has a member. A change
// of the pools of a router takes back what it got before, and interrupts no other route.
func TestPoolsOfPeers(t *testing.T) {
	b := newBench(t)
	first, second := b.router(peers.BIRD, nil), b.router(peers.FRR, nil)
	o := b.options()
	pool := func(name, from, to string) bgp.Pool {
		return bgp.Pool{Name: name, Ranges: []lb.AddrRange{{
			From: netip.MustParseAddr(from), To: netip.MustParseAddr(to),
		}}}
	}
	o.Pools = []bgp.Pool{
		pool("wide", "203.0.113.0", "203.0.113.15"), pool("narrow", "203.0.113.16", "203.0.113.31"),
		pool("six", "2001:db8:1::", "2001:db8:1::ffff"),
	}
	o.Pools[0].AggregateV4, o.Pools[2].AggregateV6 = 28, 112
	o.Pools[1].ExtCommunities = [][8]byte{{0, 2, 252, 0, 0, 0, 0, 100}}
	o.Peers[0].Pools, o.Peers[1].Pools = []string{"wide"}, []string{"narrow", "six"}
	c := startChild(t, b.host, o)
	one, two := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")
	other, six := netip.MustParseAddr("203.0.113.17"), netip.MustParseAddr("2001:db8:1::1")
	c.set(one, two, other, six)
	via := func(n, family int) netip.Addr { return b.ours[n][family] }
	wantRoute(t, first, "203.0.113.0/28", via(0, 0))
	wantRoute(t, second, "203.0.113.17/32", via(1, 0))
	wantRoute(t, second, "2001:db8:1::/112", via(1, 1))
	if p := c.peer(b.theirs[0][0]); p.Routes != 1 {
		t.Errorf("the first router has %d routes", p.Routes)
	}
	if p := c.peer(b.theirs[1][0]); p.Routes != 2 {
		t.Errorf("the second router has %d routes", p.Routes)
	}
	labtest.Until(t, timeout, "the route target", func() error {
		out, err := second.Show(t.Context(), "show bgp ipv4 unicast 203.0.113.17/32")
		if err == nil && !strings.Contains(out, "RT:64512:100") {
			err = fmt.Errorf("the output is %s", out)
		}
		return err
	})

	c.set(two, other, six)
	wantRoute(t, first, "203.0.113.0/28", via(0, 0))
	c.set(other, six)
	wantRoute(t, first, "203.0.113.0/28")
	c.set(two)
	wantRoute(t, second, "203.0.113.17/32")
	if c.Log.Contains("withdrawals not confirmed") {
		t.Errorf("a withdrawal to a router that had no route was waited for:\n%s", c.Log.Tail(5))
	}

	c.set(two, other, six)
	wantRoute(t, first, "203.0.113.0/28", via(0, 0))
	wantRoute(t, second, "203.0.113.17/32", via(1, 0))
	since := c.established(b.theirs[0][0])
	stop := watchRoute(t, second, other, via(1, 0))
	o.Peers[1].Pools = []string{"wide", "narrow"}
	c.configure(o)
	wantRoute(t, second, "203.0.113.0/28", via(1, 0))
	wantRoute(t, second, "2001:db8:1::/112")
	stop()
	if at := c.established(b.theirs[0][0]); !at.Equal(since) {
		t.Errorf("the session of the other router is since %v, was since %v", at, since)
	}
}
