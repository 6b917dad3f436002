package lb

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"
)

// Holder is the part of a service that determines whether it can share an address.
type Holder struct {
	Service string
	// ShareKey lets services share an address if all have the same non-empty key and no port in common. A service that
	// has the address keeps it even if keys change.
	ShareKey string
	// Namespace is the scope of the ShareKey. A service in another namespace may join only if ShareWith names that
	// namespace.
	Namespace string
	ShareWith []string
	Ports     []Port
	// Created and ID resolve port conflicts: of two services, the one created first gets the port, then the one with
	// the lower ID.
	Created time.Time
	ID      string
}

func (h Holder) equal(o Holder) bool {
	return h.Service == o.Service && h.ShareKey == o.ShareKey && h.Namespace == o.Namespace &&
		slices.Equal(h.ShareWith, o.ShareWith) && slices.Equal(h.Ports, o.Ports) &&
		h.Created.Equal(o.Created) && h.ID == o.ID
}

// Request is the set of addresses that a service needs.
type Request struct {
	Holder
	// Families lists the families in which the service needs an address, in the order of the result.
	Families []FamilyRequest
	// PerFamily is the number of addresses per family, fewer if the first one's pool runs out. 0 means 1.
	PerFamily int
	// Pool is the pool to assign from, or "" for the AutoAssign pools.
	Pool string
	// Addresses are requested explicitly, at most one per family. They take precedence over Pool.
	Addresses []netip.Addr
	// Allows reports whether the service may be assigned addresses from a pool. Nil allows all pools.
	Allows func(pool string) bool
	// ByName chooses a new address by the service's name instead of the lowest free one.
	ByName bool

	chosen []netip.Addr // by Assign so far
}

// FamilyRequest requests one address. If it is Optional and cannot be met, Assign leaves it out of the result.
type FamilyRequest struct {
	Family   Family
	Optional bool
}

func (r *Request) allows(p Pool) bool { return r.Allows == nil || r.Allows(p.Name) }

// Allocator assigns VIPs to services. A service keeps an address until it is released or its pool no longer contains
// it; neither the order of pools nor other services change it. A new address is the lowest free one of the first range
// of the first pool that has one. If services share an address, each port belongs to only one of them.
//
// The cost of a call does not depend on the number of assigned addresses or the size of the pools. An Allocator is a
// deterministic state machine for use by one goroutine.
type Allocator struct {
	pools    []Pool                   // by Priority
	free     [][]scan                 // indexed by pool and range
	shared   map[shareKey]*shareGroup // no group is empty
	assigned map[string][]netip.Addr  // by service, in the order of its families
	reserved map[string][]netip.Addr  // by service
	holders  map[netip.Addr][]Holder  // sorted by service name; no list is empty
	freed    bool                     // an address has lost a holder
}

// NewAllocator returns an Allocator that has assigned nothing.
func NewAllocator(pools []Pool) *Allocator {
	a := &Allocator{
		pools: slices.Clone(pools), shared: map[shareKey]*shareGroup{},
		assigned: map[string][]netip.Addr{}, reserved: map[string][]netip.Addr{},
		holders: map[netip.Addr][]Holder{},
	}
	slices.SortStableFunc(a.pools, func(p, q Pool) int { return p.Priority - q.Priority })
	for _, p := range a.pools {
		scans := make([]scan, len(p.Ranges))
		for i, r := range p.Ranges {
			scans[i].next = r.From
		}
		a.free = append(a.free, scans)
	}
	return a
}

// Equal reports whether a and b are in the same state.
func (a *Allocator) Equal(b *Allocator) bool {
	holders := func(x, y []Holder) bool { return slices.EqualFunc(x, y, Holder.equal) }
	return a.freed == b.freed && reflect.DeepEqual(a.pools, b.pools) && reflect.DeepEqual(a.free, b.free) &&
		reflect.DeepEqual(a.shared, b.shared) && maps.EqualFunc(a.assigned, b.assigned, slices.Equal) &&
		maps.EqualFunc(a.reserved, b.reserved, slices.Equal) && maps.EqualFunc(a.holders, b.holders, holders)
}

// Given returns the addresses assigned to a service, in the order of its families.
func (a *Allocator) Given(service string) []netip.Addr { return slices.Clone(a.assigned[service]) }

// Take assigns exactly these addresses to a service, even if others hold them, and releases its previous ones.
func (a *Allocator) Take(h Holder, addrs []netip.Addr) { a.replace(a.assigned, h, addrs) }

// Release releases the addresses assigned to a service.
func (a *Allocator) Release(service string) { a.Take(Holder{Service: service}, nil) }

// Reserve makes a service a holder of the addresses that its specification names (Kubernetes: externalIPs), in addition
// to its assigned ones. It replaces the previous reservation. A reserved address is not assigned to other services, but
// a service that already has it keeps it.
func (a *Allocator) Reserve(h Holder, addrs []netip.Addr) { a.replace(a.reserved, h, addrs) }

// Assign assigns and returns one address for each family of r, followed by the additional ones of PerFamily. It
// prefers, in this order, the requested address, the service's current one, the lowest that it may share, and a free
// one. On failure it returns an *AssignError and changes nothing. At least one family must succeed, even if all are
// optional. The service does not get ports that are Denied.
func (a *Allocator) Assign(r Request) ([]netip.Addr, error) {
	r.chosen = nil
	var missing error
	for _, f := range r.Families {
		switch addr, err := a.find(&r, f.Family); {
		case err == nil:
			r.chosen = append(r.chosen, addr)
		case !f.Optional:
			return nil, err
		case missing == nil:
			missing = err
		}
	}
	if len(r.chosen) == 0 && missing != nil {
		return nil, missing
	}
	for _, addr := range r.Addresses {
		if !slices.Contains(r.chosen, addr) {
			return nil, &AssignError{Cause: FamilyNotRequested, Addr: addr}
		}
	}
	one := slices.Clone(r.chosen)
	for n := 1; n < r.PerFamily; n++ { // scans have passed the chosen addresses, so nothing may fail from here on
		for _, first := range one {
			pools := []int{a.poolOf(first)}
			if !r.allows(a.pools[pools[0]]) {
				pools = nil
			}
			if addr := a.choose(&r, FamilyOf(first), pools); addr.IsValid() {
				r.chosen = append(r.chosen, addr)
			}
		}
	}
	a.Take(a.granted(r.Holder, r.chosen), r.chosen)
	return r.chosen, nil
}

// find returns an address in one family for r.
func (a *Allocator) find(r *Request, f Family) (netip.Addr, error) {
	for _, addr := range r.Addresses {
		if FamilyOf(addr) == f {
			return addr, a.mayHold(r, addr)
		}
	}
	pools, err := a.poolsFor(r)
	if err == nil || r.Pool == "" { // a service that names no pool keeps its address
		if addr := a.choose(r, f, pools); addr.IsValid() {
			return addr, nil
		}
	}
	if err == nil {
		err = &AssignError{Cause: NoFreeAddress, Family: f, Pools: a.names(pools)}
	}
	return netip.Addr{}, err
}

// choose returns an address of family f that is not chosen yet: the service's current one, one from pools, or zero.
func (a *Allocator) choose(r *Request, f Family, pools []int) netip.Addr {
	for _, addr := range a.assigned[r.Service] {
		if FamilyOf(addr) == f && !slices.Contains(r.chosen, addr) && a.keeps(r, addr, pools) {
			return addr
		}
	}
	if r.ShareKey != "" {
		if addr := a.lowestShared(r, f, pools); addr.IsValid() {
			return addr
		}
	}
	for _, p := range pools {
		if r.ByName {
			if addr := a.byName(r, f, p); addr.IsValid() {
				return addr
			}
		}
		for i, ar := range a.pools[p].Ranges {
			if FamilyOf(ar.From) != f {
				continue
			}
			fits := func(addr netip.Addr) bool { return a.isFree(r, p, addr) }
			if addr := a.free[p][i].lowest(fits, ar.after); addr.IsValid() {
				return addr
			}
		}
	}
	return netip.Addr{}
}

// isFree reports whether addr has no holder and may be assigned to r from pool.
func (a *Allocator) isFree(r *Request, pool int, addr netip.Addr) bool {
	return a.holders[addr] == nil && a.pools[pool].assignable(addr) && !slices.Contains(r.chosen, addr)
}

// mayShare reports whether r may share an address that is in use.
func (a *Allocator) mayShare(r *Request, addr netip.Addr) bool {
	return a.conflict(r.Holder, addr) == nil && !slices.Contains(r.chosen, addr)
}

// poolsFor returns the pools from which r may be assigned addresses, best first.
func (a *Allocator) poolsFor(r *Request) (pools []int, err error) {
	for i, p := range a.pools {
		switch {
		case r.Pool != "" && p.Name != r.Pool || r.Pool == "" && !p.AutoAssign:
		case r.allows(p):
			pools = append(pools, i)
		case r.Pool != "":
			return nil, &AssignError{Cause: PoolNotAllowed, Pools: []string{r.Pool}}
		}
	}
	switch {
	case len(pools) > 0:
		return pools, nil
	case r.Pool != "":
		return nil, &AssignError{Cause: NoSuchPool, Pools: []string{r.Pool}}
	}
	return nil, &AssignError{Cause: NoPool}
}

// keeps reports whether a service keeps addr. If r names no pool, the address may be in any pool, even one that is no
// longer AutoAssign or allowed.
func (a *Allocator) keeps(r *Request, addr netip.Addr, pools []int) bool {
	p := a.poolOf(addr)
	return p >= 0 && (r.Pool == "" || slices.Contains(pools, p))
}

// lowestShared returns the lowest address in use that r may share, or zero.
func (a *Allocator) lowestShared(r *Request, f Family, pools []int) (lowest netip.Addr) {
	for _, addr := range a.reserved[r.Service] { // a scan may have passed an address that only r can share
		usable := FamilyOf(addr) == f && slices.Contains(pools, a.poolOf(addr)) && a.mayShare(r, addr)
		if usable && (!lowest.IsValid() || addr.Less(lowest)) {
			lowest = addr
		}
	}
	ports := r.Namespace + " " + signature(r.Ports)
	for _, p := range pools {
		g := a.shared[shareKey{p, f, r.ShareKey}]
		if g == nil {
			continue
		}
		addr := g.lowest(ports, func(addr netip.Addr) bool { return a.mayShare(r, addr) })
		if addr.IsValid() && (!lowest.IsValid() || addr.Less(lowest)) {
			lowest = addr
		}
	}
	return lowest
}

// mayHold returns nil if r may have addr. Otherwise addr is in no pool that r may use, or another service has it and
// does not share it.
func (a *Allocator) mayHold(r *Request, addr netip.Addr) error {
	p := a.poolOf(addr)
	if p < 0 {
		return &AssignError{Cause: AddrInNoPool, Addr: addr}
	}
	if !r.allows(a.pools[p]) {
		return &AssignError{Cause: AddrNotAllowed, Addr: addr, Pools: []string{a.pools[p].Name}}
	}
	if err := a.conflict(r.Holder, addr); err != nil && !a.isAssigned(r.Service, addr) {
		return err
	}
	return nil
}

// replace sets the addresses of a service in list, which is a.assigned or a.reserved.
func (a *Allocator) replace(list map[string][]netip.Addr, h Holder, addrs []netip.Addr) {
	old := list[h.Service]
	if len(addrs) == 0 {
		delete(list, h.Service)
	} else {
		list[h.Service] = slices.Clone(addrs)
	}
	for _, addr := range old {
		if !slices.Contains(a.assigned[h.Service], addr) && !slices.Contains(a.reserved[h.Service], addr) {
			a.drop(h.Service, addr)
		}
	}
	for _, addr := range addrs {
		a.hold(h, addr)
	}
}

// holder returns the index at which service is or would be in the list of holders of addr.
func (a *Allocator) holder(addr netip.Addr, service string) (i int, found bool) {
	return slices.BinarySearchFunc(a.holders[addr], service, func(h Holder, s string) int {
		return strings.Compare(h.Service, s)
	})
}

// hold makes h a holder of addr.
func (a *Allocator) hold(h Holder, addr netip.Addr) {
	i, held := a.holder(addr, h.Service)
	if held {
		if a.holders[addr][i].equal(h) {
			return
		}
		a.drop(h.Service, addr)
	}
	h.Ports = slices.Clone(h.Ports)
	a.holders[addr] = slices.Insert(a.holders[addr], i, h)
	p := a.poolOf(addr)
	if p < 0 || h.ShareKey == "" {
		return
	}
	key := shareKey{p, FamilyOf(addr), h.ShareKey}
	if a.shared[key] == nil {
		a.shared[key] = &shareGroup{}
	}
	a.shared[key].add(addr)
}

// drop removes a service from the holders of addr, so that others may have or share it.
func (a *Allocator) drop(service string, addr netip.Addr) {
	a.freed = true
	i, found := a.holder(addr, service)
	if !found {
		return
	}
	keys := map[string]bool{a.holders[addr][i].ShareKey: false}
	a.holders[addr] = slices.Delete(a.holders[addr], i, i+1)
	for _, h := range a.holders[addr] {
		keys[h.ShareKey] = true
	}
	if len(a.holders[addr]) == 0 {
		delete(a.holders, addr)
	}
	p := a.poolOf(addr)
	if p < 0 {
		return
	}
	for i, r := range a.pools[p].Ranges {
		if len(a.holders[addr]) == 0 && r.Contains(addr) {
			a.free[p][i].put(addr)
		}
	}
	for key, member := range keys {
		group := shareKey{p, FamilyOf(addr), key}
		g := a.shared[group]
		if g == nil {
			continue // the key is ""
		}
		if member {
			g.put(addr)
		} else if g.remove(addr); len(g.members) == 0 {
			delete(a.shared, group)
		}
	}
}

// poolOf returns the index of the pool that contains addr, or -1.
func (a *Allocator) poolOf(addr netip.Addr) int {
	return slices.IndexFunc(a.pools, func(p Pool) bool { return p.Contains(addr) })
}

func (a *Allocator) names(pools []int) (names []string) {
	for _, p := range pools {
		names = append(names, a.pools[p].Name)
	}
	return names
}

// signature returns the same text for the same ports in any order.
func signature(ports []Port) string {
	names := make([]string, len(ports))
	for i, p := range ports {
		names[i] = p.Name()
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}
