package l2

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ndp"
	"github.com/steelyard-lb/steelyard/announce/l2/members"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// claiming returns an announcer that claims vips, with open sockets from f.
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

// advance simulates time and sends what is due. It returns the VIPs that are then owned.
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

// An address is probed three times before it is announced, but not while no interface works.
func TestProbesBeforeAClaim(t *testing.T) {
	f := newFakeSystem()
	a, r, s := claiming(t, f, vip4, vip6)
	now, owned := advance(a, time.Now().Add(time.Millisecond), time.Second)
	wantSent(t, "without sockets", f)
	must.True(t, len(owned) == 0, "%v is owned without sockets", owned)
	r.use(s)
	wantSent(t, "use", f, "join ff02::1:ff00:10")
	now, owned = advance(a, now, 2*probeInterval+20*time.Millisecond)
	probe := []string{"1 from 02:00:00:00:00:aa 0.0.0.0 for 00:00:00:00:00:00 192.0.2.10 to ff:ff:ff:ff:ff:ff",
		"solicit 2001:db8::10 from :: at ff02::1:ff00:10, 1 options"}
	wantSent(t, "probes", f, slices.Concat(probe, probe, probe)...)
	must.True(t, len(owned) == 0, "%v is owned before the probes can be answered", owned)
	sent, _ := a.reply(vip4, func() error { return nil })
	must.True(t, !sent, "a request was answered for a claimed address")
	_, owned = advance(a, now, probeInterval)
	must.True(t, len(owned) == 2 && len(f.take()) == 3, "%v is owned", owned)
}

// Another host's address is not announced until that host is gone.
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
		c := a.Conflicts()
		must.Need(t, len(owned) == 0 && len(c) == 1 && c[0].Withheld && c[0].MAC == otherMAC.String(),
			"%v is owned, conflicts %+v", owned, c)
	}
	_, owned := advance(a, now, probes*probeInterval+50*time.Millisecond)
	c := a.Conflicts()
	must.True(t, len(owned) == 1 && len(c) == 0, "%v is owned, conflicts %+v", owned, c)
	// The address is now ours, and is kept.
	a.conflict(vip4, otherMAC.String(), "eth0", netip.Addr{})
	c = a.Conflicts()
	must.True(t, len(a.all()) == 1 && len(c) == 1 && !c[0].Withheld, "%v is owned, conflicts %+v", a.all(), c)
	must.Do(t, a.Set(t.Context(), nil))
	must.Row(t, "conflicts without addresses", nil, a.Conflicts())
}

// If two hosts probe simultaneously, the one with the lower MAC address continues. Our own frames are not a conflict.
func TestSimultaneousProbes(t *testing.T) {
	lower := net.HardwareAddr{2, 0, 0, 0, 0, 1}
	for _, mac := range []net.HardwareAddr{lower, otherMAC, ownMAC} {
		f := newFakeSystem()
		a, r, s := claiming(t, f, vip4, vip6)
		r.use(s)
		for _, vip := range []netip.Addr{vip4, vip6} {
			a.probed(vip, ownMAC, mac, "eth0")
		}
		must.Row(t, mac, 2*count(bytes.Equal(mac, lower)), len(a.Conflicts()))
	}
}

// The announcer recognises another announcer's probes.
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
	solicit() // from a client
	solicit() // when this frame is taken, the previous one has been handled
	of6 := func(c Conflict) bool { return c.VIP == vip6 }
	must.True(t, !slices.ContainsFunc(a.Conflicts(), of6), "a client that resolves an address is a conflict")
	solicit(ndp.NewNonce())
	until(t, "both conflicts", func() bool { return len(a.Conflicts()) == 2 })
	s.close()
}

// The announcer does not reply for a neighbour's address until the neighbour gives it up.
func TestNeighbourHasTheAddress(t *testing.T) {
	n, log := newNeighbour(t), &lines{}
	a := newAnnouncer(t, log, "eth0")
	a.o.Claim = false
	both := []netip.Addr{vip4, vip6}
	for _, vip := range both {
		must.Do(t, n.nl.AddrAdd(n.link, address(t, netip.PrefixFrom(vip, vip.BitLen()).String())))
	}
	must.Run(t, a.Run)
	must.Do(t, a.Set(t.Context(), []lb.Announcement{{VIP: vip4}, {VIP: vip6}}))
	until(t, "both conflicts", func() bool { return len(a.Conflicts()) == 2 })
	time.Sleep(2*claimRetry + probes*probeInterval)
	must.True(t, len(a.all()) == 0 && len(a.Conflicts()) == 2, "owned %v, conflicts %+v", a.all(), a.Conflicts())
	for _, c := range a.Conflicts() {
		must.True(t, c.Withheld && c.MAC == n.link.Attrs().HardwareAddr.String(), "conflict %+v", c)
	}
	for _, vip := range both {
		must.Do(t, n.nl.AddrDel(n.link, address(t, netip.PrefixFrom(vip, vip.BitLen()).String())))
	}
	n.resolves("the addresses that it gave up", both...)
	for _, vip := range both {
		must.Row(t, vip, 1, log.count(fmt.Sprintf(`msg="address taken over" vip=%s`, vip)))
	}
}

// apart announces VIPs that should be on different nodes.
func (h *host) apart(vips ...netip.Addr) {
	h.t.Helper()
	var list []lb.Announcement
	for _, vip := range vips {
		list = append(list, lb.Announcement{VIP: vip, Apart: vips, Movable: h.movable})
	}
	must.Do(h.t, h.a.Set(h.t.Context(), list))
}

// owners counts the VIPs of each host.
func (x *segment) owners(vips ...netip.Addr) map[string]int {
	x.t.Helper()
	count := map[string]int{}
	for _, vip := range vips {
		count[x.owner(vip).name()]++
	}
	return count
}

// With as many VIPs as nodes, each node has one. If a node fails, only its VIP moves. A new node gets the VIP that is
// added with it.
func TestApart(t *testing.T) {
	for n := range 20 { // without Apart, most lists would give one node two VIPs
		vips := make([]netip.Addr, 4)
		for i := range vips {
			vips[i] = netip.AddrFrom4([4]byte{203, 0, 113, byte(10*n + i)})
		}
		onSegment(t, 4, func(t *testing.T, x *segment) {
			late := x.hosts[3]
			x.change(func() { late.down = true })
			for _, h := range x.hosts[:3] {
				h.apart(vips[:3]...)
			}
			x.pass(time.Second)
			must.Need(t, len(x.owners(vips[:3]...)) == 3, "owners of %v: %v", vips[:3], x.owners(vips[:3]...))
			before := map[netip.Addr]*host{}
			for _, vip := range vips[:3] {
				before[vip] = x.owner(vip)
			}
			x.change(func() { late.down = false })
			for _, h := range x.hosts {
				h.apart(vips...)
			}
			x.pass(time.Second)
			got := x.owners(vips...)
			must.Need(t, len(got) == 4, "owners of %v: %v", vips, got)
			failed := x.hosts[0]
			x.change(func() { failed.down = true })
			x.pass(time.Second)
			for _, vip := range vips[:3] {
				o := x.owner(vip)
				must.True(t, o == before[vip] || before[vip] == failed, "%s moved to %s", vip, o.name())
			}
			got = x.owners(vips...)
			must.True(t, len(got) == 3, "owners of %v after a failure: %v", vips, got)
		})
	}
}

// Whatever members have and can serve, each VIP has one node, and a node that has a VIP keeps it. Other VIPs never go
// to a node that has more VIPs than another one that can serve them.
func TestElectApart(t *testing.T) {
	rng := rand.New(rand.NewPCG(12, 12))
	for range 1000 {
		nodes, vips := 1+rng.IntN(6), make([]netip.Addr, 1+rng.IntN(6))
		claims := map[netip.Addr][]members.Peer{}
		for i := range vips {
			vips[i] = netip.AddrFrom4([4]byte{203, 0, byte(rng.IntN(256)), byte(i)})
		}
		slices.SortFunc(vips, netip.Addr.Compare)
		for _, vip := range vips {
			for n := range nodes {
				c := members.Claim{Eligible: rng.IntN(4) > 0, Holds: rng.IntN(4) == 0, Local: rng.IntN(2) == 0}
				node := netip.AddrFrom4([4]byte{192, 0, 2, byte(n)})
				claims[vip] = append(claims[vip], members.Peer{Address: node, Alive: rng.IntN(8) > 0, Claim: c})
			}
		}
		view := func(vip netip.Addr) []members.Peer { return slices.Clone(claims[vip]) }
		count, free := map[netip.Addr]int{}, map[netip.Addr]netip.Addr{}
		for _, vip := range vips {
			plain, any := elect(vip, view(vip))
			got, ok := electApart(vip, vips, view)
			if ok != any || any && plain.Claim.Holds && got != plain || ok && !(got.Alive && got.Claim.Eligible) {
				t.Fatalf("%s: %+v, %t; want %+v, %t", vip, got, ok, plain, any)
			}
			if ok {
				count[got.Address]++
			}
			if ok && !got.Claim.Holds {
				free[vip] = got.Address
			}
		}
		for vip, node := range free {
			for _, p := range claims[vip] {
				if p.Alive && p.Claim.Eligible && count[p.Address]+1 < count[node] && len(free) == 1 {
					t.Fatalf("%s: %s has %d VIPs; want %s with %d", vip, node, count[node], p.Address, count[p.Address])
				}
			}
		}
	}
}

// After some time, a member that has returned gets a VIP from the member that has two, if connections survive that.
// Until then, the other member replies. Nothing else moves.
func TestReturnBalances(t *testing.T) {
	for _, movable := range []bool{true, false} {
		onSegment(t, 3, func(t *testing.T, x *segment) {
			vips := shared[:3]
			for _, h := range x.hosts {
				h.movable = movable
				h.apart(vips...)
			}
			x.pass(time.Second)
			back := x.hosts[0]
			x.change(func() { back.down = true })
			x.pass(time.Second)
			x.change(func() { back.down, back.since = false, time.Now() })
			x.pass(balanceAfter - 2*time.Second)
			before := x.owners(vips...)
			must.Need(t, len(before) == 2, "before the time is over: %v", before)
			keeps := map[netip.Addr]*host{}
			for _, vip := range vips {
				if o := x.owner(vip); before[o.name()] == 1 {
					keeps[vip] = o
				}
			}
			for range 20 * time.Second / (10 * time.Millisecond) {
				x.pass(10 * time.Millisecond)
				for _, vip := range vips { // while two have it, the previous one ignores probes
					must.Need(t, slices.ContainsFunc(x.hosts, func(h *host) bool { return h.owns(vip) }),
						"nobody replies for %s", vip)
				}
			}
			after := x.owners(vips...)
			must.True(t, len(after) == 2+count(movable), "movable %t: %v", movable, after)
			for vip, h := range keeps {
				must.True(t, x.owner(vip) == h, "%s moved from %s", vip, h.name())
			}
		})
	}
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

// A VIP that should move stays if no node takes it or if it is claimed again.
func TestMoveFails(t *testing.T) {
	onSegment(t, 2, func(t *testing.T, x *segment) {
		vips := shared[:2]
		only, late := x.hosts[0], x.hosts[1]
		x.change(func() { late.down, only.movable = true, true })
		only.apart(vips...)
		x.pass(time.Second)
		// The other host reports that it can serve the VIPs, but takes none.
		x.change(func() {
			late.down, late.since = false, time.Now().Add(-time.Hour)
			late.claims = map[netip.Addr]members.Claim{vips[0]: {Eligible: true}, vips[1]: {Eligible: true}}
		})
		leaving := func() int {
			only.a.mu.Lock()
			defer only.a.mu.Unlock()
			return len(only.a.leaving)
		}
		tried := false
		for range 3000 {
			x.pass(5 * time.Millisecond)
			tried = tried || leaving() > 0
			must.Need(t, only.owns(vips[0]) && only.owns(vips[1]), "it has %v", only.a.all())
		}
		must.Need(t, tried, "no VIP was to move")
		for leaving() == 0 {
			x.pass(5 * time.Millisecond)
		}
		x.change(func() { late.down = true })
		only.a.reclaim()
		x.pass(5 * time.Second)
		n := leaving()
		must.True(t, n == 0 && only.owns(vips[0]) && only.owns(vips[1]), "it has %v, and leaves %d", only.a.all(), n)
	})
}
