package table

import (
	"errors"
	"net/netip"
)

// reserve grows the arrays once for everything that updates need, and proportionally for about later more targets. A
// failure is also reported when the plan that needs the missing entries is applied.
func (s *Services) reserve(updates []*Update, later int) {
	words, frontends, targets := 0, 0, 0
	servers := map[netip.AddrPort]bool{}
	for _, u := range updates {
		p := u.Plan
		if words += int(WholeLines(span{size: uint32(p.TableLen())}).size); s.Frontends[p.Frontend] == nil {
			frontends++
		}
		targets += 1 + len(p.Targets)
		for _, t := range p.Targets {
			if s.Backends.ByAddr[t.Addr] == nil {
				servers[t.Addr] = true
			}
		}
	}
	all := func(n, most int) int { return min(n+n*later/max(targets, 1), most) }
	size := func(n int, free []uint32) uint32 { // of an array for the next n ids
		if n = all(n, len(free)); n == 0 {
			return 0
		}
		return free[len(free)-n] + 1
	}
	backends := size(len(servers), s.Backends.free)
	err := errors.Join(s.Slots.Reserve(uint32(all(words, int(s.Slots.Space.size)))),
		s.Backends.entries.grow(backends), s.Backends.counters.grow(backends), s.Backends.times.grow(backends),
		s.counters.grow(size(frontends, s.Free)))
	if err != nil {
		s.log.Warn("could not reserve map space for all services", "err", err)
	}
}
