package bgp

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestFilter(t *testing.T) {
	a := func(s string) netip.Addr { return netip.MustParseAddr(s) }
	r := func(from, to string) lb.AddrRange { return lb.AddrRange{From: a(from), To: a(to)} }
	o := Options{Pools: []Pool{
		{Name: "a", Ranges: []lb.AddrRange{r("203.0.113.128", "203.0.113.255"), r("203.0.113.3", "203.0.113.10")}},
		{Name: "b", Ranges: []lb.AddrRange{r("203.0.113.64", "203.0.113.127"), r("2001:db8::", "2001:db8::ffff")}},
		{Name: "all", Ranges: []lb.AddrRange{
			r("0.0.0.0", "255.255.255.255"), r("fff0::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
		}},
	}}
	for _, row := range []struct {
		pools []string
		want  string
	}{
		{nil, ""},
		{[]string{"none"}, "[]"},
		{[]string{"a"}, "[203.0.113.3/32 203.0.113.4/30 203.0.113.8/31 203.0.113.10/32 203.0.113.128/25]"},
		{[]string{"b"}, "[203.0.113.64/26 2001:db8::/112]"},
		{[]string{"a", "b"}, "[203.0.113.3/32 203.0.113.4/30 203.0.113.8/31 203.0.113.10/32 203.0.113.64/26 " +
			"203.0.113.128/25 2001:db8::/112]"},
		{[]string{"all"}, "[0.0.0.0/0 fff0::/12]"},
	} {
		if got := o.only(&Peer{Pools: row.pools}).String(); got != row.want {
			t.Errorf("%q: %s, want %s", row.pools, got, row.want)
		}
	}
	f := o.only(&Peer{Pools: []string{"a"}})
	for p, want := range map[string]bool{
		"203.0.113.3/32": true, "203.0.113.2/32": false, "203.0.113.128/25": true, "203.0.113.128/24": false,
		"203.0.113.200/30": true, "2001:db8::1/128": false,
	} {
		if got := f.allows(netip.MustParsePrefix(p)); got != want {
			t.Errorf("%s is allowed: %t", p, got)
		}
	}
	some := netip.MustParsePrefix("2001:db8::1/128")
	if !filter(nil).allows(some) || (filter{}).allows(some) {
		t.Error("no filter is not the same as an empty one")
	}
}

// The text that gobgp reads in a policy has the same bytes as that in a route.
func TestExtText(t *testing.T) {
	for _, c := range [][8]byte{
		{0, 2, 252, 0, 255, 255, 255, 255}, {1, 3, 192, 0, 2, 1, 0, 7}, {2, 2, 250, 86, 234, 0, 0, 7},
	} {
		got, err := parseExtText(extText(c))
		if err != nil || fmt.Sprint(got) != fmt.Sprint(c[:]) {
			t.Errorf("%s: %v, %v; want %v", extText(c), got, err, c)
		}
	}
}

func parseExtText(s string) ([]byte, error) {
	kind, value, _ := strings.Cut(s, ":")
	subtype := map[string]packet.ExtendedCommunityAttrSubType{
		"rt": packet.EC_SUBTYPE_ROUTE_TARGET, "soo": packet.EC_SUBTYPE_ROUTE_ORIGIN,
	}[kind]
	c, err := packet.ParseExtendedCommunity(subtype, value)
	if err != nil {
		return nil, err
	}
	return c.Serialize()
}

// Extended communities of a route that was sent are printed as they are configured.
func TestSentExtendedCommunities(t *testing.T) {
	want := []string{"rt:64512:100", "soo:64512:4294967295", "rt:192.0.2.1:7", "soo:4200000001:65535"}
	var list []packet.ExtendedCommunityInterface
	for _, b := range [][]byte{
		{0, 2, 0xfc, 0, 0, 0, 0, 100}, {0, 3, 0xfc, 0, 0xff, 0xff, 0xff, 0xff}, {1, 2, 192, 0, 2, 1, 0, 7},
		{2, 3, 0xfa, 0x56, 0xea, 0x01, 0xff, 0xff},
	} {
		c := must.Get(packet.ParseExtended(b))(t)
		list = append(list, c)
	}
	b := must.Get(packet.NewPathAttributeExtendedCommunities(list).Serialize())(t)
	var r lb.SentRoute
	if addAttributes(&r, b); fmt.Sprint(r.ExtendedCommunities) != fmt.Sprint(want) {
		t.Errorf("%q; want %q", r.ExtendedCommunities, want)
	}
}
