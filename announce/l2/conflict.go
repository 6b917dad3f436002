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
	conflictTime = time.Minute // how long a conflict is reported
	// memberTimeout is how long a live member's frames may contradict its reports, which may be late.
	memberTimeout = time.Second
)

// Conflict is a VIP that another host claims.
type Conflict struct {
	VIP       netip.Addr
	MAC       string // of that host
	Member    string // name of an unreachable member, or of one that does not report that it has the VIP
	Reached   bool   // the member is reachable, so the frames may be forged
	Interface string
	Since     time.Time
	Last      time.Time // last frame from the other host
	Withheld  bool      // the VIP is not announced, because the other host had it first

	settled bool // the member has become reachable, so both agree on the owner
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

// over reports whether a conflict has ended. A later frame, even from the same host, starts a new conflict.
func (c *Conflict) over(now time.Time) bool { return c.settled || now.Sub(c.Last) >= conflictTime }

// noteReached ends the conflicts with members that have become reachable. a.mu is held.
func (a *Announcer) noteReached() {
	for _, r := range a.conflicts {
		if r.Member == "" || r.Reached || r.settled {
			continue
		}
		p, _ := a.memberOf(r.MAC)
		r.settled = p.Alive
	}
}

// conflict handles a frame in which another host claims a VIP (RFC 5227 §2.4). If this node does not own the VIP yet,
// it does not announce it. An owned VIP is kept and defended, at most once per defendInterval. The conflict is counted,
// and logged if the host is new or the previous conflict has ended. An unreachable member that outranks this one
// receives the VIP once it has answered a question; to is the frame's target address. A host that receives frames for a
// dead member's MAC address can answer as well. Only a key could distinguish it from a separated member, and ARP and
// NDP have none. Frames that arrived while the process did not run prove nothing, so they only cause new probes.
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

// settleConflict decides who keeps the VIP. It returns a copy of the conflict, or nil if there is none, and whether the
// conflict is new.
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
	// An unreachable member applies the same rule. A reachable member reports which VIPs it has.
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
		if p.Alive { // wait for its report, because two members must not defend the VIP
			at = now.Add(memberTimeout)
		}
		o.defendAfter(at)
		o.contested = member // other hosts may claim it again: then only defend (RFC 5227 §2.4)
	}
	a.wake()
	x := *r
	x.Withheld = o == nil
	return &x, !known
}

// defendAfter schedules a defence, unless one is scheduled.
func (o *ownership) defendAfter(now time.Time) {
	if !o.defend.IsZero() {
		return
	}
	o.defend = now
	if next := o.defended.Add(defendInterval); !o.defended.IsZero() && next.After(now) {
		o.defend = next
	}
}

// expected reports whether another host's claim to a VIP is part of the members' normal operation. a.mu is held.
func (a *Announcer) expected(vip netip.Addr, c *claim, mac string, now time.Time) bool {
	p, member := a.memberOf(mac)
	if !member {
		standby := c != nil && c.standby != "" // the owner handles the conflict
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
	case c != nil: // it is still releasing the VIP, or both are taking it over until their views agree
		*c = claim{heard: mac, member: true, due: now, held: cmp.Or(c.held, now)}
		a.publishing = true
		a.wake()
		return now.Sub(c.held) < memberTimeout
	}
	// If two members have the VIP, both learn from the reports which one keeps it.
	return slices.ContainsFunc(a.o.Members.Peers(vip), func(o members.Peer) bool {
		return o.Address == p.Address && o.Claim.Holds
	})
}

func (a *Announcer) memberOf(mac string) (members.Peer, bool) {
	if a.o.Members == nil {
		return members.Peer{}, false
	}
	return a.o.Members.OfMAC(mac)
}

// probed handles another host's probe for a VIP. If two hosts probe simultaneously, the previous owner gets the VIP or,
// if neither was, the host with the lower MAC address. (With RFC 5227 §2.1.1, both would give up.)
func (a *Announcer) probed(vip netip.Addr, own, other net.HardwareAddr, iface string) {
	a.mu.RLock()
	c := a.claims[vip]
	yields := c != nil && c.was == nil
	a.mu.RUnlock()
	if yields && bytes.Compare(other, own) < 0 {
		a.conflict(vip, other.String(), iface, netip.Addr{})
	}
}

// isOwn reports whether a MAC address belongs to one of the announcer's interfaces.
func (a *Announcer) isOwn(mac string) bool {
	return slices.ContainsFunc(a.responders, func(r *responder) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.open != nil && r.open.ifi.HardwareAddr.String() == mac
	})
}
