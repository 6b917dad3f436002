package l2

import (
	"context"
	"net/netip"
	"slices"
	"time"
)

// This file announces VIPs that this node already has. What it announced when it took over did not reach the hosts
// behind a link that was down, and frames of another owner may have replaced it in their caches since.

const (
	// againInterval is the least time between two announcements of a VIP, each of which is repeated for four seconds.
	againInterval = 5 * time.Second
	// calmAfter is how long another member that claimed a VIP must be silent: it has given the VIP up then.
	calmAfter = 2 * time.Second
	// refreshInterval is how often each VIP is announced once more, for what no event tells: a partition of the segment
	// that this node's members are all on one side of, or lost frames. It is the longest time for which a host uses a
	// wrong entry then.
	refreshInterval = time.Minute
	// turnInterval is the time between two turns of refresh: the VIPs are spread over the turns.
	turnInterval = time.Second
)

// announceAgain plans another announcement of an owned VIP; a.mu is held.
func (a *Announcer) announceAgain(vip netip.Addr, o *ownership, at time.Time) {
	if earliest := o.announced.Add(againInterval); at.Before(earliest) {
		at = earliest
	}
	if planned, ok := a.again[vip]; !ok || at.Before(planned) {
		a.again[vip] = at
	}
}

// noteReturned plans another announcement of all VIPs when a member is alive that was not: the segment may have been
// parted, and is no longer. Until then the members tell each other what they have. a.mu is held.
func (a *Announcer) noteReturned(now time.Time) {
	returned, alive := false, map[netip.Addr]time.Time{}
	for _, p := range a.o.Members.Peers(netip.Addr{}) {
		if !p.Alive {
			continue
		}
		since, was := a.alive[p.Address]
		returned = returned || !was || !since.Equal(p.Since)
		alive[p.Address] = p.Since
	}
	a.alive = alive
	if !returned {
		return
	}
	for vip, o := range a.owned {
		a.announceAgain(vip, o, now.Add(memberTimeout))
	}
}

// calm returns when an owned VIP is to be announced again that another member claimed until last.
func (o *ownership) calm(last time.Time) time.Time {
	at, earliest := last.Add(calmAfter), o.announced.Add(defendInterval)
	if at.Before(earliest) {
		return earliest
	}
	return at
}

// dueAgain adds the VIPs that are to be announced again to s, and returns the least of next and the time until the
// next one is; a.mu is held.
func (a *Announcer) dueAgain(now time.Time, s *steps, next time.Duration) time.Duration {
	for vip, at := range a.again {
		switch o := a.owned[vip]; {
		case o == nil:
			delete(a.again, vip)
		case at.After(now):
			next = min(next, at.Sub(now))
		default:
			delete(a.again, vip)
			o.announced = now
			s.announce = append(s.announce, vip)
		}
	}
	return next
}

// refresh announces each owned VIP once in refreshInterval, and asks once in Options.ProbeOwn whether another host
// replies for it, until ctx ends. RFC 5227 §2.4 lets a host detect conflicts at any time: one that replies to requests
// by unicast, without claiming the address, is heard only when asked.
func (a *Announcer) refresh(ctx context.Context) {
	tick := time.NewTicker(turnInterval)
	defer tick.Stop()
	for turn := uint64(0); ; turn++ {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			announce, probe := a.turn(turn, now)
			for _, r := range a.responders {
				r.gratuitous(ctx, announce, &a.pace)
				r.probe(ctx, probe)
			}
		}
	}
}

// turn returns the owned VIPs to be announced again in a turn, without those that were announced a short time ago, and
// those to be probed for, without those that are left to another member.
func (a *Announcer) turn(turn uint64, now time.Time) (announce, probe []netip.Addr) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	for vip, o := range a.owned {
		n := turn + score(vip, netip.Addr{})
		if n%uint64(refreshInterval/turnInterval) == 0 && now.Sub(o.announced) >= refreshInterval/2 {
			announce = append(announce, vip)
		}
		if turns := uint64(a.o.ProbeOwn / turnInterval); turns > 0 && n%turns == 0 && a.leaving[vip] == nil {
			probe = append(probe, vip)
		}
	}
	slices.SortFunc(announce, netip.Addr.Compare)
	slices.SortFunc(probe, netip.Addr.Compare)
	return announce, probe
}
