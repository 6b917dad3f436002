package l2

import (
	"bytes"
	"context"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/ndp"
)

// Times of a claim. They are shorter than those of RFC 5227 §1.1, because clients wait for the address: a host on an
// Ethernet replies within milliseconds.
const (
	probes         = 3
	probeInterval  = 100 * time.Millisecond
	claimRetry     = time.Second           // before an address that another host has is probed again
	claimSpacing   = 10 * time.Millisecond // at least, per address that others have
	defendInterval = 10 * time.Second      // RFC 5227 §2.4
	conflictTime   = time.Minute           // for which a conflict is reported
)

// claim is a VIP that is to be announced and is not yet: it is probed first (RFC 5227 §2.1).
type claim struct {
	sent  int       // probes of this round
	due   time.Time // of the next step
	heard string    // the MAC address of a host that has the VIP, or probes for it, too
}

// ownership is a VIP that is announced.
type ownership struct {
	defended time.Time // last
	defend   time.Time // when it is to be defended next; zero: not
}

// Conflict is a VIP that another host claims.
type Conflict struct {
	VIP       netip.Addr
	MAC       string // of the other host
	Interface string
	Since     time.Time
	Last      time.Time // when the other host was heard
	Withheld  bool      // the VIP is not announced, because the other host had it first
}

// Conflicts returns the VIPs that other hosts claim, sorted.
func (a *Announcer) Conflicts() []Conflict {
	a.mu.RLock()
	defer a.mu.RUnlock()
	var list []Conflict
	for vip, c := range a.rivals {
		_, wanted := a.claims[vip]
		c.Withheld = wanted
		if wanted || time.Since(c.Last) < conflictTime {
			list = append(list, *c)
		}
	}
	slices.SortFunc(list, func(x, y Conflict) int { return x.VIP.Compare(y.VIP) })
	return list
}

// runClaims probes for the claimed VIPs, and announces those that no other host has, until ctx ends.
func (a *Announcer) runClaims(ctx context.Context) {
	for {
		todo, next := a.step(time.Now())
		a.sendAll(ctx, todo)
		select {
		case <-ctx.Done():
			return
		case <-a.claimed:
		case <-time.After(next):
		}
	}
}

// steps are what is due.
type steps struct {
	probe  []netip.Addr // for these
	added  []netip.Addr // are owned now
	defend []netip.Addr // by gratuitous frames
}

// sendAll sends what is due.
func (a *Announcer) sendAll(ctx context.Context, s steps) {
	for _, r := range a.responders {
		r.gratuitous(ctx, s.defend)
	}
	if len(s.added) > 0 {
		a.announce(ctx, a.responders, s.added)
	}
	if len(s.probe) == 0 {
		return
	}
	for _, r := range a.responders {
		r.probe(ctx, s.probe)
	}
	// Many probes take longer than their interval.
	a.mu.Lock()
	defer a.mu.Unlock()
	due := time.Now().Add(probeInterval)
	for _, vip := range s.probe {
		if c := a.claims[vip]; c != nil && c.heard == "" {
			c.due = due
		}
	}
}

// step advances the claims that are due, and returns what to send, and how long nothing else is due.
func (a *Announcer) step(now time.Time) (s steps, next time.Duration) {
	usable := slices.ContainsFunc(a.responders, (*responder).isOpen)
	a.mu.Lock()
	defer a.mu.Unlock()
	next = time.Hour
	for vip, c := range a.claims {
		switch {
		case c.due.After(now):
		case !usable:
			c.due = now.Add(probeInterval)
		case c.heard != "":
			*c = claim{due: now.Add(max(claimRetry, time.Duration(len(a.rivals))*claimSpacing))}
		case c.sent < probes:
			c.sent++
			c.due = now.Add(probeInterval)
			s.probe = append(s.probe, vip)
		default:
			delete(a.claims, vip)
			if r := a.rivals[vip]; r != nil {
				delete(a.rivals, vip)
				a.o.Log.Info("address taken over", "vip", vip, "from", r.MAC)
			}
			a.owned[vip] = &ownership{}
			s.added = append(s.added, vip)
			continue
		}
		next = min(next, c.due.Sub(now))
	}
	for vip := range a.rivals {
		o := a.owned[vip]
		switch {
		case o == nil || o.defend.IsZero():
		case o.defend.After(now):
			next = min(next, o.defend.Sub(now))
		default:
			o.defended, o.defend = now, time.Time{}
			s.defend = append(s.defend, vip)
		}
	}
	for _, list := range [][]netip.Addr{s.probe, s.added, s.defend} {
		slices.SortFunc(list, netip.Addr.Compare)
	}
	return s, next
}

// reclaim makes every owned VIP a claim again: while no interface worked, another host may have taken it over.
func (a *Announcer) reclaim() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for vip := range a.owned {
		a.claims[vip] = &claim{due: time.Now()}
	}
	clear(a.owned)
	a.wake()
}

// wake makes runClaims look at the claims.
func (a *Announcer) wake() {
	select {
	case a.claimed <- struct{}{}:
	default:
	}
}

// conflict takes a frame in which another host claims a VIP (RFC 5227 §2.4). A VIP that is not owned yet is then not
// announced. An owned one is kept, and defended at most once per defendInterval; that is counted, and logged when the
// host is another one than before.
func (a *Announcer) conflict(vip netip.Addr, mac, iface string) {
	if a.isOwn(mac) {
		return
	}
	now := time.Now()
	a.mu.Lock()
	c, claimed := a.claims[vip]
	o, owned := a.owned[vip]
	if !claimed && !owned {
		a.mu.Unlock()
		return
	}
	r, known := a.rivals[vip]
	if !known || r.MAC != mac {
		r, known = &Conflict{VIP: vip, MAC: mac, Interface: iface, Since: now}, false
		a.rivals[vip] = r
	}
	r.Last = now
	if claimed {
		c.heard, c.due = mac, now
	} else if o.defend.IsZero() {
		o.defend = now
		if next := o.defended.Add(defendInterval); !o.defended.IsZero() && next.After(now) {
			o.defend = next
		}
	}
	a.wake()
	a.mu.Unlock()
	a.metrics.conflicts.WithLabelValues(iface).Inc()
	if !known && a.logged.allow(now) {
		a.o.Log.Warn("address conflict", "vip", vip, "mac", mac, "interface", iface, "announced", owned)
	}
}

// probed takes the probe of another host for a VIP. When two probe at the same time, the one with the lower MAC
// address has the VIP (RFC 5227 §2.1.1 lets both give up).
func (a *Announcer) probed(vip netip.Addr, own, other net.HardwareAddr, iface string) {
	a.mu.RLock()
	_, claimed := a.claims[vip]
	a.mu.RUnlock()
	if claimed && bytes.Compare(other, own) < 0 {
		a.conflict(vip, other.String(), iface)
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

func (r *responder) isOpen() bool { return r.opened() != nil }

// probe asks whether a host has one of vips.
func (r *responder) probe(ctx context.Context, vips []netip.Addr) {
	s := r.opened()
	if s == nil || r.isTwin() {
		return
	}
	for _, vip := range vips {
		r.a.pace.wait(ctx)
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

// probeARP sends an ARP probe: its sender address is 0.0.0.0 so that no cache learns it.
func probeARP(s *sockets, vip netip.Addr) error {
	none := make(net.HardwareAddr, 6)
	p, err := arp.NewPacket(arp.OperationRequest, s.ifi.HardwareAddr, netip.IPv4Unspecified(), none, vip)
	if err != nil {
		return err
	}
	return s.arp.WriteTo(p, ethernet.Broadcast)
}

// solicit asks for the host that has vip as duplicate address detection does (RFC 4862 §5.4.2), with a nonce
// (RFC 7527).
func (n *ndpSocket) solicit(vip netip.Addr) error {
	to, err := ndp.SolicitedNodeMulticast(vip)
	if err != nil {
		return err
	}
	m := &ndp.NeighborSolicitation{TargetAddress: vip, Options: []ndp.Option{ndp.NewNonce()}}
	return n.conn.send(m, netip.IPv6Unspecified(), to, multicastMAC(to))
}
