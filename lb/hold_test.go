package lb

import (
	"fmt"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// aged returns a request of a service that was created n minutes after the first.
func aged(service, key string, minute int, ports ...uint16) Request {
	r := sharer(service, key, ports...)
	r.Created, r.ID = time.Unix(0, 0).Add(time.Duration(minute)*time.Minute), "id-"+service
	return r
}

// A service keeps its address, and does not get a port of another service that shares it, whatever is changed, and
// however old the two are.
func TestFirstHolderKeeps(t *testing.T) {
	const same = "[203.0.113.1]"
	for _, tt := range []struct {
		name   string
		change func(first, second *Request)
		denied string // of the first one, then of the second one
	}{
		{"nothing", func(_, _ *Request) {}, "[] []"},
		{"a port of the other one", func(first, _ *Request) {
			first.Ports = append(first.Ports, Port{Port: 443, Protocol: TCP})
		}, "[203.0.113.1 belongs to second, and cannot be shared with it because both have port 443/tcp] []"},
		{"only a port of the other one", func(first, _ *Request) { first.Ports[0].Port = 443 },
			"[203.0.113.1 belongs to second, and cannot be shared with it because both have port 443/tcp] []"},
		{"the younger one, a port of the other one", func(_, second *Request) {
			second.Ports = append(second.Ports, Port{Port: 80, Protocol: TCP})
		}, "[] [203.0.113.1 belongs to first, and cannot be shared with it because both have port 80/tcp]"},
		{"another port", func(first, _ *Request) { first.Ports[0].Port = 81 }, "[] []"},
		{"the key", func(first, _ *Request) { first.ShareKey = "y" }, "[] []"},
		{"the address by name, no key", func(_, second *Request) {
			second.ShareKey, second.Addresses = "", addrs("203.0.113.1")
		}, "[] []"},
	} {
		a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.9")})
		first, second := aged("first", "x", 1, 80), aged("second", "x", 2, 443)
		for range 2 {
			for _, r := range []Request{first, second, first} {
				wantAssigned(t, a, tt.name, r, same)
			}
			tt.change(&first, &second)
			tt.change = func(_, _ *Request) {}
		}
		must.Row(t, tt.name, tt.denied, fmt.Sprint(a.Denied(first.Holder), a.Denied(second.Holder)))
		third := sharer("third", "x", 443)
		third.Addresses = addrs("203.0.113.1")
		got := outcome(a.Assign(third))
		must.True(t, got != same, "%s: a third one got %s with port 443", tt.name, got)
	}
}

// A service that waits for a port can have it when the other service no longer has it.
func TestDeniedPortIsFreed(t *testing.T) {
	a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.9")})
	first, second := aged("first", "x", 1, 80), aged("second", "x", 2, 443)
	a.Assign(first)
	a.Assign(second)
	first.Ports = append(first.Ports, Port{Port: 443, Protocol: TCP})
	a.Assign(first)
	a.Freed()
	a.Assign(first)
	must.True(t, !a.Freed(), "the same request again has freed something")
	must.True(t, a.Shares("first") && !a.Shares("third"), "first shares its address, and third has none")
	a.Release("second")
	must.True(t, a.Freed() && len(a.Denied(first.Holder)) == 0 && !a.Shares("first"),
		"after the release: denied %v", a.Denied(first.Holder))
}

// A port that two services claim belongs to the one created first, then to the one with the lower ID, in whatever order
// they are adopted.
func TestPortOfTwoHolders(t *testing.T) {
	old, young, same := aged("old", "", 1, 80), aged("young", "", 2, 80), aged("a-same", "", 1, 80)
	for _, tt := range []struct {
		adopt []Request
		want  string // who has the port
	}{
		{[]Request{old, young}, "old"},
		{[]Request{young, old}, "old"},
		{[]Request{old, same}, "a-same"},
		{[]Request{same, old}, "a-same"},
	} {
		a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.9")})
		for _, r := range tt.adopt {
			a.Take(r.Holder, addrs("203.0.113.1"))
		}
		for range 2 {
			var has []string
			for _, r := range tt.adopt {
				wantAssigned(t, a, "", r, "[203.0.113.1]")
				if len(a.Denied(r.Holder)) == 0 {
					has = append(has, r.Service)
				}
			}
			must.True(t, fmt.Sprint(has) == "["+tt.want+"]", "%v have the port; want %s", has, tt.want)
		}
	}
}

// A reservation keeps an address from services that do not have it, but takes it from none, however old the reservation
// is.
func TestReservationTakesNothing(t *testing.T) {
	a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.9")})
	has, thief := aged("has", "", 2, 80), aged("thief", "", 1, 80)
	a.Assign(has)
	a.Reserve(thief.Holder, addrs("203.0.113.1", "203.0.113.2"))
	wantAssigned(t, a, "beside a reservation", has, "[203.0.113.1]")
	must.Row(t, "denied", nil, a.Denied(has.Holder))
	has.Addresses = addrs("203.0.113.1")
	wantAssigned(t, a, "asked for by name", has, "[203.0.113.1]")
	wantAssigned(t, a, "a new one", aged("new", "", 0, 80), "[203.0.113.3]")
}
