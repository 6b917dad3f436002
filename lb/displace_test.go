package lb

import (
	"fmt"
	"testing"
	"time"
)

// aged is a request of a service that was created n minutes after the first.
func aged(service, key string, minute int, ports ...uint16) Request {
	r := sharer(service, key, ports...)
	r.Created, r.ID = time.Unix(0, 0).Add(time.Duration(minute)*time.Minute), "id-"+service
	return r
}

// Of two services that hold an address and may not share it, the one that has not changed keeps it, else the older one,
// whichever is looked at first.
func TestOlderHolderKeepsItsAddress(t *testing.T) {
	old, young, same := aged("old", "", 1, 80), aged("young", "", 2, 80), aged("a-same", "", 1, 80)
	shares, clashes := aged("shares", "x", 0, 80), aged("clashes", "x", 3, 80)
	agreed := aged("young", "x", 2, 80)
	agreed.Agreed = 2
	before := aged("before", "x", 0, 80)
	before.Agreed = 1
	for _, tt := range []struct {
		name    string
		adopt   []Request
		want    string // who has the address
		refused string // about the last one
	}{
		{"the younger one comes second", []Request{old, young}, "old",
			"[203.0.113.1 belongs to old, and cannot be shared with it: both have port 80/tcp]"},
		{"the younger one comes first", []Request{young, old}, "old", "[]"},
		{"equal age: the lower ID", []Request{old, same}, "a-same", "[]"},
		{"equal age, the other way round", []Request{same, old}, "a-same",
			"[203.0.113.1 belongs to a-same, and cannot be shared with it: both have port 80/tcp]"},
		{"the older one has changed, and comes second", []Request{agreed, shares}, "young",
			"[203.0.113.1 belongs to young, and cannot be shared with it: both have port 80/tcp]"},
		{"the older one has changed, and comes first", []Request{shares, agreed}, "young", "[]"},
		{"the older one was agreed on before", []Request{before, agreed}, "young", "[]"},
		{"one port in common", []Request{clashes, shares}, "shares", "[]"},
		{"one key, and none in common", []Request{aged("b", "x", 2, 81), aged("c", "x", 1, 80)}, "b c", "[]"},
	} {
		a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.9")})
		var errs []*AssignError
		for _, r := range tt.adopt {
			errs = a.Adopt(r.Holder, addrs("203.0.113.1"))
		}
		var has string
		for _, name := range []string{"a-same", "b", "before", "c", "old", "shares", "young", "clashes"} {
			if len(a.Given(name)) > 0 {
				has += " " + name
			}
		}
		if has != " "+tt.want || fmt.Sprint(errs) != tt.refused {
			t.Errorf("%s:%s has it, %v; want %s, %s", tt.name, has, errs, tt.want, tt.refused)
		}
	}

	// A change that makes sharing impossible: the younger one gets another address.
	a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.9")})
	first, second := aged("first", "x", 1, 80), aged("second", "x", 2, 81)
	a.Assign(first)
	a.Assign(second)
	first.Ports[0].Port = 81
	if got := outcome(a.Assign(first)); got != "[203.0.113.1]" {
		t.Errorf("the older one got %s", got)
	}
	if got := fmt.Sprint(a.Displaced(), a.Displaced(), a.Given("second")); got != "[second] [] []" {
		t.Errorf("displaced %s; want second, once, without an address", got)
	}
	if got := outcome(a.Assign(second)); got != "[203.0.113.2]" {
		t.Errorf("the younger one got %s", got)
	}
}

// A reservation keeps an address from others that do not have it, and takes it from nobody, however old it is.
func TestReservationTakesNothing(t *testing.T) {
	a := NewAllocator([]Pool{pool("v4", "203.0.113.1", "203.0.113.9")})
	has, thief := aged("has", "", 2, 80), aged("thief", "", 1, 80)
	a.Assign(has)
	a.Reserve(thief.Holder, addrs("203.0.113.1", "203.0.113.2"))
	if got := outcome(a.Assign(has)); got != "[203.0.113.1]" {
		t.Errorf("beside a reservation: %s; want what it had", got)
	}
	has.Addresses = addrs("203.0.113.1")
	if got := outcome(a.Assign(has)); got != "[203.0.113.1]" {
		t.Errorf("asked for by name: %s; want what it had", got)
	}
	if got := outcome(a.Assign(aged("new", "", 0, 80))); got != "[203.0.113.3]" {
		t.Errorf("a new one got %s", got)
	}
}
