package datapath

import (
	"errors"
	"net/netip"

	"github.com/steelyard-lb/steelyard/lb"
)

// reserve makes room for what plans need in the arrays that grow, at once, and as much in proportion for about later
// more targets. What fails is reported where it is needed.
func (s *services) reserve(plans []*lb.FrontendPlan, later int) {
	words, frontends, targets := uint32(0), uint32(0), 0
	servers := map[netip.AddrPort]bool{}
	for _, p := range plans {
		if words += wholeLines(span{size: uint32(p.TableLen())}).size; s.frontends[p.Frontend] == nil {
			frontends++
		}
		targets += 1 + len(p.Targets)
		for _, t := range p.Targets {
			if s.backends.byAddr[t.Addr] == nil {
				servers[t.Addr] = true
			}
		}
	}
	all := func(n int, most uint32) uint32 { return uint32(min(n+n*later/max(targets, 1), int(most))) }
	frontends = all(int(frontends), uint32(len(s.free)))
	ids := s.backends.next + uint32(max(int(all(len(servers), maxBackends))-len(s.backends.spare), 0))
	ids = min(ids, maxBackends)
	err := errors.Join(s.slots.reserve(all(int(words), s.slots.space.size)), s.backends.entries.grow(ids),
		s.backends.counters.grow(ids))
	if n := uint32(len(s.free)); n >= frontends && frontends > 0 {
		err = errors.Join(err, s.counters.grow(s.free[n-frontends]+1))
	}
	if err != nil {
		s.log.Warn("no room made for all services at once", "err", err)
	}
}
