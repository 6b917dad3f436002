package l2

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mdlayher/arp"

	"github.com/steelyard-lb/steelyard/announce/l2/members"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// segment is an Ethernet segment with announcers, each with one interface, and their gossip.
type segment struct {
	t         *testing.T
	mu        sync.Mutex
	hosts     []*host
	separated bool  // members do not reach each other, but the segment works
	mute      *host // the others receive neither its frames nor its messages, so it seems dead to them
	// far are the hosts behind a link that is down. They cannot reach the other hosts.
	far map[*host]bool
	// router is the neighbour table of a host that is not far: the MAC address announced last for each VIP.
	router map[netip.Addr]string
}

// host is an announcer and its view of the others.
type host struct {
	*segment
	a       *Announcer
	f       *fakeSystem
	r       *responder
	s       *sockets
	self    netip.Addr
	down    bool
	since   time.Time // members.Peer.Since
	movable bool      // lb.Announcement.Movable
	claims  map[netip.Addr]members.Claim
	changed chan struct{}
	joined  chan struct{}
}

func newSegment(t *testing.T, n int) *segment {
	x := &segment{t: t, router: map[netip.Addr]string{}}
	for i := range n {
		h := &host{
			segment: x, f: newFakeSystem(), self: netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}),
			changed: make(chan struct{}, 1), joined: make(chan struct{}),
		}
		close(h.joined)
		h.f.ifi.HardwareAddr = net.HardwareAddr{2, 0, 0, 0, 0, byte(i + 1)}
		h.a = newAnnouncer(t, &lines{}, "eth0")
		h.a.o.Claim, h.a.o.Members = false, h
		h.f.use(h.a)
		x.hosts = append(x.hosts, h)
	}
	return x
}

func (h *host) Self() netip.Addr         { return h.self }
func (h *host) SetMACs([]string)         {}
func (h *host) Changed() <-chan struct{} { return h.changed }
func (h *host) Joined() <-chan struct{}  { return h.joined }
func (h *host) mac() string              { return h.f.ifi.HardwareAddr.String() }
func (h *host) name() string             { return fmt.Sprintf("lb%d", h.self.As4()[3]) }
func (h *host) set(vips ...netip.Addr)   { set(h.t, h.a, vips...) }
func (h *host) owns(vip netip.Addr) bool { return slices.Contains(h.a.all(), vip) }
func (h *host) open()                    { s, err := h.r.openSockets(); must.Do(h.t, err); h.r.use(s); h.s = s }
func (x *segment) lock() (unlock func()) { x.mu.Lock(); return x.mu.Unlock }
func (x *segment) change(f func())       { defer x.lock()(); f(); x.tell(nil) }

func (h *host) Peers(vip netip.Addr) (list []members.Peer) {
	defer h.lock()()
	for _, o := range h.hosts {
		if o != h {
			list = append(list, members.Peer{
				Address: o.self, Name: o.name(), Known: o.claims != nil, Since: o.since,
				Alive: !o.down && !h.separated && h.far[o] == h.far[h] && h.mute != h && h.mute != o,
				Heard: !o.down && h.mute == h,
				Claim: o.claims[vip],
			})
		}
	}
	return list
}

func (h *host) OfMAC(mac string) (members.Peer, bool) {
	for _, p := range h.Peers(netip.Addr{}) {
		for _, o := range h.hosts {
			if o.self == p.Address && o.mac() == mac {
				return p, true
			}
		}
	}
	return members.Peer{}, false
}

func (h *host) Publish(claims map[netip.Addr]members.Claim) {
	defer h.lock()()
	if h.claims == nil || !maps.Equal(h.claims, claims) {
		h.claims = claims
		h.tell(h)
	}
}

// tell notifies all announcers except but of changed members. x.mu is held.
func (x *segment) tell(but *host) {
	for _, h := range x.hosts {
		if h == but {
			continue
		}
		select {
		case h.changed <- struct{}{}:
		default:
		}
	}
}

// run runs the announcers and delivers their ARP packets until the end of the test.
func (x *segment) run() {
	for _, h := range x.hosts {
		h.r = h.a.responders[0]
		h.open()
		h.a.mu.Lock()
		h.a.ctx = x.t.Context()
		h.a.mu.Unlock()
		go h.a.runClaims(x.t.Context())
		go h.a.balance(x.t.Context())
	}
}

// pass lets time pass, and delivers claims and probes to hosts that are up.
func (x *segment) pass(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		synctest.Wait()
		for _, h := range x.hosts {
			for _, text := range h.f.take() {
				x.deliver(h, text)
			}
		}
	}
	synctest.Wait()
}

// deliver handles a packet in the form recorded by fakeARP.
func (x *segment) deliver(from *host, text string) {
	var op int
	var mac, sender, none, target, _to string
	n, _ := fmt.Sscanf(text, "%d from %s %s for %s %s to %s", &op, &mac, &sender, &none, &target, &_to)
	if n != 6 || from.down || from == x.mute {
		return
	}
	if ip := netip.MustParseAddr(sender); sender == target && !x.far[from] {
		x.router[ip] = mac
	}
	for _, h := range x.hosts {
		if h == from || h.down || h.f.deaf || h.s == nil || x.far[h] != x.far[from] {
			continue
		}
		ip, vip := netip.MustParseAddr(sender), netip.MustParseAddr(target)
		h.a.conflict(ip, mac, "eth0", netip.Addr{})
		if isQuestion := op == 1 && ip != vip && !ip.IsUnspecified(); isQuestion && _to == h.mac() {
			if sent, _ := h.a.reply(vip, func() error { return nil }); sent && !from.f.deaf {
				from.a.conflict(vip, h.mac(), "eth0", ip)
			}
		}
		if op == 1 && ip.IsUnspecified() {
			h.a.probed(vip, h.f.ifi.HardwareAddr, from.f.ifi.HardwareAddr, "eth0")
			sender := from.f.ifi.HardwareAddr
			answer := &arp.Packet{Operation: 1, SenderHardwareAddr: sender, SenderIP: ip, TargetIP: vip}
			sent, _ := h.a.claimOwned(vip, func() error { return replyARP(h.s, answer) })
			if sent {
				h.f.take()
			}
			if sent && !from.f.deaf {
				from.a.conflict(vip, h.mac(), "eth0", netip.Addr{})
			}
		}
	}
}

// owner returns the only host that has a VIP.
func (x *segment) owner(vip netip.Addr) *host {
	x.t.Helper()
	var owner *host
	for _, h := range x.hosts {
		switch {
		case h.down || !h.owns(vip):
		case owner != nil:
			x.t.Fatalf("%s: %s and %s have it", vip, owner.name(), h.name())
		default:
			owner = h
		}
	}
	must.Need(x.t, owner != nil, "%s: nobody has it", vip)
	return owner
}

var shared = []netip.Addr{
	netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("203.0.113.11"), netip.MustParseAddr("203.0.113.12"),
	netip.MustParseAddr("203.0.113.13"), netip.MustParseAddr("203.0.113.14"), netip.MustParseAddr("203.0.113.15"),
}

// onSegment runs f in a bubble with n announcers running on a segment.
func onSegment(t *testing.T, n int, f func(t *testing.T, x *segment)) {
	synctest.Test(t, func(t *testing.T) {
		x := newSegment(t, n)
		x.run()
		f(t, x)
	})
}

// set sets these VIPs on all announcers.
func (x *segment) set(vips ...netip.Addr) {
	x.t.Helper()
	for _, h := range x.hosts {
		h.set(vips...)
	}
}

// elected returns which of two hosts comes first in a VIP's order.
func (x *segment) elected(vip netip.Addr) *host {
	if outranks(vip, x.hosts[1].self, x.hosts[0].self) {
		return x.hosts[1]
	}
	return x.hosts[0]
}

// but returns the host other than h.
func (x *segment) but(h *host) *host { return x.hosts[(slices.Index(x.hosts, h)+1)%2] }
