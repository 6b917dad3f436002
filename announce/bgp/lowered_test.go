package bgp

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/steelyard-lb/steelyard/lb"
)

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
