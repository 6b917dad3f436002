package bgp_test

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// established waits until a session is established, and returns when that was.
func (c *child) established(peer netip.Addr) (since time.Time) {
	c.t.Helper()
	return c.until(peer, fmt.Sprintf("the session with %v", peer), isEstablished).Since
}

// kept fails the test unless the session with a peer has been up since then.
func (c *child) kept(peer netip.Addr, since time.Time) {
	c.t.Helper()
	again := c.established(peer)
	must.True(c.t, again.Equal(since), "the session with %v is since %v, was since %v", peer, again, since)
}

// A peer is added and removed while another peer's session continues, and a new hold time interrupts no route.
func TestConfigurePeers(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		first, second := b.router(kind, nil), b.router(kind, nil)
		both := b.options()
		one := both
		one.Peers = both.Peers[:1]
		c := startChild(t, b.host, one)
		c.set(vip4, vip6)
		want(t, first, vip4, b.ours[0][0])
		since := c.established(b.theirs[0][0])
		stop := watchRoute(t, first, vip4, b.ours[0][0])

		c.configure(both)
		want(t, second, vip4, b.ours[1][0])
		want(t, second, vip6, b.ours[1][1])
		c.configure(one)
		took := want(t, second, vip4)
		must.True(t, took <= time.Second, "the removed peer kept the route for %v", took)
		c.kept(b.theirs[0][0], since)

		one.Peers = slices.Clone(one.Peers)
		one.Peers[0].HoldTime = 30 * time.Second
		c.configure(one)
		c.until(b.theirs[0][0], "a new session", func(p lb.PeerStatus) bool {
			return p.State == "established" && !p.Since.Equal(since)
		})
		<-time.After(2 * time.Second) // the router would remove stale routes by now
		stop()
	})
}

// Peers and pools have their own attributes. New attributes and prefixes are sent in the same session, and lowered
// routes keep the lowest preference.
func TestAttributesOfPeersAndPools(t *testing.T) {
	b, h, o := oneLink(t)
	r := startBIRD(t, h, "neighbor 192.0.2.2 as 64512; "+bothFamilies, "")
	value := func(n uint32) *uint32 { return &n }
	o.Communities = []uint32{64512<<16 | 1}
	o.Pools = []bgp.Pool{{
		Ranges:     []lb.AddrRange{{From: vip4, To: vip4}},
		Attributes: bgp.Attributes{MED: value(10), Communities: []uint32{64512<<16 | 2}},
	}}
	o.Pools[0].Prepend = 3
	c := startChild(t, b.host, o)
	other := netip.MustParseAddr("203.0.113.11")
	c.set(vip4, other, vip6)
	const to4, to6 = "show route all for 203.0.113.10", "show route all for 2001:db8:1::10"
	r.await(to4, "BGP.med: 10", "BGP.community: (64512,1) (64512,2)", "BGP.as_path: 64512 64512 64512 64512\n")
	for _, to := range []string{to6, "show route all for 203.0.113.11"} {
		out := r.await(to, "BGP.community: (64512,1)", "BGP.as_path: 64512\n")
		must.True(t, !strings.Contains(out, "med") && !strings.Contains(out, "(64512,2)"),
			"%s has attributes of the pool:\n%s", to, out)
	}
	since := c.established(b.theirs[0][0])

	o.Peers[0].Attributes = bgp.Attributes{
		MED: value(20), Communities: []uint32{64512<<16 | 3}, LargeCommunities: [][3]uint32{{64512, 0, 3}},
	}
	o.Peers[0].Prepend = 2
	o.Peers[0].LocalASN, o.Peers[0].Source = o.ASN, b.ours[0][0] // as before, so the session stays
	c.configure(o)
	for _, to := range []string{to4, to6} {
		r.await(to, "BGP.med: 20", "(64512,3)", "BGP.large_community: (64512, 0, 3)")
		r.await(to, "BGP.as_path: 64512 64512 64512\n")
	}
	c.setWeighted(lb.Announcement{VIP: vip4, Weight: 1, LowerPreference: true})
	r.await(to4, "BGP.med: 4294967295", "(65535,0)", "(64512,3)")
	c.setWeighted(lb.Announcement{VIP: vip4, Weight: 1})
	r.await(to4, "BGP.med: 20")
	o.Peers[0].Attributes, o.Peers[0].Prepend, o.Pools = bgp.Attributes{}, 0, nil
	c.configure(o)
	labtest.Until(t, "no further attribute", func() error {
		out, err := r.birdc(to4)
		return labtest.ErrorIf(err != nil || strings.Contains(out, "med") || strings.Contains(out, "64512 64512") ||
			strings.Contains(out, "(64512,3)") || strings.Contains(out, "(64512,2)"), "%v %s", err, out)
	})
	o.AggregateV4, o.AggregateV6 = 28, 64
	c.setWeighted(announcements(vip4, vip6)...)
	c.configure(o)
	r.await("show route all", "203.0.113.0/28", "2001:db8:1::/64", "BGP.community: (64512,1)")
	r.await("show route count", one4, "1 of 1 routes for 1 networks in table master6")
	c.set()
	r.await("show route count", none4, none6)
	c.kept(b.theirs[0][0], since)
}

// Towards a peer, this node may have another AS number, which then makes up the AS path, including prepends. This
// node's AS and listen port can also change.
func TestConfigureLocalSide(t *testing.T) {
	b, h, o := oneLink(t)
	r := startBIRD(t, h, "neighbor 192.0.2.2 as 64999; passive; "+bothFamilies, "")
	c := startChild(t, b.host, o)
	c.set(vip4, vip6)
	wantReason(t, c, b.theirs[0][0], "bad peer as")
	o.Peers[0].LocalASN = 64999
	c.configure(o)
	r.await("show route all for 203.0.113.10", "BGP.next_hop: 192.0.2.2", "BGP.as_path: 64999\n")
	o.Peers[0].Prepend = 1
	c.configure(o)
	r.await("show route all for 2001:db8:1::10", "BGP.as_path: 64999 64999\n")
	o.ASN, o.Peers[0].LocalASN, o.Peers[0].Prepend = 64999, 0, 0
	c.configure(o)
	r.await("show route all for 203.0.113.10", "BGP.as_path: 64999\n")
	o.ListenPort = 1790
	c.configure(o)
	labtest.Until(t, "only the new port is open", func() error {
		for port, want := range map[string]bool{"179": false, "1790": true} {
			conn, err := h.Dial(context.Background(), "tcp", "192.0.2.2:"+port)
			if err == nil {
				conn.Close()
			}
			if (err == nil) != want {
				return fmt.Errorf("port %s: %v", port, err)
			}
		}
		return nil
	})
	c.established(b.theirs[0][0])
	must.Get(c.call(request{Configure: &bgp.Options{}}))(t)
	c.established(b.theirs[0][0]) // invalid options change nothing
}
