package bgp

import (
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"time"

	packet "github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func announce(pairs ...any) (list []lb.Announcement) {
	for i := 0; i < len(pairs); i += 2 {
		a, _ := netip.ParseAddr(pairs[i].(string))
		list = append(list, lb.Announcement{VIP: a, Weight: pairs[i+1].(int)})
	}
	return list
}

func TestRoutesFor(t *testing.T) {
	bad := func(vips ...string) string {
		var lines []string
		for _, v := range vips {
			lines = append(lines, v+": not a global unicast address")
		}
		return strings.Join(lines, "; ")
	}
	for _, row := range []struct {
		name   string
		v4, v6 int
		in     []lb.Announcement
		want   map[string]int
		err    string
	}{
		{"nothing", 32, 128, nil, map[string]int{}, ""},
		{"hosts", 32, 128, announce("203.0.113.1", 2, "2001:db8::1", 3),
			map[string]int{"203.0.113.1/32": 2, "2001:db8::1/128": 3}, ""},
		{"mapped and zoned", 32, 128, announce("::ffff:203.0.113.1", 1, "2001:db8::1%eth0", 1),
			map[string]int{"203.0.113.1/32": 1, "2001:db8::1/128": 1}, ""},
		{"a weight below one counts as one", 32, 128, announce("203.0.113.1", 0),
			map[string]int{"203.0.113.1/32": 1}, ""},
		{"weights add up", 24, 64,
			announce("203.0.113.1", 2, "203.0.113.2", 3, "2001:db8::1", 1, "2001:db8::2", 1),
			map[string]int{"203.0.113.0/24": 5, "2001:db8::/64": 2}, ""},
		{"addresses that cannot be routed", 32, 128,
			announce("", 1, "0.0.0.0", 1, "127.0.0.1", 1, "224.0.0.1", 1, "fe80::1", 1, "::", 1, "255.255.255.255", 1,
				"203.0.113.1", 1),
			map[string]int{"203.0.113.1/32": 1},
			bad("invalid IP", "0.0.0.0", "127.0.0.1", "224.0.0.1", "255.255.255.255", "::", "fe80::1")},
	} {
		t.Run(row.name, func(t *testing.T) {
			o := Options{AggregateV4: row.v4, AggregateV6: row.v6, Weighted: lb.WeightedAlways}
			routes, err := o.routesFor(row.in)
			got := map[string]int{}
			for p, w := range routes {
				got[p.String()] = w
			}
			must.Equal(t, row.want, got)
			must.Equal(t, row.err, errText(err.OrNil()))
		})
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestChanges(t *testing.T) {
	p := netip.MustParsePrefix
	from := routes{p("203.0.113.1/32"): 1, p("203.0.113.2/32"): 1, p("203.0.113.3/32"): 1}
	to := routes{p("203.0.113.0/32"): 1, p("203.0.113.2/32"): 2, p("203.0.113.3/32"): 1}
	want := []change{{p("203.0.113.1/32"), 0}, {p("203.0.113.0/32"), 1}, {p("203.0.113.2/32"), 2}}
	must.Equal(t, want, changes(from, to))
}

// A router that receives a new weight moves flows between nodes. So by default, an address has a weight only if its
// connections survive this.
func TestWhichRoutesHaveWeights(t *testing.T) {
	nat, moves := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2")
	announcements := []lb.Announcement{{VIP: nat, Weight: 2}, {VIP: moves, Weight: 3, Movable: true}}
	for _, tt := range []struct {
		weighted   lb.Weighted
		nat, moves int
		both       int // of both addresses' prefix
	}{
		{lb.WeightedNever, unweighted, unweighted, unweighted},
		{lb.WeightedMovable, unweighted, 3, unweighted},
		{lb.WeightedAlways, 2, 3, 5},
	} {
		o := Options{Weighted: tt.weighted, AggregateV4: 32, AggregateV6: 128}
		got, _ := o.routesFor(announcements)
		must.Row(t, tt.weighted, [2]int{tt.nat, tt.moves}, [2]int{got[o.prefixOf(nat)], got[o.prefixOf(moves)]})
		o.AggregateV4 = 24
		got, _ = o.routesFor(announcements)
		must.Row(t, tt.weighted, tt.both, got[o.prefixOf(nat)])
		must.Row(t, "attributes without a weight", 1, len(o.attributes(o.prefixOf(nat), unweighted))) // LOCAL_PREF
	}
}

// A weight is announced once it has not changed for weightSettles, other changes immediately.
func TestWeightsSettle(t *testing.T) {
	p, other := netip.MustParsePrefix("203.0.113.1/32"), netip.MustParsePrefix("203.0.113.2/32")
	s, announced, start := settling{}, routes{}, time.Now()
	for _, step := range []struct {
		at           time.Duration
		wanted, want routes
		waiting      int
	}{
		{0, routes{p: 3}, routes{p: 3}, 0},
		{time.Second, routes{p: 2}, routes{p: 3}, 1},
		{20 * time.Second, routes{p: 1}, routes{p: 3}, 1},                     // it changed again
		{40 * time.Second, routes{p: 1, other: 7}, routes{p: 3, other: 7}, 1}, // a new route does not wait
		{50 * time.Second, routes{p: 1, other: 7}, routes{p: 1, other: 7}, 0},
		{51 * time.Second, routes{p: 2, other: 7}, routes{p: 1, other: 7}, 1},
		{60 * time.Second, routes{p: 1, other: 7}, routes{p: 1, other: 7}, 0}, // equal to the announced one
		{70 * time.Second, routes{p: 2, other: lowered}, routes{p: 1, other: lowered}, 1},
		{80 * time.Second, routes{other: lowered}, routes{other: lowered}, 0}, // withdrawn
		{81 * time.Second, routes{other: 9}, routes{other: 9}, 0},
	} {
		announced = s.settle(announced, step.wanted, start.Add(step.at))
		must.True(t, maps.Equal(announced, step.want) && len(s) == step.waiting,
			"after %s: %v, %d wait; want %v, %d", step.at, announced, len(s), step.want, step.waiting)
	}
}

// FuzzRails checks all options that New accepts, with any announcements: each route contains an announced VIP, none is
// a default route, and there are at most MaxRoutes. A VIP without a route has an error, an announced route that is
// still wanted stays, and a peer with pools receives only their routes.
func FuzzRails(f *testing.F) {
	// An announced route that stays, an aggregate larger than its pool, and addresses that cannot be routed.
	f.Add([]byte("\x20\x80\x01\x00" + "\xcb\x00\x71\x00\x1f" + "\x01\xcb\x00\x71\x09\x01\x01" +
		"\x02\xcb\x00\x71\x09\x01\x01\xcb\x00\x71\x05\x01\x01"))
	f.Add([]byte("\x18\x40\x00\x18" + "\xcb\x00\x71\x00\x1f" + "\x01\xcb\x00\x71\x03\x01\x01"))
	f.Add([]byte("\x00\x00\x00\x00" + "\xcb\x00\x71\x00\x1f" + "\x02\xe0\x00\x00\x01\x01\x01\x7f\x00\x00\x01\x01\x01"))
	f.Fuzz(func(t *testing.T, b []byte) {
		next := func() (n byte) {
			if len(b) > 0 {
				n, b = b[0], b[1:]
			}
			return n
		}
		four := func() netip.Addr { return netip.AddrFrom4([4]byte{next(), next(), next(), next()}) }
		o := Options{
			ASN: 64512, RouterID: netip.MustParseAddr("192.0.2.11"), AggregateV4: int(next()), AggregateV6: int(next()),
			MaxRoutes: int(next() % 4), Log: slog.New(slog.DiscardHandler),
		}
		o.Peers = []Peer{{Address: netip.MustParseAddr("192.0.2.1"), ASN: 64500, Pools: []string{"own"}}}
		own := Pool{Name: "own", AggregateV4: int(next() % 33)}
		from := four()
		to := from.As4()
		to[3] |= next()
		own.Ranges = []lb.AddrRange{{From: from, To: netip.AddrFrom4(to)}}
		o.Pools = []Pool{own}
		s, err := New(o)
		if err != nil {
			return
		}
		for len(b) > 0 {
			var list []lb.Announcement
			for n := next() % 8; n > 0; n-- {
				vip := four()
				if next()%4 == 0 {
					six := [16]byte{0x20, 1}
					copy(six[2:], vip.AsSlice())
					vip = netip.AddrFrom16(six)
				}
				list = append(list, lb.Announcement{VIP: vip, Weight: int(next())})
			}
			before := maps.Clone(s.wanted)
			checkRails(t, s, list, before, errsOf(t, s.Set(t.Context(), list)))
		}
	})
}

func errsOf(t *testing.T, err error) (errs lb.VIPErrors) {
	t.Helper()
	if err != nil && !errors.As(err, &errs) {
		t.Fatal(err)
	}
	return errs
}

func checkRails(t *testing.T, s *Speaker, list []lb.Announcement, before routes, errs lb.VIPErrors) {
	t.Helper()
	o := s.options()
	must.Need(t, o.MaxRoutes == 0 || len(s.wanted) <= o.MaxRoutes,
		"%d routes; want at most %d", len(s.wanted), o.MaxRoutes)
	only := o.only(&o.Peers[0])
	own := o.Pools[0].Ranges[0]
	wanted := map[netip.Prefix]bool{}
	for _, a := range list {
		p := o.prefixOf(a.VIP)
		_, has := s.wanted[p] // perhaps because of another VIP
		has = has && a.VIP.IsGlobalUnicast()
		must.Need(t, has != (errs[a.VIP] != nil), "%s: route %t, error %v", a.VIP, has, errs[a.VIP])
		wanted[p] = wanted[p] || a.VIP.IsGlobalUnicast()
	}
	for p := range s.wanted {
		must.Need(t, wanted[p] && p == p.Masked() && p.Bits() >= 1, "route %s of %v", p, list)
		must.Need(t, !only.allows(p) || own.Contains(p.Addr()) && own.Contains(lastOf(p)),
			"the peer gets %s, which is not in %v", p, own)
	}
	for p := range before {
		_, stays := s.wanted[p]
		must.Need(t, !wanted[p] || stays, "route %s is gone", p)
	}
}

func lastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < 8*len(b); i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

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
		must.Row(t, row.pools, row.want, o.only(&Peer{Pools: row.pools}).String())
	}
	f := o.only(&Peer{Pools: []string{"a"}})
	for p, want := range map[string]bool{
		"203.0.113.3/32": true, "203.0.113.2/32": false, "203.0.113.128/25": true, "203.0.113.128/24": false,
		"203.0.113.200/30": true, "2001:db8::1/128": false,
	} {
		got := f.allows(netip.MustParsePrefix(p))
		must.True(t, got == want, "%s is allowed: %t", p, got)
	}
	some := netip.MustParsePrefix("2001:db8::1/128")
	must.True(t, filter(nil).allows(some) && !(filter{}).allows(some), "no filter is not the same as an empty one")
}

// The text that gobgp reads in a policy means the same bytes as the community in a route.
func TestExtText(t *testing.T) {
	for _, c := range [][8]byte{
		{0, 2, 252, 0, 255, 255, 255, 255}, {1, 3, 192, 0, 2, 1, 0, 7}, {2, 2, 250, 86, 234, 0, 0, 7},
	} {
		must.Row(t, extText(c), c[:], must.Get(parseExtText(extText(c)))(t))
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

// Extended communities of sent routes print as configured.
func TestSentExtendedCommunities(t *testing.T) {
	want := []string{"rt:64512:100", "soo:64512:4294967295", "rt:192.0.2.1:7", "soo:4200000001:65535"}
	var list []packet.ExtendedCommunityInterface
	for _, b := range [][]byte{
		{0, 2, 0xfc, 0, 0, 0, 0, 100}, {0, 3, 0xfc, 0, 0xff, 0xff, 0xff, 0xff}, {1, 2, 192, 0, 2, 1, 0, 7},
		{2, 3, 0xfa, 0x56, 0xea, 0x01, 0xff, 0xff},
	} {
		list = append(list, must.Get(packet.ParseExtended(b))(t))
	}
	b := must.Get(packet.NewPathAttributeExtendedCommunities(list).Serialize())(t)
	var r lb.SentRoute
	addAttributes(&r, b)
	must.Equal(t, want, r.ExtendedCommunities)
}
