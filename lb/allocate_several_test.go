package lb

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
)

// A service has as many addresses of a family as it asks for and the pool of the first one has. It keeps those that it
// has, and gives back those that it no longer asks for.
func TestSeveralOfAFamily(t *testing.T) {
	dual := pool("dual", "203.0.113.1", "203.0.113.4")
	dual.Ranges = append(dual.Ranges, AddrRange{netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")})
	a := NewAllocator([]Pool{dual, pool("other", "198.51.100.1", "198.51.100.9")})
	several := func(service, families string, n int) Request {
		r := request(service, "", families)
		r.PerFamily = n
		return r
	}
	prefer := several("prefer", "64", 3) // the second family is not to be had: its place is nobody's
	prefer.Families[0].Optional, prefer.Families[1].Optional = true, true
	shares := func(service string, n int) Request {
		r := several(service, "4", n)
		r.ShareKey, r.Ports = "x", []Port{{Port: 80 + uint16(service[0]), Protocol: TCP}}
		return r
	}
	for i, step := range []struct {
		r    Request
		want string
	}{
		{several("a", "4", 1), "[203.0.113.1]"},
		{several("b", "4", 1), "[203.0.113.2]"},
		{several("a", "46", 3), "[203.0.113.1 2001:db8::1 203.0.113.3 2001:db8::2 203.0.113.4]"},
		{several("a", "46", 2), "[203.0.113.1 2001:db8::1 203.0.113.3 2001:db8::2]"},
		{several("c", "4", 9), "[203.0.113.4]"}, // not of the other pool
		{several("d", "4", 3), "[198.51.100.1 198.51.100.2 198.51.100.3]"},
		{prefer, "[198.51.100.4 198.51.100.5 198.51.100.6]"},
		{several("a", "4", 1), "[203.0.113.1]"},
		{shares("e", 2), "[203.0.113.3]"},
		{several("b", "4", 0), "[203.0.113.2]"},
		{shares("f", 2), "[203.0.113.3]"}, // the one that e has, and there is no other
	} {
		got := outcome(a.Assign(step.r))
		if got != step.want {
			t.Errorf("step %d, %s: %s; want %s", i, step.r.Service, got, step.want)
		}
	}
}

// Whatever is assigned and released, no service gets an address of another one that it cannot share, none is assigned
// twice to one, a service has as many as it asks for unless all are in use, and none is lost.
func TestSeveralAtRandom(t *testing.T) {
	const seed = 12
	rng := rand.New(rand.NewPCG(seed, seed))
	a := NewAllocator([]Pool{pool("a", "203.0.113.1", "203.0.113.12")})
	has := map[string]Request{}
	for step := range 5000 {
		r := sharer(fmt.Sprintf("s%02d", rng.IntN(10)), []string{"", "x", "y"}[rng.IntN(3)], uint16(80+rng.IntN(3)))
		r.PerFamily, r.ByName = rng.IntN(5), rng.IntN(2) == 0
		if rng.IntN(3) == 0 {
			a.Release(r.Service)
			delete(has, r.Service)
			continue
		}
		had := a.Given(r.Service)
		got, err := a.Assign(r)
		if err != nil {
			continue
		}
		granted := r
		if len(a.Denied(r.Holder)) > 0 {
			granted.Ports = nil
		}
		has[r.Service] = granted
		usable := 0
		for _, addr := range a.pools[0].addrs() {
			fits := true
			for name, o := range has {
				shares := slices.Contains(had, addr) ||
					r.ShareKey != "" && r.ShareKey == o.ShareKey && !slices.Contains(o.Ports, r.Ports[0])
				fits = fits && (name == r.Service || shares || !slices.Contains(a.Given(name), addr))
			}
			if fits {
				usable++
			} else if slices.Contains(got, addr) {
				t.Fatalf("step %d: %s is assigned to %s and another service", step, addr, r.Service)
			}
		}
		if want := min(max(r.PerFamily, 1), usable); len(got) != want {
			t.Fatalf("step %d: %s has %v; want %d of %d usable ones", step, r.Service, got, want, usable)
		}
		if once := slices.Compact(slices.SortedFunc(slices.Values(got), netip.Addr.Compare)); len(once) != len(got) {
			t.Fatalf("step %d: %s has %v", step, r.Service, got)
		}
	}
}
