package routeradv

import (
	"net/netip"
	"time"
)

const (
	// silence is after what time without an advertisement a router is tried no more.
	silence = time.Minute
	// turn is how long a router is tried before another one is: a session needs a few seconds.
	turn = 20 * time.Second
	// maxCandidates bounds what anyone on the link can make this node remember.
	maxCandidates = 8
)

// candidates are those that advertise themselves on a link. Any host there can, and can keep the router from being the
// first one: so each of them has its turn, the one that was not tried for the longest time first.
type candidates struct {
	all    map[netip.Addr]*candidate
	router netip.Addr // whose turn it is; zero: none was heard
	since  time.Time  // of the turn, or when the router was last in use
}

type candidate struct {
	heard time.Time // last
	tried time.Time // begin of its last turn; zero: it had none
}

// hear records an advertisement. It reports whether it is the first one, and the turn of its sender.
func (c *candidates) hear(from netip.Addr, now time.Time) (first bool) {
	x := c.all[from]
	if x == nil && len(c.all) >= maxCandidates && !c.evict(now) {
		return false
	}
	if x == nil {
		if c.all == nil {
			c.all = map[netip.Addr]*candidate{}
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

// evict forgets a candidate that is silent, or else the one that had its turn first. It returns false when none can be
// forgotten: whoever sends many addresses must wait until those before were tried.
func (c *candidates) evict(now time.Time) bool {
	var oldest netip.Addr
	for a, x := range c.all {
		switch {
		case a == c.router:
		case now.Sub(x.heard) >= silence:
			delete(c.all, a)
			return true
		case x.tried.IsZero():
		case !oldest.IsValid() || x.tried.Before(c.all[oldest].tried):
			oldest = a
		}
	}
	delete(c.all, oldest)
	return oldest.IsValid()
}

// next returns the router that begins its turn now; zero: none does. InUse: the one whose turn it is works.
func (c *candidates) next(inUse bool, now time.Time) (next netip.Addr) {
	if inUse {
		c.since = now
	}
	if !c.router.IsValid() || now.Sub(c.since) < turn {
		return next
	}
	for a, x := range c.all {
		if a == c.router || now.Sub(x.heard) >= silence {
			continue
		}
		if y := c.all[next]; y == nil || x.tried.Before(y.tried) || x.tried.Equal(y.tried) && a.Less(next) {
			next = a
		}
	}
	if next.IsValid() {
		c.router, c.since, c.all[next].tried = next, now, now
	}
	return next
}
