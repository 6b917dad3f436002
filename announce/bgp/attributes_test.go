package bgp_test

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/osrg/gobgp/v3/pkg/apiutil"
	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// awaitPaths waits until the router has n routes and returns their attributes.
func (r *router) awaitPaths(t testing.TB, n int) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	labtest.Until(t, timeout, "the routes arrive", func() error {
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
		want []string // before the next hop
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
			// A changed weight changes the community; the route stays.
			setWeights(t, s, 5, 1)
			labtest.Until(t, timeout, "the new weight arrives", func() error {
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

// A covering prefix is announced once, while any VIP in it is.
func TestAggregation(t *testing.T) {
	t.Parallel()
	r := startRouter(t)
	o := r.options()
	o.AggregateV4, o.AggregateV6 = 28, 64
	s := newSpeaker(t, o)
	must.Run(t, s.Run)
	for _, row := range []struct {
		vips []netip.Addr
		want []netip.Prefix
	}{
		{vips("203.0.113.3", "203.0.113.4", "2001:db8:1::1"), prefixes("203.0.113.0/28", "2001:db8:1::/64")},
		{vips("203.0.113.4", "203.0.113.20"), prefixes("203.0.113.0/28", "203.0.113.16/28")},
		{vips("203.0.113.20"), prefixes("203.0.113.16/28")},
		{nil, nil},
	} {
		must.Do(t, s.Set(t.Context(), announcements(row.vips...)))
		labtest.Until(t, timeout, fmt.Sprint(row.want), func() error {
			got := r.paths(t)
			for _, p := range row.want {
				if got[p] == nil {
					return fmt.Errorf("%v is missing", p)
				}
			}
			return labtest.ErrorIf(len(got) != len(row.want), "%d routes", len(got))
		})
	}
}

func prefixes(s ...string) (list []netip.Prefix) {
	for _, p := range s {
		list = append(list, netip.MustParsePrefix(p))
	}
	return list
}
