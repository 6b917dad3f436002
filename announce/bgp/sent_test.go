package bgp_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func (c *child) sent(peer netip.Addr) []lb.SentRoute {
	c.t.Helper()
	a := must.Get(c.call(request{Sent: peer}))(c.t)
	return a.Sent
}

// The routes of each peer are listed with the attributes that the router has received, and follow changes.
func TestSentRoutes(t *testing.T) {
	b := newBench(t)
	bird, frr := b.router(peers.BIRD, nil), b.router(peers.FRR, nil)
	o := b.options()
	o.Weighted, o.Communities = lb.WeightedAlways, []uint32{64512<<16 | 100}
	med := uint32(10)
	o.Peers[0].MED, o.Peers[0].Prepend = &med, 2
	o.Peers[1].Communities, o.Peers[1].LargeCommunities = []uint32{0xffffff01}, [][3]uint32{{64512, 1, 2}}
	c := startChild(t, b.host, o)
	c.setWeighted(lb.Announcement{VIP: vip4, Weight: 3}, lb.Announcement{VIP: vip6, LowerPreference: true})
	await := func(r *peers.Router, command string, words ...string) {
		t.Helper()
		labtest.Until(t, timeout, fmt.Sprintf("%q in %q", words, command), func() error {
			out, err := r.Show(t.Context(), command)
			if i := slices.IndexFunc(words, func(w string) bool { return !strings.Contains(out, w) }); i >= 0 {
				return fmt.Errorf("no %q: %v %s", words[i], err, out)
			}
			return err
		})
	}
	check := func(peer netip.Addr, want ...lb.SentRoute) {
		t.Helper()
		labtest.Until(t, timeout, "the routes are listed", func() error {
			if d := cmp.Diff(want, c.sent(peer), cmpopts.IgnoreFields(lb.SentRoute{}, "At"),
				cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
				cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmpopts.EquateEmpty()); d != "" {
				return fmt.Errorf("-want +got:\n%s", d)
			}
			return nil
		})
	}
	await(bird, "show route all for 203.0.113.10", "BGP.as_path: 64512 64512 64512", "BGP.next_hop: 192.0.2.2",
		"BGP.med: 10", "BGP.community: (64512,100)")
	await(frr, "show bgp ipv4 unicast 203.0.113.10/32", "64512\n", "Community: 64512:100 no-export",
		"Large Community: 64512:1:2", "LB:64512:375000000 (3.000 Gbps)", "192.0.2.6 from 192.0.2.6")
	lowest := uint32(1<<32 - 1)
	lowered := lb.SentRoute{
		Prefix: host(vip6), NextHop: b.ours[0][1], ASPath: []uint32{64512, 64512, 64512}, MED: &lowest,
		Communities: []string{"64512:100", "graceful-shutdown"},
	}
	check(b.theirs[0][0], lb.SentRoute{
		Prefix: host(vip4), NextHop: b.ours[0][0], ASPath: []uint32{64512, 64512, 64512}, MED: &med,
		Communities: []string{"64512:100"}, Bandwidth: 375e6,
	}, lowered)
	list := c.sent(b.theirs[1][0])
	if len(list) != 2 || time.Since(list[0].At) > timeout || list[0].At.IsZero() {
		t.Fatalf("routes at FRR: %+v", list)
	}
	want := lb.SentRoute{
		Prefix: host(vip4), NextHop: b.ours[1][0], ASPath: []uint32{64512}, At: list[0].At, Bandwidth: 375e6,
		Communities: []string{"64512:100", "no-export"}, LargeCommunities: []string{"64512:1:2"},
	}
	if fmt.Sprintf("%+v", list[0]) != fmt.Sprintf("%+v", want) {
		t.Errorf("at FRR %+v, want %+v", list[0], want)
	}
	c.setWeighted(lb.Announcement{VIP: vip6, LowerPreference: true})
	check(b.theirs[0][0], lowered)
	if list := c.sent(netip.MustParseAddr("192.0.2.99")); list != nil {
		t.Errorf("routes of a peer that does not exist: %v", list)
	}
}
