package lb

import (
	"net/netip"
	"slices"
	"testing"
)

func addrs(s ...string) (out []netip.Addr) {
	for _, a := range s {
		out = append(out, netip.MustParseAddr(a))
	}
	return out
}

func pool(name, from, to string) Pool {
	return Pool{Name: name, AutoAssign: true, Ranges: []AddrRange{{netip.MustParseAddr(from), netip.MustParseAddr(to)}}}
}

func TestAllocate(t *testing.T) {
	v4, v6 := pool("v4", "203.0.113.0", "203.0.113.2"), pool("v6", "2001:db8::1", "2001:db8::1")
	careful, manual := v4, v4
	careful.AvoidBuggy, manual.AutoAssign = true, false
	for _, tt := range []struct {
		name         string
		taken        []netip.Addr
		pool         string
		want4, want6 bool
		pools        []Pool
		want         []netip.Addr
		err          string
	}{
		{"lowest free address", nil, "v4", true, false, []Pool{v4}, addrs("203.0.113.0"), ""},
		{"taken ones are skipped", addrs("203.0.113.0"), "v4", true, false, []Pool{v4}, addrs("203.0.113.1"), ""},
		{"buggy ones are skipped", nil, "v4", true, false, []Pool{careful}, addrs("203.0.113.1"), ""},
		{"both families from any pool", nil, "", true, true, []Pool{v4, v6}, addrs("203.0.113.0", "2001:db8::1"), ""},
		{"exhausted", addrs("2001:db8::1"), "v6", false, true, []Pool{v4, v6}, nil, "no free IPv6 address in v6"},
		{"no such pool", nil, "x", true, false, []Pool{v4}, nil, `there is no pool "x"`},
		{"only manual pools", nil, "", true, false, []Pool{manual}, nil, "no pool has auto_assign"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := NewAllocator()
			a.Take("other", tt.taken)
			got, err := a.Allocate("web", tt.pool, tt.want4, tt.want6, tt.pools)
			if msg := errText(err); msg != tt.err || !slices.Equal(got, tt.want) {
				t.Errorf("Allocate = %v, %q; want %v, %q", got, msg, tt.want, tt.err)
			}
		})
	}
}

func TestAllocationIsSticky(t *testing.T) {
	p := pool("v4", "203.0.113.1", "203.0.113.9")
	a := NewAllocator()
	a.Allocate("first", "", true, false, []Pool{p})
	second, _ := a.Allocate("second", "", true, false, []Pool{p})
	a.Release("first")
	again, err := a.Allocate("second", "", true, false, []Pool{p})
	if err != nil || !slices.Equal(again, second) {
		t.Errorf("second has %v (%v) after first was released; want %v as before", again, err, second)
	}
	moved, err := a.Allocate("second", "", true, false, []Pool{pool("other", "198.51.100.1", "198.51.100.9")})
	if err != nil || !slices.Equal(moved, addrs("198.51.100.1")) {
		t.Errorf("second has %v (%v) after its pool is gone; want 198.51.100.1", moved, err)
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
