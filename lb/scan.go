package lb

import (
	"container/heap"
	"net/netip"
	"slices"
)

// scan finds the lowest address in an ordered set that meets a condition. It keeps a cursor and tests each address
// once. It tests an address behind the cursor again only after put. The cost of a search thus does not grow with the
// number of assigned addresses, and an IPv6 /64 takes no memory.
type scan struct {
	next     netip.Addr // the first address not passed yet; zero if all are passed
	returned addrHeap   // passed addresses that may meet the condition again
	queued   map[netip.Addr]struct{}
}

// lowest returns the lowest address that fits, or zero, and passes the addresses that do not. after returns the next
// address in the set, or zero at the end.
func (s *scan) lowest(fits func(netip.Addr) bool, after func(netip.Addr) netip.Addr) netip.Addr {
	for len(s.returned) > 0 {
		if addr := s.returned[0]; fits(addr) {
			return addr // lower than next: only passed addresses are returned
		}
		delete(s.queued, heap.Pop(&s.returned).(netip.Addr))
	}
	for s.next.IsValid() && !fits(s.next) {
		s.next = after(s.next)
	}
	return s.next
}

// put makes lowest test addr again, or for the first time if addr was just added to the set.
func (s *scan) put(addr netip.Addr) {
	if s.next.IsValid() && !addr.Less(s.next) {
		return // not passed yet
	}
	if _, twice := s.queued[addr]; twice {
		return
	}
	if s.queued == nil {
		s.queued = map[netip.Addr]struct{}{}
	}
	s.queued[addr] = struct{}{}
	heap.Push(&s.returned, addr)
}

// addrHeap is a min-heap.
type addrHeap []netip.Addr

func (h addrHeap) Len() int           { return len(h) }
func (h addrHeap) Less(i, j int) bool { return h[i].Less(h[j]) }
func (h addrHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *addrHeap) Push(x any)        { *h = append(*h, x.(netip.Addr)) }
func (h *addrHeap) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	*h = (*h)[:last]
	return x
}

// shareKey identifies the addresses of one family and pool that services with the same share key hold.
type shareKey struct {
	pool   int
	family Family
	key    string
}

// shareGroup holds the addresses of one shareKey.
type shareGroup struct {
	members []netip.Addr     // ascending
	scans   map[string]*scan // where requests may fit, by their namespace and ports
}

func (g *shareGroup) contains(addr netip.Addr) bool {
	_, found := slices.BinarySearchFunc(g.members, addr, netip.Addr.Compare)
	return found
}

func (g *shareGroup) add(addr netip.Addr) {
	i, found := slices.BinarySearchFunc(g.members, addr, netip.Addr.Compare)
	if found {
		return
	}
	g.members = slices.Insert(g.members, i, addr)
	g.put(addr)
}

// remove removes addr from the members.
func (g *shareGroup) remove(addr netip.Addr) {
	if i, found := slices.BinarySearchFunc(g.members, addr, netip.Addr.Compare); found {
		g.members = slices.Delete(g.members, i, i+1)
	}
}

// put makes every scan test addr again.
func (g *shareGroup) put(addr netip.Addr) {
	for _, s := range g.scans {
		s.put(addr)
	}
}

// lowest returns the lowest member that fits a request with this namespace and these ports, or zero.
func (g *shareGroup) lowest(ports string, fits func(netip.Addr) bool) netip.Addr {
	s, known := g.scans[ports]
	if !known {
		s = &scan{next: g.members[0]} // a group without members is deleted
		if g.scans == nil {
			g.scans = map[string]*scan{}
		}
		g.scans[ports] = s
	}
	return s.lowest(func(a netip.Addr) bool { return g.contains(a) && fits(a) }, g.after)
}

// after returns the member that follows addr, or zero at the end. addr may no longer be a member.
func (g *shareGroup) after(addr netip.Addr) netip.Addr {
	i, found := slices.BinarySearchFunc(g.members, addr, netip.Addr.Compare)
	if found {
		i++
	}
	if i == len(g.members) {
		return netip.Addr{}
	}
	return g.members[i]
}
