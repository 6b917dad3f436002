package l2

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/ndp"

	"github.com/steelyard-lb/steelyard/announce/l2/members"
)

// These times are shorter than in RFC 5227 §1.1, because clients wait for the address and Ethernet hosts reply within
// milliseconds.
const (
	probes         = 3
	probeInterval  = 100 * time.Millisecond
	claimRetry     = time.Second           // until another host's address is probed again
	claimSpacing   = 10 * time.Millisecond // minimum, per address in conflict
	defendInterval = 10 * time.Second      // RFC 5227 §2.4
)

// claim is a VIP to be announced after probing (RFC 5227 §2.1).
type claim struct {
	sent    int       // probes sent in this round
	due     time.Time // time of the next step
	heard   string    // MAC address of a host that has the VIP or also probes for it
	member  bool      // that host is a member
	standby string    // member that should have the VIP, or "" if this node should
	silent  bool      // that member does not report that it has the VIP
	outside outside   // last host outside the members that claimed the VIP
	probed  time.Time // first probe, or when deaf was last set
	deaf    string    // why this node did not take over the VIP after the last probes
	held    time.Time // first time a live member claimed the VIP; zero if none does
	// was is the ownership before this node was away (reclaim). It is nil if this node did not have the VIP or another
	// host has it now.
	was *ownership
}

// confirmTime is how long a VIP from before reclaim counts as announced while this node probes for another owner.
const confirmTime = time.Second

// outside is a host that is not a member.
type outside struct {
	mac string
	at  time.Time
}

// ownership is an announced VIP.
type ownership struct {
	since    time.Time // of the takeover
	term     uint32    // of the takeover, published to the members
	defended time.Time // last defence
	defend   time.Time // time of the next defence, or zero
	question question  // to a member that also has the VIP and outranks this one
	// announced is when a.announce last started to announce the VIP.
	announced time.Time
	contested bool // a member has claimed the VIP recently
	rival     bool // a live member reports that it also has the VIP
}

// Waiting says why a VIP is not announced yet.
type Waiting struct {
	Reason   string
	Intended bool // another node announces it
}

// Waiting returns the VIPs that are not announced yet, except conflicts.
func (a *Announcer) Waiting() map[netip.Addr]Waiting {
	a.mu.RLock()
	defer a.mu.RUnlock()
	list := make(map[netip.Addr]Waiting, len(a.claims))
	usable, now := a.usable(), time.Now()
	for vip, c := range a.claims {
		switch {
		case !usable:
			list[vip] = Waiting{Reason: "no interface of [l2] is up"}
		case c.was != nil && (c.probed.IsZero() || now.Sub(c.probed) < confirmTime):
		case c.standby != "":
			list[vip] = Waiting{c.standbyReason(now), true}
		case c.heard != "" && a.conflicts[vip] != nil:
		case c.deaf != "":
			list[vip] = Waiting{Reason: c.deaf}
		default:
			list[vip] = Waiting{Reason: "not yet: probing whether another host has it"}
		}
	}
	return list
}

// Since returns when this node took over each VIP that it announces.
func (a *Announcer) Since() map[netip.Addr]time.Time {
	a.mu.RLock()
	defer a.mu.RUnlock()
	list := make(map[netip.Addr]time.Time, len(a.owned))
	for vip, o := range a.owned {
		list[vip] = o.since
	}
	for vip, c := range a.claims {
		if c.was != nil {
			list[vip] = c.was.since
		}
	}
	return list
}

// standbyReason names the member that should announce a VIP instead of this one, and whether it does.
func (c *claim) standbyReason(now time.Time) string {
	switch {
	case !c.silent:
		return fmt.Sprintf("standby: %s has it", c.standby)
	case !c.outside.at.IsZero() && now.Sub(c.outside.at) < conflictTime:
		const text = "standby: %s is elected but does not announce it: %s, which is not a member of [l2], claims it"
		return fmt.Sprintf(text, c.standby, c.outside.mac)
	}
	return fmt.Sprintf("standby: %s is elected but does not announce it; see the status of that member", c.standby)
}

// onStandby returns a claim to a VIP that another member should have. It is due when the members change.
func onStandby(p members.Peer, was *claim, now time.Time) *claim {
	c := &claim{standby: p.Name, silent: !p.Claim.Holds, due: now.Add(time.Hour)}
	if was != nil {
		c.outside = was.outside
	}
	return c
}

// runClaims probes for claimed VIPs, and announces those that no other host has, until ctx ends.
func (a *Announcer) runClaims(ctx context.Context) {
	var changed <-chan struct{} // never ready without members
	if a.o.Members != nil {
		changed = a.o.Members.Changed()
	}
	for {
		todo, next := a.step(time.Now())
		a.sendAll(ctx, todo)
		select {
		case <-ctx.Done():
			return
		case <-a.claimed:
		case <-changed:
			a.mu.Lock()
			a.reelected, a.uneven = true, true
			a.mu.Unlock()
		case <-time.After(next):
		}
	}
}

type steps struct {
	probe    []netip.Addr // VIPs to probe for
	announce []netip.Addr // newly owned, or due again
	defend   []netip.Addr // with gratuitous frames
	ask      map[netip.Addr]question
}

func (a *Announcer) sendAll(ctx context.Context, s steps) {
	for _, r := range a.responders {
		r.gratuitous(ctx, s.defend, &a.pace)
	}
	for vip, q := range s.ask {
		for _, r := range a.responders {
			r.ask(ctx, vip, q)
		}
	}
	if len(s.announce) > 0 {
		a.announce(ctx, a.responders, s.announce)
	}
	if len(s.probe) == 0 {
		return
	}
	for _, r := range a.responders {
		if a.o.Members != nil && time.Since(time.Unix(0, r.heard.Load())) > a.probeInterval() {
			r.askNeighbours()
		}
		r.probe(ctx, s.probe)
	}
	// The interval starts after the probes are sent, because sending many takes longer than that.
	a.mu.Lock()
	defer a.mu.Unlock()
	due := time.Now().Add(a.probeInterval())
	for _, vip := range s.probe {
		if c := a.claims[vip]; c != nil && c.heard == "" {
			c.due = due
		}
	}
}

// probeInterval is shorter among members, because they know that the previous owner has failed.
func (a *Announcer) probeInterval() time.Duration {
	if a.o.Members != nil {
		return memberProbeInterval
	}
	return probeInterval
}

// step advances the claims that are due, and returns what to send and the time until the next step.
func (a *Announcer) step(now time.Time) (s steps, next time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.reelected {
		a.reelected = false
		a.publishing = true
		a.reelect(now)
	}
	wait := !a.usable() || a.joining(now)
	next = time.Hour
	for vip, c := range a.claims {
		switch {
		case c.due.After(now):
		case wait:
			c.due = now.Add(a.probeInterval())
		default:
			a.advance(vip, c, now, &s)
			if a.owned[vip] != nil {
				continue
			}
		}
		next = min(next, c.due.Sub(now))
	}
	s.ask = map[netip.Addr]question{}
	for vip, r := range a.conflicts {
		o := a.owned[vip]
		if o != nil && o.contested {
			if at := o.calm(r.Last); at.After(now) {
				next = min(next, at.Sub(now))
			} else {
				o.contested = false
				a.announceAgain(vip, o, now)
			}
		}
		if o != nil {
			if at := o.question.next(); !at.IsZero() && !at.After(now) {
				o.question.sent++
				s.ask[vip] = o.question
			}
			if at := o.question.next(); !at.IsZero() {
				next = min(next, at.Sub(now))
			}
		}
		switch {
		case o == nil || o.defend.IsZero():
		case o.defend.After(now):
			next = min(next, o.defend.Sub(now))
		default:
			o.defended, o.defend = now, time.Time{}
			s.defend = append(s.defend, vip)
		}
	}
	next = a.dueAgain(now, &s, next)
	for _, list := range [][]netip.Addr{s.probe, s.announce, s.defend} {
		slices.SortFunc(list, netip.Addr.Compare)
	}
	if a.publishing {
		a.publishing = false
		a.publish()
	}
	return s, next
}

// advance moves a due claim to its next state. a.mu is held.
func (a *Announcer) advance(vip netip.Addr, c *claim, now time.Time, s *steps) {
	if p, other := a.otherOwner(vip); other {
		*c = *onStandby(p, c, now)
		return
	}
	switch {
	case c.standby != "":
		*c = claim{due: now}
		a.advance(vip, c, now, s)
	case c.heard != "" && c.member:
		*c = claim{due: now.Add(memberRetry), held: c.held}
	case c.heard != "":
		*c = claim{due: now.Add(max(claimRetry, time.Duration(len(a.conflicts))*claimSpacing))}
	case c.sent < probes:
		if c.probed.IsZero() {
			c.probed = now
		}
		c.sent++
		c.due = now.Add(a.probeInterval())
		s.probe = append(s.probe, vip)
	default:
		if text := a.deaf(vip, c.probed); text != "" {
			*c = claim{due: now.Add(memberRetry), probed: now, deaf: text, was: c.was}
			return
		}
		delete(a.claims, vip)
		if r := a.conflicts[vip]; r != nil {
			delete(a.conflicts, vip)
			a.o.Log.Info("address taken over", "vip", vip, "from", r.MAC)
		}
		if a.owned[vip] = c.was; c.was == nil {
			a.owned[vip] = &ownership{since: now, term: a.nextTerm(vip)}
		}
		a.owned[vip].announced = now
		s.announce = append(s.announce, vip)
		a.publishing = true
	}
}

// reclaim turns every owned VIP back into a claim, because another host may have taken it over while no interface
// worked or the process did not run. The members still see this node as the owner, so it loses the VIP only to a member
// that has taken the VIP over in the meantime. A short lack of CPU therefore costs no VIPs.
func (a *Announcer) reclaim() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for vip, o := range a.owned {
		if l, leaving := a.leaving[vip]; leaving && !l.moves {
			delete(a.owned, vip)
			continue
		}
		delete(a.leaving, vip)
		a.release(vip, &claim{due: time.Now(), was: o})
	}
	a.publishing = true
	a.wake()
}

// wake makes runClaims process the claims.
func (a *Announcer) wake() {
	select {
	case a.claimed <- struct{}{}:
	default:
	}
}

func (r *responder) isOpen() bool { return r.opened() != nil }

// usable reports whether any interface is up.
func (a *Announcer) usable() bool { return slices.ContainsFunc(a.responders, (*responder).isOpen) }

// probe sends a probe for each of vips, unless another interface replies in the segment.
func (r *responder) probe(ctx context.Context, vips []netip.Addr) {
	s := r.opened()
	if s == nil || r.isSilent() {
		return
	}
	for _, vip := range vips {
		r.a.urgent.wait(ctx)
		var err error
		if vip.Is4() {
			err = probeARP(s, vip)
		} else if s.ndp != nil {
			err = s.ndp.solicit(vip)
		}
		if err != nil {
			r.log.Debug("probe not sent", "vip", vip, "err", err)
		}
	}
}

// probeARP sends an ARP probe. Its sender address is 0.0.0.0, so that no cache learns it.
func probeARP(s *sockets, vip netip.Addr) error {
	none := make(net.HardwareAddr, 6)
	p, err := arp.NewPacket(arp.OperationRequest, s.ifi.HardwareAddr, netip.IPv4Unspecified(), none, vip)
	if err != nil {
		return err
	}
	return s.arp.WriteTo(p, ethernet.Broadcast)
}

// solicit probes for vip, like duplicate address detection (RFC 4862 §5.4.2), with a nonce (RFC 7527).
func (n *ndpSocket) solicit(vip netip.Addr) error {
	to, err := ndp.SolicitedNodeMulticast(vip)
	if err != nil {
		return err
	}
	m := &ndp.NeighborSolicitation{TargetAddress: vip, Options: []ndp.Option{ndp.NewNonce()}}
	return n.conn.send(m, netip.IPv6Unspecified(), to, multicastMAC(to))
}
