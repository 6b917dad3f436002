package l2

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ndp"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// claiming returns an announcer with open sockets of f that claims vips.
func claiming(t *testing.T, f *fakeSystem, vips ...netip.Addr) (*Announcer, *responder, *sockets) {
	t.Helper()
	a := newAnnouncer(t, &lines{}, "eth0")
	a.o.Claim = false
	f.use(a)
	var list []lb.Announcement
	for _, vip := range vips {
		list = append(list, lb.Announcement{VIP: vip})
	}
	must.Do(t, a.Set(t.Context(), list))
	r := a.responders[0]
	s := must.Get(r.openSockets())(t)
	return a, r, s
}

// advance advances the claims for a time, and sends what is to be sent. It returns the VIPs that are owned then.
func advance(a *Announcer, from time.Time, d time.Duration) (time.Time, []netip.Addr) {
	for end := from.Add(d); from.Before(end); from = from.Add(10 * time.Millisecond) {
		s, _ := a.step(from)
		for _, r := range a.responders {
			r.probe(context.Background(), s.probe)
			r.gratuitous(context.Background(), slices.Concat(s.announce, s.defend), &r.a.pace)
		}
	}
	return from, a.all()
}

// An address is probed for three times before it is announced; while no interface works, not at all.
func TestProbesBeforeAClaim(t *testing.T) {
	f := newFakeSystem()
	a, r, s := claiming(t, f, vip4, vip6)
	now, owned := advance(a, time.Now().Add(time.Millisecond), time.Second)
	wantSent(t, "without sockets", f)
	if len(owned) > 0 {
		t.Errorf("%v is owned without sockets", owned)
	}
	r.use(s)
	wantSent(t, "use", f, "join ff02::1:ff00:10")
	now, owned = advance(a, now, 2*probeInterval+20*time.Millisecond)
	probe := []string{"1 from 02:00:00:00:00:aa 0.0.0.0 for 00:00:00:00:00:00 192.0.2.10 to ff:ff:ff:ff:ff:ff",
		"solicit 2001:db8::10 from :: at ff02::1:ff00:10, 1 options"}
	if wantSent(t, "probes", f, slices.Concat(probe, probe, probe)...); len(owned) > 0 {
		t.Errorf("%v is owned before the probes can be answered", owned)
	}
	if sent, _ := a.reply(vip4, func() error { return nil }); sent {
		t.Error("a request was answered for a claimed address")
	}
	if _, owned = advance(a, now, probeInterval); len(owned) != 2 || len(f.take()) != 3 {
		t.Errorf("%v is owned", owned)
	}
}

// An address that another host has is not announced until that host is gone.
func TestClaimOfATakenAddress(t *testing.T) {
	f := newFakeSystem()
	a, r, s := claiming(t, f, vip4)
	r.use(s)
	now, _ := advance(a, time.Now().Add(time.Millisecond), probeInterval)
	for range 3 {
		a.conflict(vip4, otherMAC.String(), "eth0", netip.Addr{})
		now = now.Add(time.Millisecond)
		var owned []netip.Addr
		now, owned = advance(a, now, claimRetry+50*time.Millisecond)
		if c := a.Conflicts(); len(owned) > 0 || len(c) != 1 || !c[0].Withheld || c[0].MAC != otherMAC.String() {
			t.Fatalf("%v is owned, conflicts %+v", owned, c)
		}
	}
	_, owned := advance(a, now, probes*probeInterval+50*time.Millisecond)
	if c := a.Conflicts(); len(owned) != 1 || len(c) != 0 {
		t.Errorf("%v is owned, conflicts %+v", owned, c)
	}
	// Now it is ours, and kept.
	a.conflict(vip4, otherMAC.String(), "eth0", netip.Addr{})
	if c := a.Conflicts(); len(a.all()) != 1 || len(c) != 1 || c[0].Withheld {
		t.Errorf("%v is owned, conflicts %+v", a.all(), c)
	}
	must.Do(t, a.Set(t.Context(), nil))
	if c := a.Conflicts(); len(c) != 0 {
		t.Errorf("conflicts %+v without addresses", c)
	}
}

// Of two hosts that probe at the same time, the one with the lower MAC address goes on. Our own frames are no conflict.
func TestSimultaneousProbes(t *testing.T) {
	lower := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	for _, tt := range []struct {
		mac  net.HardwareAddr
		want int
	}{{lower, 1}, {otherMAC, 0}, {ownMAC, 0}} {
		f := newFakeSystem()
		a, r, s := claiming(t, f, vip4, vip6)
		r.use(s)
		for _, vip := range []netip.Addr{vip4, vip6} {
			a.probed(vip, ownMAC, tt.mac, "eth0")
		}
		if got := len(a.Conflicts()); got != 2*tt.want {
			t.Errorf("%s: %d conflicts; want %d", tt.mac, got, 2*tt.want)
		}
	}
}

// The frames of another announcer's probe are recognised.
func TestReadProbes(t *testing.T) {
	lower := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	f := newFakeSystem()
	a, r, s := claiming(t, f, vip4, vip6)
	r.use(s)
	go r.readARP(s)
	go r.readNDP(s)
	s.arp.(fakeARP).in <- frame{arp: &arp.Packet{
		Operation: arp.OperationRequest, SenderHardwareAddr: lower, SenderIP: netip.IPv4Unspecified(), TargetIP: vip4,
	}}
	solicit := func(options ...ndp.Option) {
		s.ndp.in.(fakeFrames).in <- frame{raw: frameToUs(t, lower, "fe80::1", &ndp.NeighborSolicitation{
			TargetAddress: vip6, Options: options,
		})}
	}
	solicit() // of a client
	solicit() // when this is taken, the one before it has been handled
	if c := a.Conflicts(); slices.ContainsFunc(c, func(c Conflict) bool { return c.VIP == vip6 }) {
		t.Errorf("a client that resolves an address is a conflict: %+v", c)
	}
	solicit(ndp.NewNonce())
	until(t, "both conflicts", func() bool { return len(a.Conflicts()) == 2 })
	s.close()
}

// An address that a neighbour has is not answered for; when the neighbour gives it up, it is.
func TestNeighbourHasTheAddress(t *testing.T) {
	n := newNeighbour(t)
	for _, vip := range []netip.Addr{vip4, vip6} {
		theirs := address(t, netip.PrefixFrom(vip, vip.BitLen()).String())
		must.Do(t, n.nl.AddrAdd(n.link, theirs))
		log := &lines{}
		a := newAnnouncer(t, log, "eth0")
		a.o.Claim = false
		must.Run(t, a.Run)
		must.Do(t, a.Set(t.Context(), []lb.Announcement{{VIP: vip}}))
		until(t, "the conflict", func() bool { return len(a.Conflicts()) == 1 })
		time.Sleep(2*claimRetry + probes*probeInterval)
		c := a.Conflicts()
		if len(a.all()) > 0 || len(c) != 1 || !c[0].Withheld || c[0].MAC != n.link.Attrs().HardwareAddr.String() {
			t.Errorf("owned %v, conflicts %+v", a.all(), c)
		}
		must.Do(t, n.nl.AddrDel(n.link, theirs))
		until(t, "the announcement", func() bool { return len(a.all()) == 1 && n.resolve(vip) != nil })
		if got := log.count(fmt.Sprintf(`msg="address taken over" vip=%s`, vip)); got != 1 {
			t.Errorf("%d log lines about the take-over; want 1", got)
		}
		must.Do(t, a.Set(t.Context(), nil))
	}
}
