package inside

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCover(t *testing.T) {
	addrs := func(texts ...string) (all []netip.Addr) {
		for _, s := range texts {
			all = append(all, netip.MustParseAddr(s))
		}
		slices.SortFunc(all, netip.Addr.Compare)
		return all
	}
	for _, c := range []struct {
		addrs []netip.Addr
		most  int
		want  []string
	}{
		{nil, 2, nil},
		{addrs("10.96.0.1"), 1, []string{"10.96.0.1/32"}},
		{addrs("10.96.0.1", "10.96.0.1"), 1, []string{"10.96.0.1/32"}},
		{addrs("10.96.0.1", "10.96.0.10", "192.0.2.1"), 2, []string{"10.96.0.0/28", "192.0.2.1/32"}},
		{addrs("10.96.0.1", "10.97.0.1", "192.0.2.1", "192.0.2.200"), 2, []string{"10.96.0.0/15", "192.0.2.0/24"}},
		{addrs("fd00::1", "fd00::2", "2001:db8::1"), 2, []string{"2001:db8::1/128", "fd00::/126"}},
		{addrs("0.0.0.1", "255.0.0.1"), 1, []string{"0.0.0.0/0"}},
	} {
		var got []string
		for _, p := range cover(c.addrs, c.most) {
			got = append(got, p.Masked().String())
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%v in %d: %s", c.addrs, c.most, diff)
		}
	}
}

// Whatever the addresses are, each is in a prefix, and there are not too many prefixes.
func TestCoverContainsAll(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var all []netip.Addr
		for range 1 + r.IntN(300) {
			all = append(all, netip.AddrFrom4([4]byte{10, byte(r.IntN(4)), byte(r.IntN(256)), byte(r.IntN(256))}))
		}
		slices.SortFunc(all, netip.Addr.Compare)
		got := cover(all, maxRanges)
		if len(got) > maxRanges {
			t.Fatalf("%d prefixes", len(got))
		}
		for _, a := range all {
			if !slices.ContainsFunc(got, func(p netip.Prefix) bool { return p.Contains(a) }) {
				t.Fatalf("%s is not in %v", a, got)
			}
		}
	}
}
