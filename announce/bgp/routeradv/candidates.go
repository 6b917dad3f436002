package routeradv

import (
	"hash/maphash"
	"net/netip"
	"time"
)

const (
	// silence is after what time without an advertisement a router is tried no more.
	silence = time.Minute
	// turn is how long a router is tried before another one is: a session needs a few seconds.
	turn = 20 * time.Second
	// maxCandidates bounds what anyone on the link can make this node remember.
	maxCandidates = 64
)

// candidates are those that advertise themselves on a link. Any host there can, by any number of addresses, and can
// keep the router from being the first one: so each of them has its turn, the one that was not tried for the longest
// time first. Of more addresses than places, a sample is kept, another one in each turn: those with the lowest hashes,
// so that all are equally likely, however often they advertise.
//
// The router that was last in use keeps its place, and has every second turn, heard or not.
type candidates struct {
	all    map[netip.Addr]*candidate
	router netip.Addr   // whose turn it is; zero: none was heard
	since  time.Time    // of the turn, or when the router was last in use
	proven netip.Addr   // the router that was last in use; zero: none was
	seed   maphash.Seed // of this turn
}

type candidate struct {
	heard time.Time // last
	tried time.Time // begin of its last turn; zero: it had none
}

// hear records an advertisement. It reports whether it is the first one, and the turn of its sender.
func (c *candidates) hear(from netip.Addr, now time.Time) (first bool) {
	x := c.all[from]
	if x == nil && len(c.all) >= maxCandidates && !c.evict(from, now) {
		return false
	}
	if x == nil {
		if c.all == nil {
			c.all, c.seed = map[netip.Addr]*candidate{}, maphash.MakeSeed()
		}
		x = &candidate{}
		c.all[from] = x
	}
	if x.heard = now; c.router.IsValid() {
		return false
	}
	c.router, c.since, x.tried = from, now, now
	return true
}

// rank is the order in the sample of this turn.
func (c *candidates) rank(a netip.Addr) uint64 { return maphash.Comparable(c.seed, a) }

// evict forgets a candidate that is silent, or else the last one of the sample. It returns false when from comes after
// that one.
func (c *candidates) evict(from netip.Addr, now time.Time) bool {
	last, rank := from, c.rank(from)
	for a, x := range c.all {
		if a == c.router || a == c.proven {
			continue
		}
		if now.Sub(x.heard) >= silence {
			delete(c.all, a)
			return true
		}
		if r := c.rank(a); r > rank {
			last, rank = a, r
		}
	}
	delete(c.all, last)
	return last != from
}

// next returns the router that begins its turn now; zero: none does. InUse: the one whose turn it is works.
func (c *candidates) next(inUse bool, now time.Time) (next netip.Addr) {
	if inUse {
		c.since, c.proven = now, c.router
	}
	if !c.router.IsValid() || now.Sub(c.since) < turn {
		return next
	}
	if next = c.proven; !next.IsValid() || next == c.router {
		next = c.other(now)
	}
	if next.IsValid() {
		c.router, c.since, c.all[next].tried = next, now, now
		c.seed = maphash.MakeSeed()
	}
	return next
}

// other returns the candidate that is not silent and was not tried for the longest time, except for the one whose turn
// it is; zero: there is none.
func (c *candidates) other(now time.Time) (next netip.Addr) {
	for a, x := range c.all {
		if a == c.router || now.Sub(x.heard) >= silence {
			continue
		}
		y := c.all[next]
		if y == nil || x.tried.Before(y.tried) || x.tried.Equal(y.tried) && c.rank(a) < c.rank(next) {
			next = a
		}
	}
	return next
}
