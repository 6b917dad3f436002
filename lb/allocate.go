package lb

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Pool is a named set of address ranges that VIPs may come from. Ranges of all pools are disjoint.
type Pool struct {
	Name   string
	Ranges []AddrRange
	// AutoAssign pools serve requests that name no pool; the lowest Priority first, then in the order given.
	AutoAssign bool
	Priority   int
	// AvoidBuggy skips IPv4 addresses that end in .0 or .255, which some old equipment drops.
	AvoidBuggy bool
	Announce   []AnnouncerKind
}

// AddrRange is From to To, inclusive, both of one family.
type AddrRange struct{ From, To netip.Addr }

// Contains reports whether a is in r.
func (r AddrRange) Contains(a netip.Addr) bool {
	return r.From.Is4() == a.Is4() && r.From.Compare(a) <= 0 && a.Compare(r.To) <= 0
}

// PoolOf returns the pool that has addr, or nil.
func PoolOf(pools []Pool, addr netip.Addr) *Pool {
	for i := range pools {
		if slices.ContainsFunc(pools[i].Ranges, func(r AddrRange) bool { return r.Contains(addr) }) {
			return &pools[i]
		}
	}
	return nil
}

// Allocator gives VIPs to services. An address once given stays with its service until it is released or its pool has
// it no more: the order of pools and services does not move it. It is a pure state machine for one goroutine.
type Allocator struct {
	given map[string][]netip.Addr            // by service, in the order of its families
	users map[netip.Addr]map[string]struct{} // services of an address
}

// NewAllocator returns an Allocator that has given nothing.
func NewAllocator() *Allocator {
	return &Allocator{given: map[string][]netip.Addr{}, users: map[netip.Addr]map[string]struct{}{}}
}

// Take gives a service exactly these addresses, whether others have them or not: the caller knows that they may be
// shared. It releases what the service had before.
func (a *Allocator) Take(service string, addrs []netip.Addr) {
	a.Release(service)
	a.given[service] = slices.Clone(addrs)
	for _, addr := range addrs {
		if a.users[addr] == nil {
			a.users[addr] = map[string]struct{}{}
		}
		a.users[addr][service] = struct{}{}
	}
}

// Allocate returns an address for service from the pool of that name, or from any AutoAssign pool when pool is "".
// want4 and want6 say which families are needed. What the service already has is kept where it still fits. It fails,
// and changes nothing, when the pool does not exist or has no free address of a family.
func (a *Allocator) Allocate(service, pool string, want4, want6 bool, pools []Pool) ([]netip.Addr, error) {
	from, err := choosePools(pool, pools)
	if err != nil {
		return nil, err
	}
	var addrs []netip.Addr
	for _, family := range []struct {
		is4, wanted bool
		name        string
	}{{true, want4, "IPv4"}, {false, want6, "IPv6"}} {
		if !family.wanted {
			continue
		}
		addr, ok := a.keep(service, family.is4, from)
		if !ok {
			addr, ok = a.free(family.is4, from)
		}
		if !ok {
			return nil, fmt.Errorf("no free %s address in %s", family.name, poolNames(from))
		}
		addrs = append(addrs, addr)
	}
	a.Take(service, addrs)
	return addrs, nil
}

// Release takes back what a service has.
func (a *Allocator) Release(service string) {
	for _, addr := range a.given[service] {
		delete(a.users[addr], service)
		if len(a.users[addr]) == 0 {
			delete(a.users, addr)
		}
	}
	delete(a.given, service)
}

// Given returns what a service has.
func (a *Allocator) Given(service string) []netip.Addr { return slices.Clone(a.given[service]) }

func (a *Allocator) keep(service string, is4 bool, from []Pool) (netip.Addr, bool) {
	for _, addr := range a.given[service] {
		if addr.Is4() == is4 && PoolOf(from, addr) != nil {
			return addr, true
		}
	}
	return netip.Addr{}, false
}

func (a *Allocator) free(is4 bool, from []Pool) (netip.Addr, bool) {
	for _, p := range from {
		for _, r := range p.Ranges {
			if r.From.Is4() != is4 {
				continue
			}
			for addr := r.From; r.Contains(addr); addr = addr.Next() {
				if _, used := a.users[addr]; !used && !(p.AvoidBuggy && buggy(addr)) {
					return addr, true
				}
			}
		}
	}
	return netip.Addr{}, false
}

func choosePools(name string, pools []Pool) ([]Pool, error) {
	if name != "" {
		for _, p := range pools {
			if p.Name == name {
				return []Pool{p}, nil
			}
		}
		return nil, fmt.Errorf("there is no pool %q", name)
	}
	var from []Pool
	for _, p := range pools {
		if p.AutoAssign {
			from = append(from, p)
		}
	}
	if len(from) == 0 {
		return nil, errors.New("no pool has auto_assign")
	}
	slices.SortStableFunc(from, func(a, b Pool) int { return a.Priority - b.Priority })
	return from, nil
}

func buggy(a netip.Addr) bool {
	if !a.Is4() {
		return false
	}
	last := a.As4()[3]
	return last == 0 || last == 255
}

func poolNames(pools []Pool) string {
	names := make([]string, len(pools))
	for i, p := range pools {
		names[i] = p.Name
	}
	return strings.Join(names, ", ")
}
