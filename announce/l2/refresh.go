package l2

import (
	"context"
	"net/netip"
	"slices"
	"time"
)

// This file announces VIPs again. Previous announcements did not reach hosts behind a link that was down, and another
// owner's frames may have replaced the entries in hosts' caches.

const (
	// againInterval is the minimum time between announcements of a VIP. Each announcement is repeated for four seconds.
	againInterval = 5 * time.Second
	// calmAfter is how long a member that claimed a VIP must be silent before this node assumes that the member has
	// given it up.
	calmAfter = 2 * time.Second
	// refreshInterval is how often each VIP is announced again, because of problems that no event reports: lost frames,
	// or a partition of the segment with all members on one side. It limits how long a host uses a wrong cache entry.
	refreshInterval = time.Minute
	// turnInterval is the time between turns of refresh, over which the VIPs are spread.
	turnInterval = time.Second
	// AskOwn sends each probe askTimes times and waits for the replies, because frames can be lost.
	askTimes = 2
	askWait  = 700 * time.Millisecond
)

// announceAgain schedules another announcement of an owned VIP. a.mu is held.
func (a *Announcer) announceAgain(vip netip.Addr, o *ownership, at time.Time) {
	if earliest := o.announced.Add(againInterval); at.Before(earliest) {
		at = earliest
	}
	if planned, ok := a.again[vip]; !ok || at.Before(planned) {
		a.again[vip] = at
	}
}

// noteReturned schedules another announcement of all VIPs when a member is alive again, because a partition of the
// segment may have ended. Until then the members exchange their claims. a.mu is held.
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

// calm returns when to announce an owned VIP again after another member's last claim to it.
func (o *ownership) calm(last time.Time) time.Time {
	at, earliest := last.Add(calmAfter), o.announced.Add(defendInterval)
	if at.Before(earliest) {
		return earliest
	}
	return at
}

// dueAgain adds the VIPs due for another announcement to s. It returns the time until the next is due, at most next.
// a.mu is held.
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

// refresh announces each owned VIP once per refreshInterval and probes once per Options.ProbeOwn for another host that
// replies for it, until ctx ends. RFC 5227 §2.4 permits conflict detection at any time. A host that only replies to
// requests, without claiming the address, is heard only when probed, so it is probed often enough to stay reported.
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

// turn returns the owned VIPs to announce in a turn, except recently announced ones, and the VIPs to probe for, except
// those being left to another member.
func (a *Announcer) turn(turn uint64, now time.Time) (announce, probe []netip.Addr) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	for vip, o := range a.owned {
		n := turn + score(vip, netip.Addr{})
		if n%uint64(refreshInterval/turnInterval) == 0 && now.Sub(o.announced) >= refreshInterval/2 {
			announce = append(announce, vip)
		}
		every := a.o.ProbeOwn
		if r := a.conflicts[vip]; r != nil && !r.over(now) {
			every = min(every, conflictTime/4)
		}
		if turns := uint64(every / turnInterval); turns > 0 && n%turns == 0 && a.leaving[vip] == nil {
			probe = append(probe, vip)
		}
	}
	slices.SortFunc(announce, netip.Addr.Compare)
	slices.SortFunc(probe, netip.Addr.Compare)
	return announce, probe
}

// AskOwn probes for other hosts that reply for VIPs of this node, now and not in turn, and returns when they have had
// time to reply. Conflicts then lists them.
func (a *Announcer) AskOwn(ctx context.Context) {
	a.mu.RLock()
	var vips []netip.Addr
	for vip := range a.owned {
		if a.leaving[vip] == nil {
			vips = append(vips, vip)
		}
	}
	a.mu.RUnlock()
	for range askTimes {
		for _, r := range a.responders {
			r.probe(ctx, vips)
		}
		select {
		case <-ctx.Done():
		case <-time.After(askWait):
		}
	}
}
