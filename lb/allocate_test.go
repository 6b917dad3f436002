package lb

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
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

// request asks for one address of each family: "4", "6" or "46".
func request(service, pool, families string) Request {
	r := Request{Holder: Holder{Service: service}, Pool: pool}
	for _, f := range families {
		r.Families = append(r.Families, FamilyRequest{Family: Family(f - '0')})
	}
	return r
}

func TestAllocate(t *testing.T) {
	v4, v6 := pool("v4", "203.0.113.0", "203.0.113.2"), pool("v6", "2001:db8::1", "2001:db8::1")
	careful, manual := v4, v4
	careful.AvoidBuggy, manual.AutoAssign = true, false
	end := pool("end", "255.255.255.254", "255.255.255.255")
	careful6 := pool("v6", "2001:db8::ff00", "2001:db8::ff01")
	careful6.AvoidBuggy = true
	segment := pool("v6", "2001:db8::", "2001:db8::1")
	segment.AvoidAnycast = true
	first := pool("first", "198.51.100.1", "198.51.100.1")
	first.Priority = -1
	ranges := pool("v4", "203.0.113.9", "203.0.113.9")
	ranges.Ranges = append(ranges.Ranges, AddrRange{v6.Ranges[0].From, v6.Ranges[0].To}, v4.Ranges[0])
	for _, tt := range []struct {
		name           string
		taken          []netip.Addr
		pool, families string
		pools          []Pool
		want           []netip.Addr
		err            string
	}{
		{"lowest free address", nil, "v4", "4", []Pool{v4}, addrs("203.0.113.0"), ""},
		{"taken ones are skipped", addrs("203.0.113.0"), "v4", "4", []Pool{v4}, addrs("203.0.113.1"), ""},
		{"buggy ones are skipped", nil, "v4", "4", []Pool{careful}, addrs("203.0.113.1"), ""},
		{".255 is buggy", nil, "", "4", []Pool{pool("v4", "192.0.2.255", "192.0.3.0")}, addrs("192.0.2.255"), ""},
		{"no IPv6 address is buggy", nil, "v6", "6", []Pool{careful6}, addrs("2001:db8::ff00"), ""},
		{"of routers is skipped", nil, "v6", "6", []Pool{segment}, addrs("2001:db8::1"), ""},
		{"the last IPv4 addresses", addrs("255.255.255.254"), "end", "4", []Pool{end}, addrs("255.255.255.255"), ""},
		{"the last IPv4 address is taken", end.addrs(), "end", "4", []Pool{end}, nil, "no free IPv4 address in end"},
		{"both families from any pool", nil, "", "46", []Pool{v4, v6}, addrs("203.0.113.0", "2001:db8::1"), ""},
		{"in the order asked for", nil, "", "64", []Pool{v4, v6}, addrs("2001:db8::1", "203.0.113.0"), ""},
		{"lowest priority first", nil, "", "4", []Pool{v4, first}, addrs("198.51.100.1"), ""},
		{"ranges in the order given", nil, "", "46", []Pool{ranges}, addrs("203.0.113.9", "2001:db8::1"), ""},
		{"the next range", addrs("203.0.113.9"), "", "4", []Pool{ranges}, addrs("203.0.113.0"), ""},
		{"the next pool", v4.addrs(), "", "4", []Pool{v4, ranges}, addrs("203.0.113.9"), ""},
		{"exhausted", addrs("2001:db8::1"), "v6", "6", []Pool{v4, v6}, nil, "no free IPv6 address in v6"},
		{"exhausted pools", nil, "", "6", []Pool{v4, first}, nil, "no free IPv6 address in first, v4"},
		{"no such pool", nil, "x", "4", []Pool{v4}, nil, `there is no pool "x"`},
		{"only manual pools", nil, "", "4", []Pool{manual}, nil, "no pool has auto_assign = true"},
		{"a manual pool by name", nil, "v4", "4", []Pool{manual}, addrs("203.0.113.0"), ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := NewAllocator(tt.pools)
			a.Take(Holder{Service: "other"}, tt.taken)
			got, err := a.Assign(request("web", tt.pool, tt.families))
			must.Row(t, "error", tt.err, errText(err))
			must.Equal(t, tt.want, got)
			must.Equal(t, tt.want, a.Given("web"))
		})
	}
}

// addrs returns every address of a small pool.
func (p Pool) addrs() (all []netip.Addr) {
	for _, r := range p.Ranges {
		for a := r.From; a.IsValid(); a = r.after(a) {
			all = append(all, a)
		}
	}
	return all
}

func TestAllocationIsSticky(t *testing.T) {
	a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.9")})
	a.Assign(request("first", "", "4"))
	second, _ := a.Assign(request("second", "", "4"))
	a.Release("first")
	again, err := a.Assign(request("second", "", "4"))
	must.True(t, err == nil && slices.Equal(again, second),
		"second has %v (%v) after first was released; want %v as before", again, err, second)
	a = NewAllocator([]Pool{pool("other", "198.51.100.1", "198.51.100.9")})
	a.Take(Holder{Service: "second"}, second)
	moved, err := a.Assign(request("second", "", "4"))
	must.True(t, err == nil && slices.Equal(moved, addrs("198.51.100.1")),
		"second has %v (%v) after its pool is gone; want 198.51.100.1", moved, err)
}

// A service keeps its address in a pool that is no longer auto_assign or no longer allowed, even with another holder,
// but not when it names another pool.
func TestAllocatorEqual(t *testing.T) {
	t.Parallel()
	build := func(change func(*Allocator)) *Allocator {
		a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.9")})
		a.Take(Holder{Service: "a", ShareKey: "k"}, []netip.Addr{netip.MustParseAddr("203.0.113.1")})
		change(a)
		return a
	}
	addr := []netip.Addr{netip.MustParseAddr("203.0.113.2")}
	none := func(*Allocator) {}
	must.True(t, build(none).Equal(build(none)), "equal allocators differ")
	for name, change := range map[string]func(*Allocator){
		"another service":   func(a *Allocator) { a.Take(Holder{Service: "b"}, addr) },
		"another address":   func(a *Allocator) { a.Take(Holder{Service: "a", ShareKey: "k"}, addr) },
		"another key":       func(a *Allocator) { a.Take(Holder{Service: "a"}, a.Given("a")) },
		"a reservation":     func(a *Allocator) { a.Reserve(Holder{Service: "a", ShareKey: "k"}, addr) },
		"another pool":      func(a *Allocator) { a.pools[0].Name = "other" },
		"a released holder": func(a *Allocator) { a.Take(Holder{Service: "b"}, addr); a.Release("b") },
	} {
		must.True(t, !build(none).Equal(build(change)), "%s makes no difference", name)
	}
}

func TestKeep(t *testing.T) {
	manual := pool("manual", "192.0.2.1", "192.0.2.9")
	manual.AutoAssign = false
	denied, autoOnly := func(string) bool { return false }, func(p string) bool { return p == "auto" }
	for name, tt := range map[string]struct {
		change func(*Request)
		holder string // another holder of the address
		want   string
	}{
		"no longer auto_assign":        {func(r *Request) {}, "", "[192.0.2.5]"},
		"named":                        {func(r *Request) { r.Pool = "manual" }, "", "[192.0.2.5]"},
		"another pool is named":        {func(r *Request) { r.Pool = "auto" }, "", "[203.0.113.1]"},
		"no longer allowed":            {func(r *Request) { r.Allows = autoOnly }, "", "[192.0.2.5]"},
		"nothing is allowed":           {func(r *Request) { r.Allows = denied }, "", "[192.0.2.5]"},
		"not allowed, another holder":  {func(r *Request) { r.Allows = denied }, "other", "[192.0.2.5]"},
		"not allowed, two of a family": {func(r *Request) { r.Allows, r.PerFamily = autoOnly, 2 }, "", "[192.0.2.5]"},
		"the named is not allowed": {func(r *Request) {
			r.Allows, r.Pool = denied, "auto"
		}, "", `the pool "auto" does not permit this service`},
		"another holder":   {func(r *Request) {}, "other", "[192.0.2.5]"},
		"the other family": {func(r *Request) { r.Families[0].Family = IPv6 }, "", "no free IPv6 address in auto"},
	} {
		a := NewAllocator([]Pool{pool("auto", "203.0.113.1", "203.0.113.9"), manual})
		a.Take(Holder{Service: "web"}, addrs("192.0.2.5"))
		if tt.holder != "" {
			a.Take(Holder{Service: tt.holder}, addrs("192.0.2.5"))
		}
		r := request("web", "", "4")
		tt.change(&r)
		wantAssigned(t, a, name, r, tt.want)
	}
}

// wantAssigned fails the test unless an Allocator gives a Request these addresses or this error.
func wantAssigned(t *testing.T, a *Allocator, what string, r Request, want string) {
	t.Helper()
	must.Row(t, fmt.Sprintf("%s: %s has", what, r.Service), want, outcome(a.Assign(r)))
}

func outcome(got []netip.Addr, err error) string {
	if err != nil {
		return err.Error()
	}
	return fmt.Sprint(got)
}

func TestAddressesByName(t *testing.T) {
	manual := pool("manual", "192.0.2.0", "192.0.2.9")
	manual.AutoAssign, manual.AvoidBuggy = false, true
	const (
		noFamily   = "2001:db8::1 is requested, but the service has no such family"
		notAllowed = `192.0.2.0 is in the pool "manual", which does not permit this service`
	)
	for name, tt := range map[string]struct {
		families, addr, allowed, want string
	}{
		"free":                 {"4", "203.0.113.7", "auto", "[203.0.113.7]"},
		"of a manual pool":     {"4", "192.0.2.0", "manual", "[192.0.2.0]"},
		"one of two families":  {"64", "203.0.113.7", "auto", "no free IPv6 address in auto"},
		"in no pool":           {"4", "198.51.100.1", "auto", "198.51.100.1 is in no pool"},
		"not allowed":          {"4", "192.0.2.0", "auto", notAllowed},
		"in use":               {"4", "203.0.113.3", "auto", "203.0.113.3 belongs to other"},
		"of no family of it":   {"4", "2001:db8::1", "auto", noFamily},
		"reserved by another":  {"4", "203.0.113.4", "auto", "203.0.113.4 belongs to other"},
		"reserved by itself":   {"4", "203.0.113.5", "auto", "[203.0.113.5]"},
		"reserved, then freed": {"4", "203.0.113.6", "auto", "[203.0.113.6]"},
	} {
		a := NewAllocator([]Pool{pool("auto", "203.0.113.1", "203.0.113.9"), manual})
		a.Reserve(Holder{Service: "other"}, addrs("203.0.113.6"))
		a.Reserve(Holder{Service: "other"}, addrs("203.0.113.3", "203.0.113.4"))
		a.Take(Holder{Service: "other"}, addrs("203.0.113.3"))
		a.Reserve(Holder{Service: "web"}, addrs("203.0.113.5"))
		r := request("web", "", tt.families)
		r.Addresses, r.Allows = addrs(tt.addr), func(p string) bool { return p == tt.allowed }
		wantAssigned(t, a, name, r, tt.want)
	}
}

// An address stays in use until it is neither assigned nor reserved.
func TestReservationAndAssignmentAreApart(t *testing.T) {
	a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.2")})
	first := addrs("203.0.113.1")
	a.Take(Holder{Service: "a"}, first)
	a.Reserve(Holder{Service: "a"}, first)
	for i, step := range []struct {
		do   func()
		want string
	}{
		{func() {}, "[203.0.113.2]"},
		{func() { a.Release("a") }, "[203.0.113.2]"},
		{func() { a.Take(Holder{Service: "a"}, first); a.Reserve(Holder{Service: "a"}, nil) }, "[203.0.113.2]"},
		{func() { a.Release("a") }, "[203.0.113.1]"},
	} {
		step.do()
		a.Release("b")
		wantAssigned(t, a, fmt.Sprint("step ", i), request("b", "", "4"), step.want)
	}
}

func TestOptionalFamily(t *testing.T) {
	for name, tt := range map[string]struct {
		first, second bool // optional
		want          string
	}{
		"both required":     {false, false, "no free IPv6 address in v4"},
		"second optional":   {false, true, "no free IPv6 address in v4"},
		"first optional":    {true, false, "[203.0.113.1]"},
		"both are optional": {true, true, "[203.0.113.1]"},
	} {
		a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.2")})
		r := request("web", "", "64")
		r.Families[0].Optional, r.Families[1].Optional = tt.first, tt.second
		wantAssigned(t, a, name, r, tt.want)
	}
}

// A request that fails for one family changes nothing.
func TestFailureChangesNothing(t *testing.T) {
	a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.2")})
	a.Assign(request("web", "", "4"))
	_, err := a.Assign(request("web", "", "46"))
	must.Need(t, err != nil, "an IPv6 address from an IPv4 pool")
	must.Equal(t, addrs("203.0.113.1"), a.Given("web"))
	wantAssigned(t, a, "a new one", request("b", "", "4"), "[203.0.113.2]")
}

// sharer asks for an IPv4 address that it may share by key, for TCP ports.
func sharer(service, key string, ports ...uint16) Request {
	r := request(service, "", "4")
	r.ShareKey = key
	for _, p := range ports {
		r.Ports = append(r.Ports, Port{Port: p, Protocol: TCP})
	}
	return r
}

func TestShare(t *testing.T) {
	a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.9"), pool("more", "192.0.2.1", "192.0.2.9")})
	udp := sharer("udp", "x", 80)
	udp.Ports[0].Protocol = UDP
	ranged := sharer("range", "x", 400)
	ranged.Ports[0].Last = 500
	byName := sharer("byname", "x", 443)
	byName.Addresses = addrs("203.0.113.1")
	other := sharer("other key", "y", 1)
	other.Addresses = addrs("203.0.113.1")
	manual := sharer("more", "x", 80)
	manual.Pool = "more"
	lower := sharer("lower", "x", 8080)
	for i, step := range []struct {
		r    Request
		want string
	}{
		{sharer("a", "x", 80), "[203.0.113.1]"},
		{sharer("b", "x", 443, 8443), "[203.0.113.1]"},
		{sharer("c", "x", 80), "[203.0.113.2]"},
		{sharer("d", "y", 53), "[203.0.113.3]"},
		{sharer("e", "", 53), "[203.0.113.4]"},
		{udp, "[203.0.113.1]"},
		{ranged, "[203.0.113.2]"},
		{byName, "203.0.113.1 belongs to b, and cannot be shared with it because both have port 443/tcp"},
		{other, "203.0.113.1 belongs to a"},
		{sharer("f", "x", 80), "[203.0.113.5]"},
		{manual, "[192.0.2.1]"},
		{lower, "[192.0.2.1]"}, // the lowest address, whatever the order of pools
	} {
		wantAssigned(t, a, fmt.Sprint("step ", i), step.r, step.want)
	}
	a.Release("a") // 80 is free at .1 again, which b still holds
	wantAssigned(t, a, "after a release", sharer("g", "x", 80), "[203.0.113.1]")
	wantAssigned(t, a, "with another key", sharer("b", "z", 443, 8443), "[203.0.113.1]")
	wantAssigned(t, a, "beside another key", sharer("h", "x", 9000), "[192.0.2.1]")
	must.Need(t, len(a.shared) != 0, "no address is shared")
	for service := range a.assigned {
		a.Release(service)
	}
	must.True(t, len(a.shared)+len(a.holders)+len(a.assigned) == 0,
		"after all are released: %v, %v, %v", a.shared, a.holders, a.assigned)
}

// A service with a share key is assigned an address that it has reserved, even after the address was found in use for
// another service with the same ports.
func TestShareOwnReservation(t *testing.T) {
	a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.9")})
	own := sharer("own", "x", 80)
	a.Reserve(own.Holder, addrs("203.0.113.2", "192.0.2.1"))
	for _, step := range []struct {
		r    Request
		want string
	}{
		{sharer("other", "x", 80), "[203.0.113.1]"},
		{own, "[203.0.113.2]"},
		{sharer("third", "x", 80), "[203.0.113.3]"},
	} {
		wantAssigned(t, a, step.r.Service, step.r, step.want)
	}
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
