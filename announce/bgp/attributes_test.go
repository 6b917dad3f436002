package bgp_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/osrg/gobgp/v3/pkg/apiutil"
	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func (r *router) awaitPaths(t testing.TB, n int) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	labtest.Until(t, "the routes arrive", func() error {
		clear(all)
		for prefix, p := range r.paths(t) {
			attrs, err := apiutil.GetNativePathAttributes(p)
			if err != nil {
				return err
			}
			for _, a := range attrs {
				text := a.String()
				if mp, ok := a.(*packet.PathAttributeMpReachNLRI); ok {
					text = fmt.Sprintf("{Nexthop: %v}", mp.Nexthop)
				}
				all[prefix.String()] = append(all[prefix.String()], text)
			}
		}
		return labtest.ErrorIf(len(all) != n, "%d routes: %v", len(all), all)
	})
	return all
}

func TestAttributes(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name string
		asn  uint32
		pref uint32
		want []string // attributes before the next hop
	}{
		{"other AS", 64512, 200, []string{"{Origin: i}", "{AsPath: 64512}"}},
		{"same AS", 64500, 200, []string{"{Origin: i}", "{AsPath: }", "{LocalPref: 200}"}},
		{"same AS, lowest preference", 64500, 0, []string{"{Origin: i}", "{AsPath: }", "{LocalPref: 0}"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			r := startRouterFor(t, row.asn)
			o := r.options()
			o.ASN, o.LocalPref, o.Weighted = row.asn, row.pref, lb.WeightedMovable
			o.Communities = []uint32{64512<<16 | 100, 0xFFFFFF01}
			o.LargeCommunities = [][3]uint32{{64512, 1, 2}}
			s := newSpeaker(t, o)
			must.Run(t, s.Run)
			setWeights(t, s, 3, 1)
			bandwidth := func(bytes float64) string {
				return fmt.Sprintf("{Extcomms: [%v]}", packet.NewLinkBandwidthExtended(uint16(row.asn), float32(bytes)))
			}
			got := r.awaitPaths(t, 2)
			want := map[string][]string{}
			for prefix, own := range map[string][2]string{
				"203.0.113.10/32":    {"{Nexthop: 127.0.0.1}", bandwidth(3 * 125e6)},
				"2001:db8:1::10/128": {"{Nexthop: 2001:db8::11}", bandwidth(125e6)},
			} {
				want[prefix] = append(append([]string{}, row.want...), own[0],
					"{Communities: 64512:100, no-export}", "{LargeCommunity: [ 64512:1:2]}", own[1])
			}
			must.Equal(t, sets(want), sets(got))
			// A new weight changes the community; the route stays.
			setWeights(t, s, 5, 1)
			labtest.Until(t, "the new weight arrives", func() error {
				got := r.awaitPaths(t, 2)["203.0.113.10/32"]
				return labtest.ErrorIf(!slices.Contains(got, bandwidth(5*125e6)), "attributes %v", got)
			})
		})
	}
}

// setWeights announces vip4 and vip6 with these weights.
func setWeights(t *testing.T, s *bgp.Speaker, weight4, weight6 int) {
	t.Helper()
	must.Do(t, s.Set(t.Context(), []lb.Announcement{
		{VIP: vip4, Weight: weight4, Movable: true}, {VIP: vip6, Weight: weight6, Movable: true},
	}))
}

func sets(m map[string][]string) map[string]map[string]bool {
	out := map[string]map[string]bool{}
	for k, list := range m {
		out[k] = map[string]bool{}
		for _, v := range list {
			out[k][v] = true
		}
	}
	return out
}

func (c *child) sent(peer netip.Addr) []lb.SentRoute {
	c.t.Helper()
	return must.Get(c.call(request{Sent: peer}))(c.t).Sent
}

// Sent lists each peer's routes with the attributes that the router received, and follows changes.
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
		labtest.Until(t, fmt.Sprintf("%q in %q", words, command), func() error {
			out, err := r.Show(t.Context(), command)
			return errors.Join(err, lacks(out, words))
		})
	}
	check := func(peer netip.Addr, want ...lb.SentRoute) {
		t.Helper()
		labtest.Until(t, "the routes are listed", func() error {
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
	must.Need(t, len(list) == 2 && time.Since(list[0].At) <= timeout && !list[0].At.IsZero(),
		"routes at FRR: %+v", list)
	want := lb.SentRoute{
		Prefix: host(vip4), NextHop: b.ours[1][0], ASPath: []uint32{64512}, At: list[0].At, Bandwidth: 375e6,
		Communities: []string{"64512:100", "no-export"}, LargeCommunities: []string{"64512:1:2"},
	}
	must.True(t, fmt.Sprintf("%+v", list[0]) == fmt.Sprintf("%+v", want), "at FRR %+v, want %+v", list[0], want)
	c.setWeighted(lb.Announcement{VIP: vip6, LowerPreference: true})
	check(b.theirs[0][0], lowered)
	must.Row(t, "routes of a peer that does not exist", nil, c.sent(netip.MustParseAddr("192.0.2.99")))
}

// A session's details match what both sides negotiated, and its message counters match the router's. If the router ends
// the session, this is counted, logged once with its reason, and the session is established again with its routes.
func TestSessionDetails(t *testing.T) {
	eachRouter(t, func(t *testing.T, kind peers.RouterKind) {
		b := newBench(t)
		r := b.router(kind, func(c *peers.RouterConfig) { c.HoldTime = 12 * time.Second })
		o := b.options()
		o.RestartTime, o.LongLivedRestartTime = 45*time.Second, time.Hour
		o.Peers[0].HoldTime, o.Peers[0].Keepalive = 30*time.Second, 2*time.Second
		c := startChild(t, b.host, o)
		peer := b.theirs[0][0]
		c.set(vip4, vip6)
		want(t, r, vip4, b.ours[0][0])
		want(t, r, vip6, b.ours[0][1])
		p := c.peer(peer)
		s := p.Session
		must.Need(t, p.Flaps == 0 && s != nil, "%+v", p)
		t.Logf("%s: %+v", kind, *s)
		must.True(t, s.Local == b.ours[0][0] && s.LocalASN == ourASN && s.RouterID == peer && s.Hold == 12 &&
			s.Keepalive == 2 && s.Restart == 45 && slices.Equal(s.Families, []string{"ipv4", "ipv6"}) &&
			!s.ExtendedNextHop, "details %+v", *s)
		must.True(t, s.Sent.Updates >= 2 && s.Sent.Messages >= s.Sent.Updates+2 && s.Received.Messages >= 2 &&
			time.Since(s.Received.Last) <= 12*time.Second && time.Since(s.Sent.Last) <= 4*time.Second,
			"messages %+v", *s)
		if kind == peers.FRR {
			wantCounted(t, c, r, peer, b.ours[0][0])
		}
		must.Do(t, r.Reset(t.Context(), b.ours[0][0]))
		c.until(peer, "the end of the session is counted", func(p lb.PeerStatus) bool {
			return p.Flaps == 1 && isEstablished(p) && p.Session != nil && p.Session.Sent.Messages < 20
		})
		want(t, r, vip4, b.ours[0][0])
		lines := downLines(c, peer)
		must.True(t, strings.Count(strings.Join(lines, "\n"), "administrative") == 1,
			"logged %q, want the reason once", lines)
	})
}

// wantCounted compares our message counters with FRR's.
func wantCounted(t *testing.T, c *child, r *peers.Router, peer, neighbor netip.Addr) {
	t.Helper()
	labtest.Until(t, "FRR has the same counters", func() error {
		out, err := r.Show(t.Context(), "show bgp neighbors "+neighbor.String()+" json")
		if err != nil {
			return err
		}
		var all map[string]struct {
			MessageStats struct{ UpdatesSent, UpdatesRecv, TotalSent, TotalRecv uint64 }
		}
		if err := json.NewDecoder(strings.NewReader(out)).Decode(&all); err != nil {
			return err
		}
		theirs, ours := all[neighbor.String()].MessageStats, c.peer(peer).Session
		return labtest.ErrorIf(
			theirs.UpdatesRecv != ours.Sent.Updates || theirs.UpdatesSent != ours.Received.Updates ||
				theirs.TotalRecv != ours.Sent.Messages || theirs.TotalSent != ours.Received.Messages,
			"FRR: %+v; sent %+v, received %+v", theirs, ours.Sent, ours.Received)
	})
}
