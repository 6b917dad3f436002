package l2

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/announce/l2/members"
	"github.com/steelyard-lb/steelyard/lb"
)

// This file spreads a service's VIPs over different nodes (lb.Announcement.Apart).

const (
	balanceInterval = time.Second
	// balanceAfter is how long a member must have been alive before another member moves a VIP to it, because it may
	// fail again.
	balanceAfter = 10 * time.Second
	// balanceRetry is the minimum time between moves from this node, because the previous one may have failed.
	balanceRetry = 5 * time.Second
)

// apart is the part of a VIP's lb.Announcement about other VIPs.
type apart struct {
	vips    []netip.Addr
	movable bool
}

func (a *Announcer) setApart(x lb.Announcement) {
	movable := x.Movable && len(x.Apart) > 0
	if was := a.apart[x.VIP]; !slices.Equal(was.vips, x.Apart) || was.movable != movable {
		a.apart[x.VIP] = apart{x.Apart, movable}
		a.reelected, a.uneven = true, true
	}
}

// electApart returns the node that should have a VIP from a list of VIPs to spread over different nodes as far as
// possible. A node keeps its VIPs. Each other VIP goes to the node with the fewest so far; among equals, elect decides.
func electApart(
	vip netip.Addr, apart []netip.Addr, view func(netip.Addr) []members.Peer,
) (first members.Peer, ok bool) {
	count := map[netip.Addr]int{}
	var free []netip.Addr
	for _, v := range apart {
		if p, ok := elect(v, view(v)); !ok || !p.Claim.Holds {
			free = append(free, v)
		} else if count[p.Address]++; v == vip {
			return p, true
		}
	}
	for _, v := range free { // in the same order on all nodes
		nodes := slices.DeleteFunc(view(v), func(p members.Peer) bool { return !p.Alive || !p.Claim.Eligible })
		fewest := len(apart)
		for _, p := range nodes {
			fewest = min(fewest, count[p.Address])
		}
		first, ok = elect(v, slices.DeleteFunc(nodes, func(p members.Peer) bool { return count[p.Address] > fewest }))
		if v == vip {
			return first, ok
		}
		count[first.Address]++
	}
	return members.Peer{}, false
}

// balance moves VIPs to members that have fewer of the same service's VIPs, such as a member that has just returned,
// until ctx ends.
func (a *Announcer) balance(ctx context.Context) {
	wait := balanceInterval
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		if wait = balanceInterval; a.moveOne(ctx) {
			wait = balanceRetry
		}
	}
}

// moveOne offers a VIP to a member that has fewer, if there is one, and replies for the VIP until that member has it.
func (a *Announcer) moveOne(ctx context.Context) bool {
	a.mu.Lock()
	vip, found := a.surplus(time.Now())
	l := &leave{moves: true}
	if found {
		a.leaving[vip] = l
		a.publishing = true
		a.wake()
	}
	a.mu.Unlock()
	if !found {
		return false
	}
	a.handOver(ctx.Done())
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.leaving[vip] != l { // Set has removed the VIP, or it is claimed again
		return true
	}
	delete(a.leaving, vip)
	if p, other := a.otherOwner(vip); other && p.Claim.Holds {
		a.o.Log.Info("address released to another member", "vip", vip, "member", p.Name)
		a.release(vip, onStandby(p, nil, time.Now()))
	}
	a.publishing = true
	a.wake()
	return true
}

// surplus returns a VIP of this node that should move to a member with at least two fewer of the same service's VIPs.
// a.mu is held.
func (a *Announcer) surplus(now time.Time) (netip.Addr, bool) {
	if !a.uneven || len(a.leaving) > 0 || a.o.Members == nil {
		return netip.Addr{}, false
	}
	a.uneven = false
	for _, vip := range slices.SortedFunc(maps.Keys(a.owned), netip.Addr.Compare) {
		x := a.apart[vip]
		if !x.movable || len(x.vips) < 2 {
			continue
		}
		own, count := 0, map[netip.Addr]int{}
		for _, v := range x.vips {
			if a.owned[v] != nil {
				own++
			}
			for _, p := range a.o.Members.Peers(v) {
				if p.Alive && p.Claim.Holds {
					count[p.Address]++
				}
			}
		}
		for _, p := range a.o.Members.Peers(vip) {
			switch young := now.Sub(p.Since) < balanceAfter; {
			case !p.Alive || !p.Claim.Eligible || count[p.Address] > own-2:
			case young:
				a.uneven = true // check again later
			default:
				a.uneven = true
				return vip, true
			}
		}
	}
	return netip.Addr{}, false
}
