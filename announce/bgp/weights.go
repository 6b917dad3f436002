package bgp

import (
	"context"
	"maps"
	"net/netip"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// bandwidthUnit is the link bandwidth announced for a weight of 1, in bytes per second: 1 Gbit/s. Routers use only the
// ratio of the values.
const bandwidthUnit = 125e6

// includes reports whether an announcement's route carries a weight. A router that receives a new weight moves flows to
// other nodes, which resets flows whose state is only on one node.
func (o *Options) includes(a lb.Announcement) bool {
	return o.Weighted == lb.WeightedAlways || o.Weighted == lb.WeightedMovable && a.Movable
}

// weightSettles is how long a weight must stay unchanged before it is announced with lb.WeightedAlways, so that a
// server that fails and returns moves no flows.
const weightSettles = 30 * time.Second

// settling has the weights that differ from the announced ones.
type settling map[netip.Prefix]newWeight

type newWeight struct {
	weight int
	since  time.Time
}

// settle returns the wanted routes, but with the announced weight unless the new weight has lasted for weightSettles.
func (s settling) settle(announced, wanted routes, now time.Time) routes {
	out := maps.Clone(wanted)
	for p, weight := range wanted {
		if was := announced[p]; was <= 0 || weight <= 0 || was == weight {
			delete(s, p)
			continue
		}
		if s[p].weight != weight {
			s[p] = newWeight{weight, now}
		}
		if now.Sub(s[p].since) < weightSettles {
			out[p] = announced[p]
		} else {
			delete(s, p)
		}
	}
	maps.DeleteFunc(s, func(p netip.Prefix, _ newWeight) bool { return wanted[p] == 0 })
	return out
}

func (s *Speaker) target(o *Options) routes {
	if o.Weighted != lb.WeightedAlways {
		clear(s.settling)
		return s.wanted
	}
	return s.settling.settle(s.installed, s.wanted, time.Now())
}

func (s *Speaker) announceSettled(ctx context.Context) {
	s.setMu.Lock()
	defer s.setMu.Unlock()
	if len(s.settling) == 0 || s.kept.Load() {
		return
	}
	failed, err := s.install(ctx)
	for prefix, err := range failed { // the next round tries again
		s.log.Warn("weight not announced", "prefix", prefix, "err", err)
	}
	if err != nil && ctx.Err() == nil {
		s.log.Warn("weights not announced", "err", err)
	}
}
