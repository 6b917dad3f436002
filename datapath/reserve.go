package datapath

import (
	"errors"
	"net/netip"

	"github.com/steelyard-lb/steelyard/lb"
)

// reserve makes room for what plans need in the arrays that grow, at once. What fails is reported where it is needed.
func (s *services) reserve(plans []*lb.FrontendPlan) {
	words, frontends := uint32(0), uint32(0)
	servers := map[netip.AddrPort]bool{}
	for _, p := range plans {
		if words += wholeLines(span{size: uint32(p.TableLen())}).size; s.frontends[p.Frontend] == nil {
			frontends++
		}
		for _, t := range p.Targets {
			if s.backends.byAddr[t.Addr] == nil {
				servers[t.Addr] = true
			}
		}
	}
	ids := s.backends.next + uint32(max(len(servers)-len(s.backends.spare), 0))
	err := errors.Join(s.slots.reserve(words), s.backends.entries.grow(min(ids, maxBackends)),
		s.backends.counters.grow(min(ids, maxBackends)))
	if n := uint32(len(s.free)); n >= frontends && frontends > 0 {
		err = errors.Join(err, s.counters.grow(s.free[n-frontends]+1))
	}
	if err != nil {
		s.log.Warn("no room made for all services at once", "err", err)
	}
}
