package routeradv

import (
	"hash/maphash"
	"net/netip"
	"time"
)

const (
	// silence is the time without an advertisement after which a router is no longer tried.
	silence = time.Minute
	// turn is how long a router is tried before the next one. A session takes a few seconds to come up.
	turn = 20 * time.Second
	// maxCandidates limits the memory that hosts on the link can use up.
	maxCandidates = 64
)

// candidates are the hosts that advertise themselves as routers on a link. Any host can do so, from any number of
// addresses, and faster than the router. Therefore candidates take turns, the least recently tried first. If there are
// more addresses than maxCandidates, each turn keeps a new sample, the addresses with the lowest hashes, so all are
// equally likely, however often they advertise.
//
// The last router in use stays a candidate and has every second turn, even if it is silent.
type candidates struct {
	all    map[netip.Addr]*candidate
	router netip.Addr // whose turn it is; zero if none was heard
	since  time.Time  // start of the turn, or last use of the router
	proven netip.Addr // the last router in use; zero if none was
	seed   maphash.Seed
}

type candidate struct {
	heard time.Time // last advertisement
	tried time.Time // start of its last turn; zero if it had none
}

// hear records an advertisement. It reports whether it is the link's first one, which starts the sender's turn.
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

// rank orders the addresses for this turn's sample; low ranks stay.
func (c *candidates) rank(a netip.Addr) uint64 { return maphash.Comparable(c.seed, a) }

// evict removes a silent candidate or, if there is none, the one with the highest rank. It returns false if from would
// rank highest.
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

// next returns the router whose turn begins now, or zero if the current turn continues. inUse says that the current
// router works.
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

// other returns the least recently tried candidate that is not silent, except the current one, or zero if there is
// none.
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
