package l2

import (
	"cmp"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/announce/l2/members"
)

// Membership is this node's view of the other nodes that announce the same VIPs: a *members.Members.
type Membership interface {
	Self() netip.Addr
	// Peers returns the other nodes with their claims to a VIP.
	Peers(vip netip.Addr) []members.Peer
	// OfMAC returns the node that has a MAC address.
	OfMAC(mac string) (members.Peer, bool)
	// Publish replaces the claims of this node.
	Publish(claims map[netip.Addr]members.Claim)
	// SetMACs publishes the MAC addresses from which this node replies.
	SetMACs(macs []string)
	// Changed receives a value when the result of Peers may have changed.
	Changed() <-chan struct{}
	// Joined is closed when the results of Peers are complete enough to use.
	Joined() <-chan struct{}
}

// Times for claims among members, which know that the previous owner has failed, and for a handover.
const (
	memberProbeInterval = 30 * time.Millisecond
	memberRetry         = 300 * time.Millisecond // until an address is probed again that a member still has
	handOverTimeout     = time.Second
	silentTimeout       = 3 * time.Second // for members that have not yet reported which VIPs they can serve
	// handOverLinger is how long this node keeps an address that another node has taken over, because that node's
	// gratuitous frames may not have arrived yet.
	handOverLinger = 100 * time.Millisecond
)

// elect returns the node that should have a VIP, if any. Only live nodes that can serve the VIP qualify. The node that
// already has it wins; if several have it, after a partition, the last to take over wins. If none has it, nodes with
// local endpoints come first, then outranks decides. Nodes with the same view elect the same node, addresses are spread
// over the nodes, and a returning node takes no address back.
func elect(vip netip.Addr, nodes []members.Peer) (first members.Peer, ok bool) {
	for _, n := range nodes {
		if !n.Alive || !n.Claim.Eligible {
			continue
		}
		if !ok || precedes(vip, n, first) {
			first, ok = n, true
		}
	}
	return first, ok
}

// precedes reports whether elect prefers a to b.
func precedes(vip netip.Addr, a, b members.Peer) bool {
	x, y := a.Claim, b.Claim
	switch {
	case x.Holds != y.Holds:
		return x.Holds
	case x.Holds && x.Term != y.Term:
		return x.Term > y.Term
	case !x.Holds && x.Local != y.Local:
		return x.Local
	}
	return outranks(vip, a.Address, b.Address)
}

// outranks reports whether a comes before b in an order that differs from VIP to VIP (rendezvous hashing).
func outranks(vip, a, b netip.Addr) bool {
	return cmp.Or(cmp.Compare(score(vip, a), score(vip, b)), a.Compare(b)) > 0
}

func score(vip, node netip.Addr) uint64 {
	v, n := vip.As16(), node.As16()
	h := uint64(0)
	for _, b := range [][]byte{v[:8], v[8:], n[:8], n[8:]} {
		h = mix(h ^ binary.BigEndian.Uint64(b))
	}
	return h
}

// mix is the finalizer of splitmix64: every bit of x affects every bit of the result.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// view returns all nodes, including this one, with their claims to vip. a.mu is held.
func (a *Announcer) view(vip netip.Addr) []members.Peer {
	return append(a.o.Members.Peers(vip), members.Peer{
		Address: a.o.Members.Self(), Alive: true, Claim: a.claimOf(vip),
	})
}

// claimOf returns the claim that this node publishes. a.mu is held.
func (a *Announcer) claimOf(vip netip.Addr) (c members.Claim) {
	_, leaving := a.leaving[vip]
	c.Local = a.local[vip]
	o := a.owned[vip]
	if x := a.claims[vip]; x != nil {
		o = x.was
	}
	if o != nil {
		c.Holds, c.Term = true, o.term
	}
	c.Eligible = a.has(vip) && a.usable() && !leaving
	return c
}

// publish sends changed claims to the members, which then elect again. This node must elect again as well, because two
// nodes with different views could wait for each other. a.mu is held.
func (a *Announcer) publish() {
	if a.o.Members == nil || a.firstSet.IsZero() {
		return
	}
	claims := make(map[netip.Addr]members.Claim, len(a.owned)+len(a.claims))
	for _, vip := range a.allOf() {
		claims[vip] = a.claimOf(vip)
	}
	if !maps.Equal(a.published, claims) {
		a.published, a.reelected = claims, true
		a.wake()
	}
	a.o.Members.Publish(claims)
}

// otherOwner returns the node that should have a VIP, unless it is this one. a.mu is held.
func (a *Announcer) otherOwner(vip netip.Addr) (members.Peer, bool) {
	if a.o.Members == nil {
		return members.Peer{}, false
	}
	return a.otherOf(vip, a.view(vip))
}

// otherOf is like otherOwner, given the result of a.view(vip). a.mu is held.
func (a *Announcer) otherOf(vip netip.Addr, nodes []members.Peer) (members.Peer, bool) {
	first, ok := elect(vip, nodes)
	if vips := a.apart[vip].vips; ok && !first.Claim.Holds && slices.Contains(vips, vip) {
		first, ok = electApart(vip, vips, a.view)
	}
	return first, ok && first.Address != a.o.Members.Self()
}

// nextTerm returns the term of a takeover. a.mu is held.
func (a *Announcer) nextTerm(vip netip.Addr) (term uint32) {
	if a.o.Members == nil {
		return 0
	}
	for _, p := range a.o.Members.Peers(vip) {
		term = max(term, p.Claim.Term)
	}
	return term + 1
}

// joining reports whether to wait for the members before claiming a first VIP. Nodes that start together become able to
// serve VIPs at different times, and the first would keep them. a.mu is held.
func (a *Announcer) joining(now time.Time) bool {
	if a.o.Members == nil || a.joined {
		return false
	}
	select {
	case <-a.o.Members.Joined():
	default:
		return true
	}
	silent := slices.ContainsFunc(a.o.Members.Peers(netip.Addr{}), func(p members.Peer) bool {
		return p.Alive && !p.Known
	})
	a.joined = !silent || now.After(a.firstSet.Add(silentTimeout))
	return !a.joined
}

// reelect gives up VIPs that another member should have, and makes claims due that wait for a member. a.mu is held.
func (a *Announcer) reelect(now time.Time) {
	if a.o.Members != nil {
		a.noteReturned(now)
		a.noteReached()
		a.settle(now)
	}
	for _, c := range a.claims {
		if c.standby != "" || c.member {
			c.due = now
		}
	}
}

// settle gives up VIPs that another member should have, and schedules another announcement of VIPs that another member
// has given up. a.mu is held.
func (a *Announcer) settle(now time.Time) {
	for vip, o := range a.owned {
		if _, leaving := a.leaving[vip]; leaving {
			continue
		}
		nodes := a.view(vip)
		if p, other := a.otherOf(vip, nodes); other {
			a.o.Log.Info("address released to another member", "vip", vip, "member", p.Name)
			a.release(vip, onStandby(p, nil, now))
			continue
		}
		self := a.o.Members.Self()
		rival := slices.ContainsFunc(nodes, func(p members.Peer) bool {
			return p.Address != self && p.Alive && p.Claim.Holds
		})
		if o.rival && !rival {
			a.announceAgain(vip, o, now)
		}
		o.rival = rival
	}
}

// release turns an owned VIP into a claim. a.mu is held.
func (a *Announcer) release(vip netip.Addr, c *claim) {
	delete(a.owned, vip)
	a.claims[vip] = c
}

// handOver waits until other members have the VIPs that this node leaves, or no member can take them. Until then this
// node replies to requests for them, because it still forwards their packets.
func (a *Announcer) handOver(done <-chan struct{}) {
	timeout := time.NewTimer(handOverTimeout)
	defer timeout.Stop()
	for {
		a.mu.Lock()
		waiting, taken := false, false
		for vip, l := range a.leaving {
			peers := a.o.Members.Peers(vip)
			taken = taken || l.taken || slices.ContainsFunc(peers, func(p members.Peer) bool {
				return p.Alive && p.Claim.Holds
			})
			if !l.taken && !slices.ContainsFunc(peers, func(p members.Peer) bool { return p.Alive && p.Claim.Holds }) {
				waiting = waiting || slices.ContainsFunc(peers, func(p members.Peer) bool {
					return p.Alive && p.Claim.Eligible
				})
			}
		}
		a.mu.Unlock()
		wait := 5 * time.Millisecond
		if !waiting {
			if !taken {
				return
			}
			wait = handOverLinger
		}
		select {
		case <-done:
			return
		case <-timeout.C:
			return
		case <-time.After(wait):
		}
		if !waiting {
			return
		}
	}
}
