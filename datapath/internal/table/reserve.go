package table

import (
	"errors"
	"net/netip"

	"github.com/steelyard-lb/steelyard/lb"
)

// reserve grows the arrays once for everything that plans need, and proportionally for about later more targets. A
// failure is also reported when the plan that needs the missing entries is applied.
func (s *Services) reserve(plans []*lb.FrontendPlan, later int) {
	words, frontends, targets := uint32(0), uint32(0), 0
	servers := map[netip.AddrPort]bool{}
	for _, p := range plans {
		if words += WholeLines(span{size: uint32(p.TableLen())}).size; s.Frontends[p.Frontend] == nil {
			frontends++
		}
		targets += 1 + len(p.Targets)
		for _, t := range p.Targets {
			if s.Backends.ByAddr[t.Addr] == nil {
				servers[t.Addr] = true
			}
		}
	}
	all := func(n int, most uint32) uint32 { return uint32(min(n+n*later/max(targets, 1), int(most))) }
	frontends = all(int(frontends), uint32(len(s.Free)))
	ids := s.Backends.next + uint32(max(int(all(len(servers), maxBackends))-len(s.Backends.spare), 0))
	ids = min(ids, maxBackends)
	err := errors.Join(s.Slots.Reserve(all(int(words), s.Slots.Space.size)), s.Backends.entries.grow(ids),
		s.Backends.counters.grow(ids))
	if n := uint32(len(s.Free)); n >= frontends && frontends > 0 {
		err = errors.Join(err, s.counters.grow(s.Free[n-frontends]+1))
	}
	if err != nil {
		s.log.Warn("could not reserve map space for all services", "err", err)
	}
}
