package l2

import (
	"bytes"
	"cmp"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/steelyard-lb/steelyard/announce/l2/members"
)

const (
	conflictTime = time.Minute // for which a conflict is reported
	// memberTimeout is how long frames of a live member may contradict what it says to the members: that may be late.
	memberTimeout = time.Second
)

// Conflict is a VIP that another host claims.
type Conflict struct {
	VIP       netip.Addr
	MAC       string // of the other host
	Member    string // its name, if it is a member that cannot be reached as one, or does not say that it has the VIP
	Reached   bool   // that member is reached: the frames may be forged
	Interface string
	Since     time.Time
	Last      time.Time // when the other host was heard
	Withheld  bool      // the VIP is not announced, because the other host had it first

	settled bool // the other host is a member that was not reached, and is now: they agree on the owner
}

// Conflicts returns the VIPs that other hosts claim, sorted.
func (a *Announcer) Conflicts() []Conflict {
	a.mu.RLock()
	defer a.mu.RUnlock()
	var list []Conflict
	for vip, r := range a.conflicts {
		c, wanted := a.claims[vip]
		if wanted && c.standby != "" {
			continue
		}
		r := *r
		if r.Withheld = wanted; wanted || !r.over(time.Now()) {
			list = append(list, r)
		}
	}
	slices.SortFunc(list, func(x, y Conflict) int { return x.VIP.Compare(y.VIP) })
	return list
}

// over reports whether a conflict is no longer reported. A later frame, also of the same host, is another conflict.
func (c *Conflict) over(now time.Time) bool { return c.settled || now.Sub(c.Last) >= conflictTime }

// noteReached ends the conflicts with members that were not reached, and are now; a.mu is held.
func (a *Announcer) noteReached() {
	for _, r := range a.conflicts {
		if r.Member == "" || r.Reached || r.settled {
			continue
		}
		p, _ := a.memberOf(r.MAC)
		r.settled = p.Alive
	}
}

// conflict takes a frame in which another host claims a VIP (RFC 5227 §2.4). A VIP that is not owned yet is then not
// announced. An owned one is kept, and defended at most once per defendInterval; that is counted, and logged when the
// host is another one than before, or the conflict before is over. It is left to a member that is not reached and
// precedes this one, after that has answered a question: to is the address that the frame is for. A host that receives
// the frames for the MAC address of a dead member can answer, too. Only a key could tell it from a separated member,
// and ARP and NDP have none. Frames from the time when the process did not run tell nothing: the VIPs are probed for.
func (a *Announcer) conflict(vip netip.Addr, mac, iface string, to netip.Addr) {
	if a.isOwn(mac) || a.wasSuspended() {
		return
	}
	now := time.Now()
	r, news := a.settleConflict(vip, mac, iface, to, now)
	if r == nil {
		return
	}
	a.metrics.conflicts.WithLabelValues(iface).Inc()
	if news && a.logged.allow(now) {
		a.o.Log.Warn("address conflict", "vip", vip, "mac", mac, "member", r.Member, "interface", iface,
			"announced", !r.Withheld)
	}
}

// settleConflict decides who keeps the VIP. It returns a copy of the conflict, or nil when there is none, and whether
// the host is another one than before.
func (a *Announcer) settleConflict(
	vip netip.Addr, mac, iface string, to netip.Addr, now time.Time,
) (report *Conflict, news bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	c, o := a.claims[vip], a.owned[vip]
	if c == nil && o == nil || a.expected(vip, c, mac, now) {
		return nil, false
	}
	r, known := a.conflicts[vip]
	if !known || r.MAC != mac || r.over(now) {
		r, known = &Conflict{VIP: vip, MAC: mac, Interface: iface, Since: now}, false
		a.conflicts[vip] = r
	}
	r.Last = now
	p, member := a.memberOf(mac)
	r.Member, r.Reached = p.Name, p.Alive
	// It keeps the VIP by the same rule. What a reached one has, it says.
	precedes := member && !p.Alive && outranks(vip, p.Address, a.o.Members.Self())
	switch {
	case c != nil:
		*c = claim{heard: mac, member: member, due: now, held: c.held}
		a.publishing = true
	case precedes && o.question.has(to, now):
		a.release(vip, &claim{heard: mac, member: true, due: now})
		a.publishing = true
	default:
		if hw, err := net.ParseMAC(mac); err == nil && precedes && o.question.due(now) {
			o.question = newQuestion(vip.Is4(), hw, now)
		}
		at := now
		if p.Alive { // until then it may have said that it has the VIP: two members must not defend it
			at = now.Add(memberTimeout)
		}
		o.defendAfter(at)
		o.contested = member // one outside may claim it again: it is defended only (RFC 5227 §2.4)
	}
	a.wake()
	x := *r
	x.Withheld = o == nil
	return &x, !known
}

// defendAfter plans a defence at that time, unless one is planned.
func (o *ownership) defendAfter(now time.Time) {
	if !o.defend.IsZero() {
		return
	}
	o.defend = now
	if next := o.defended.Add(defendInterval); !o.defended.IsZero() && next.After(now) {
		o.defend = next
	}
}

// expected reports whether a frame in which another host claims a VIP is part of the work of the members; a.mu is held.
func (a *Announcer) expected(vip netip.Addr, c *claim, mac string, now time.Time) bool {
	p, member := a.memberOf(mac)
	if !member {
		standby := c != nil && c.standby != "" // the member that has the VIP sees to it
		if standby {
			c.outside = outside{mac, now}
		}
		return standby
	}
	if l := a.leaving[vip]; l != nil {
		l.taken = true
		return true
	}
	switch {
	case c != nil && c.standby != "":
		return true
	case !p.Alive:
		return false
	case c != nil: // it has not given the VIP up yet, or both take it over, with views that will agree
		*c = claim{heard: mac, member: true, due: now, held: cmp.Or(c.held, now)}
		a.publishing = true
		a.wake()
		return now.Sub(c.held) < memberTimeout
	}
	// Of two that have the VIP, both are told which one keeps it.
	return slices.ContainsFunc(a.o.Members.Peers(vip), func(o members.Peer) bool {
		return o.Address == p.Address && o.Claim.Holds
	})
}

// memberOf returns the member that has a MAC address.
func (a *Announcer) memberOf(mac string) (members.Peer, bool) {
	if a.o.Members == nil {
		return members.Peer{}, false
	}
	return a.o.Members.OfMAC(mac)
}

// probed takes the probe of another host for a VIP. When two probe at the same time, the one with the lower MAC
// address has the VIP (RFC 5227 §2.1.1 lets both give up), or the one that had it before.
func (a *Announcer) probed(vip netip.Addr, own, other net.HardwareAddr, iface string) {
	a.mu.RLock()
	c := a.claims[vip]
	yields := c != nil && c.was == nil
	a.mu.RUnlock()
	if yields && bytes.Compare(other, own) < 0 {
		a.conflict(vip, other.String(), iface, netip.Addr{})
	}
}

// isOwn reports whether a MAC address is that of an interface of the announcer.
func (a *Announcer) isOwn(mac string) bool {
	return slices.ContainsFunc(a.responders, func(r *responder) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.open != nil && r.open.ifi.HardwareAddr.String() == mac
	})
}
