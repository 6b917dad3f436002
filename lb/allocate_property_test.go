package lb

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// exhaustive is a model of Assign for one IPv4 address per service: it applies the rules to every address in turn.
type exhaustive struct {
	pools []Pool             // by priority
	has   map[string]Request // with the ports that it has
	at    map[string]netip.Addr
}

func (m *exhaustive) fits(r Request, addr netip.Addr) bool {
	for name, o := range m.has {
		if name == r.Service || m.at[name] != addr {
			continue
		}
		clash := slices.ContainsFunc(r.Ports, func(p Port) bool { return slices.ContainsFunc(o.Ports, p.Overlaps) })
		if r.ShareKey == "" || r.ShareKey != o.ShareKey || clash {
			return false
		}
	}
	return true
}

func (m *exhaustive) find(r Request) netip.Addr {
	if at := m.at[r.Service]; at.IsValid() {
		return at
	}
	if r.ShareKey != "" {
		for _, addr := range slices.SortedFunc(maps.Values(m.at), netip.Addr.Compare) {
			if m.fits(r, addr) {
				return addr
			}
		}
	}
	for _, p := range m.pools {
		for _, addr := range p.addrs() {
			if !slices.Contains(slices.Collect(maps.Values(m.at)), addr) && p.assignable(addr) {
				return addr
			}
		}
	}
	return netip.Addr{}
}

// granted returns r with the ports that no other service has at its address.
func (m *exhaustive) granted(r Request) Request {
	r.Ports = slices.DeleteFunc(slices.Clone(r.Ports), func(p Port) bool {
		for name, o := range m.has {
			if name != r.Service && m.at[name] == m.at[r.Service] && slices.ContainsFunc(o.Ports, p.Overlaps) {
				return true
			}
		}
		return false
	})
	return r
}

// Assign gives the same results as an exhaustive search: the lowest address that fits, no address for two services that
// do not share it, no port for two services, no address taken from a service, and released addresses available again.
func TestAssignAgainstExhaustiveSearch(t *testing.T) {
	const seed = 14
	rng := rand.New(rand.NewPCG(seed, seed))
	for round := range 50 {
		pools := []Pool{pool("a", "203.0.113.250", "203.0.114.3"), pool("b", "192.0.2.1", "192.0.2.8")}
		pools[0].AvoidBuggy = round%2 == 0
		a := NewAllocator(pools)
		m := &exhaustive{pools: pools, has: map[string]Request{}, at: map[string]netip.Addr{}}
		for step := range 400 {
			r := sharer(fmt.Sprintf("s%02d", rng.IntN(30)), []string{"", "x", "y"}[rng.IntN(3)])
			if rng.IntN(3) == 0 {
				a.Release(r.Service)
				delete(m.has, r.Service)
				delete(m.at, r.Service)
				continue
			}
			for range 1 + rng.IntN(2) {
				r.Ports = append(r.Ports, Port{Port: uint16(80 + rng.IntN(4)), Protocol: TCP})
			}
			want := m.find(r)
			if want.IsValid() {
				m.at[r.Service] = want
				m.has[r.Service] = m.granted(r)
			}
			got, err := a.Assign(r)
			denied := len(r.Ports) - len(m.has[r.Service].Ports)
			if want.IsValid() && len(a.Denied(r.Holder)) != denied {
				t.Fatalf("seed %d, round %d, step %d: %+v is denied %v; want %d ports",
					seed, round, step, r, a.Denied(r.Holder), denied)
			}
			if want.IsValid() != (err == nil) || want.IsValid() && got[0] != want {
				t.Fatalf("seed %d, round %d, step %d: Assign(%+v) = %v, %v; want %v",
					seed, round, step, r, got, err, want)
			}
		}
	}
}

// A pool of 2^64 addresses is searched as fast as any other, and its full ranges are not scanned twice.
func TestLargePool(t *testing.T) {
	a := NewAllocator([]Pool{pool("v6", "2001:db8::", "2001:db8::ffff:ffff:ffff:ffff")})
	for i := range 1000 {
		want := netip.AddrFrom16([16]byte{0x20, 0x01, 0x0d, 0xb8, 14: byte(i >> 8), 15: byte(i)})
		got := outcome(a.Assign(request(fmt.Sprint(i), "", "6")))
		must.Need(t, got == fmt.Sprint([]netip.Addr{want}), "address %d: %s; want %s", i, got, want)
	}
	a.Release("700")
	a.Release("300")
	wantAssigned(t, a, "after two releases", request("x", "", "6"), "[2001:db8::12c]")
}

// The cost of assigning and releasing an address does not depend on the number of assigned ones. With a share key all
// services have the same port, so that no shared address fits.
func BenchmarkAssign(b *testing.B) {
	for _, key := range []string{"", "shared"} {
		for _, given := range []int{100, 1000, 10_000, 100_000} {
			b.Run(fmt.Sprintf("key=%q/given=%d", key, given), func(b *testing.B) {
				a := NewAllocator([]Pool{pool("v4", "10.0.0.0", "10.255.255.255")})
				for i := range given {
					must.Get(a.Assign(sharer(fmt.Sprint(i), key, 80)))(b)
				}
				r := sharer("new", key, 80)
				for b.Loop() {
					must.Get(a.Assign(r))(b)
					a.Release("new")
				}
			})
		}
	}
}

// A service gets as many addresses of a family as it requests, if the pool of the first one has them. It keeps its
// addresses, and releases any that it no longer requests.
func TestSeveralOfAFamily(t *testing.T) {
	dual := pool("dual", "203.0.113.1", "203.0.113.4")
	dual.Ranges = append(dual.Ranges, AddrRange{netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("2001:db8::2")})
	a := NewAllocator([]Pool{dual, pool("other", "198.51.100.1", "198.51.100.9")})
	several := func(service, families string, n int) Request {
		r := request(service, "", families)
		r.PerFamily = n
		return r
	}
	prefer := several("prefer", "64", 3) // the second family is unavailable
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
		{several("c", "4", 9), "[203.0.113.4]"}, // not from the other pool
		{several("d", "4", 3), "[198.51.100.1 198.51.100.2 198.51.100.3]"},
		{prefer, "[198.51.100.4 198.51.100.5 198.51.100.6]"},
		{several("a", "4", 1), "[203.0.113.1]"},
		{shares("e", 2), "[203.0.113.3]"},
		{several("b", "4", 0), "[203.0.113.2]"},
		{shares("f", 2), "[203.0.113.3]"}, // the address of e, and there is no other
	} {
		wantAssigned(t, a, fmt.Sprint("step ", i), step.r, step.want)
	}
}

// After random assignments and releases, no service has an address that it cannot share with its other holder, or the
// same address twice. Each has as many as it requests unless all are in use, and no address is lost.
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
		once := slices.Compact(slices.SortedFunc(slices.Values(got), netip.Addr.Compare))
		must.Need(t, len(once) == len(got), "step %d: %s has %v", step, r.Service, got)
	}
}
