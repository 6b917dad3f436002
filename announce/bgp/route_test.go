package bgp

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

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
			if text := errText(err.OrNil()); text != row.err {
				t.Errorf("error\n%s\nwant\n%s", text, row.err)
			}
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
	if got := changes(from, to); !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
