package l2

import (
	"bytes"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/mdlayher/arp"
	"github.com/mdlayher/ethernet"
	"github.com/mdlayher/packet"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/announce/announcetest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var (
	vip4, vip6 = netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")
	vips       = []netip.Addr{vip4, vip6, netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::1:10")}
)

// lines is a log that tests read.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) count(s string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), s)
}

func newAnnouncer(t testing.TB, log *lines, interfaces ...string) *Announcer {
	a := must.Get(New(Options{
		Interfaces: interfaces, Repeat: []time.Duration{50 * time.Millisecond}, Claim: true,
		Log: slog.New(slog.NewTextHandler(log, nil)),
	}))(t)
	return a
}

func set(t testing.TB, a *Announcer, vips ...netip.Addr) {
	t.Helper()
	var list []lb.Announcement
	for _, v := range vips {
		list = append(list, lb.Announcement{VIP: v, Weight: 1})
	}
	must.Do(t, a.Set(t.Context(), list))
}

func TestConformance(t *testing.T) {
	announcetest.Run(t, func(t *testing.T) *announcetest.Bench {
		n, log := newNeighbour(t), &lines{}
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("log of the announcer:\n%s", &log.b)
			}
		})
		return &announcetest.Bench{
			Announcer: newAnnouncer(t, log, "eth0"), VIPs: vips, Bad: netip.MustParseAddr("224.0.0.1"),
			Seen: func() []netip.Addr { return slices.Collect(maps.Keys(n.resolveAll(vips))) },
		}
	})
}

func ourMAC(t testing.TB) net.HardwareAddr {
	ours := must.Get(netlink.LinkByName("eth0"))(t)
	return ours.Attrs().HardwareAddr
}

// Gratuitous frames update existing neighbour entries: the neighbour has another MAC and sends no request.
func TestGratuitousFramesUpdateEntries(t *testing.T) {
	n := newNeighbour(t)
	a := newAnnouncer(t, &lines{}, "eth0")
	must.Run(t, a.Run)
	for _, v := range []netip.Addr{vip4, vip6} {
		must.Do(t, n.nl.NeighSet(&netlink.Neigh{LinkIndex: n.link.Attrs().Index, IP: v.AsSlice(),
			HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 77}, State: netlink.NUD_STALE}))
	}
	set(t, a, vip4, vip6)
	for _, v := range []netip.Addr{vip4, vip6} {
		until(t, "an updated neighbour entry", func() bool {
			e := n.entry(v)
			return e != nil && bytes.Equal(e.HardwareAddr, ourMAC(t))
		})
	}
	// Once at Set and once per repeat, for each VIP. If the interface comes up at that moment, again for that.
	until(t, "the repeated frames", func() bool {
		return testutil.ToFloat64(a.metrics.gratuitous.WithLabelValues("eth0")) >= 4
	})
}

// Neighbour unreachability detection sends unicast requests to the VIP. Without a reply the entry becomes FAILED.
func TestUnicastProbesAreAnswered(t *testing.T) {
	n := newNeighbour(t)
	a := newAnnouncer(t, &lines{}, "eth0")
	must.Run(t, a.Run)
	set(t, a, vip4, vip6)
	for _, v := range []netip.Addr{vip4, vip6} {
		until(t, "a first resolution", func() bool { return n.resolve(v) != nil })
		e := *n.entry(v)
		e.State = netlink.NUD_PROBE
		must.Do(t, n.nl.NeighSet(&e))
		until(t, "a reply to the probe", func() bool {
			now := n.entry(v)
			if now == nil || now.State&netlink.NUD_FAILED != 0 {
				t.Fatalf("%s: the probe failed", v)
			}
			return now.State&netlink.NUD_REACHABLE != 0
		})
	}
}

// send sends a raw frame from the neighbour.
func (n *neighbour) send(ethertype int, payload []byte) {
	n.t.Helper()
	must.Do(n.t, n.do(func() error {
		ifi, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		c, err := packet.Listen(ifi, packet.Raw, ethertype, nil)
		if err != nil {
			return err
		}
		defer c.Close()
		frame := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, ifi.HardwareAddr...)
		frame = append(frame, byte(ethertype>>8), byte(ethertype))
		_, err = c.WriteTo(append(frame, payload...), &packet.Addr{HardwareAddr: ethernet.Broadcast})
		return err
	}))
}

func TestMalformedFramesDoNotEndTheLoop(t *testing.T) {
	n := newNeighbour(t)
	a := newAnnouncer(t, &lines{}, "eth0")
	must.Run(t, a.Run)
	set(t, a, vip4, vip6)
	until(t, "a first reply", func() bool { return n.resolve(vip4) != nil && n.resolve(vip6) != nil })
	wrong := make([]byte, 28)
	copy(wrong, []byte{0, 1, 8, 0, 200, 200, 0, 1}) // addresses of 200 bytes
	n.send(0x0806, wrong)
	n.send(0x0806, []byte{0})
	solicitation := make([]byte, 40+24)
	copy(solicitation, []byte{0x60, 0, 0, 0, 0xff, 0xff, 58, 255}) // a length of 65535
	solicitation[40] = 135
	n.send(0x86dd, solicitation)
	copy(solicitation, []byte{0x60, 0, 0, 0, 0, 24, 58, 255}) // a wrong checksum
	n.send(0x86dd, solicitation)
	if n.resolve(vip4) == nil || n.resolve(vip6) == nil {
		t.Error("no reply after malformed frames")
	}
}

// A conflicting frame is logged once and counted each time, and the VIP is kept.
func TestConflictIsReported(t *testing.T) {
	n := newNeighbour(t)
	log := &lines{}
	a := newAnnouncer(t, log, "eth0")
	must.Run(t, a.Run)
	set(t, a, vip4)
	until(t, "a first reply", func() bool { return n.resolve(vip4) != nil })
	for range 2 {
		must.Do(t, n.do(func() error {
			ifi, err := net.InterfaceByName("eth0")
			if err != nil {
				return err
			}
			c, err := arp.Dial(ifi)
			if err != nil {
				return err
			}
			defer c.Close()
			p, err := arp.NewPacket(arp.OperationReply, ifi.HardwareAddr, vip4, ifi.HardwareAddr, vip4)
			if err != nil {
				return err
			}
			return c.WriteTo(p, ethernet.Broadcast)
		}))
	}
	until(t, "both frames to be counted", func() bool {
		return testutil.ToFloat64(a.metrics.conflicts.WithLabelValues("eth0")) == 2
	})
	if got := log.count(`msg="address conflict"`); got != 1 {
		t.Errorf("%d log lines; want 1", got)
	}
	if n.resolve(vip4) == nil {
		t.Error("no reply for the VIP any more")
	}
}

// An interface that is renamed is served as before, also after it was down; named back, too.
func TestRenamedInterface(t *testing.T) {
	n := newNeighbour(t)
	log := &lines{}
	a := newAnnouncer(t, log, "eth0")
	var asked atomic.Value // by which name
	a.Require(func(name string) bool { asked.Store(name); return true })
	must.Run(t, a.Run)
	set(t, a, vip4)
	until(t, "a reply", func() bool { return n.resolve(vip4) != nil })
	ours := must.Get(netlink.LinkByName("eth0"))(t)
	must.Do(t, netlink.LinkSetName(ours, "up0"))
	t.Cleanup(func() { netlink.LinkSetName(ours, "eth0") })
	until(t, "the programs of up0 are asked for", func() bool { return asked.Load() == "up0" })
	if n.resolve(vip4) == nil || !a.usable() || log.count("not served") > 0 {
		t.Errorf("no reply by the new name: %v", log)
	}
	must.Do(t, netlink.LinkSetDown(ours))
	until(t, "no reply while it is down", func() bool { return !a.usable() })
	must.Do(t, netlink.LinkSetUp(ours))
	until(t, "a reply again", func() bool { return n.resolve(vip4) != nil })
	must.Do(t, netlink.LinkSetName(ours, "eth0"))
	until(t, "the programs of eth0 are asked for", func() bool { return asked.Load() == "eth0" })
	if n.resolve(vip4) == nil {
		t.Error("no reply by the first name")
	}
}

// An interface that is deleted and created again has another index and another MAC; a missing one does not delay
// others.
func TestInterfacesChange(t *testing.T) {
	n := newNeighbour(t)
	log := &lines{}
	a := newAnnouncer(t, log, "missing0", "eth0")
	must.Run(t, a.Run)
	set(t, a, vip4, vip6)
	until(t, "replies", func() bool { return n.resolve(vip4) != nil && n.resolve(vip6) != nil })
	before := ourMAC(t)
	ours := must.Get(netlink.LinkByName("eth0"))(t)
	must.Do(t, netlink.LinkSetDown(ours))
	must.Do(t, netlink.LinkSetUp(ours))
	until(t, "replies after down and up", func() bool { return n.resolve(vip4) != nil && n.resolve(vip6) != nil })
	must.Do(t, netlink.LinkDel(ours))
	n.connect("eth0")
	until(t, "replies with the new MAC", func() bool {
		mac := n.resolve(vip4)
		return bytes.Equal(mac, ourMAC(t)) && !bytes.Equal(mac, before) && bytes.Equal(n.resolve(vip6), ourMAC(t))
	})
	if log.count("missing0") == 0 {
		t.Error("the missing interface is not in the log")
	}
}

// Duplicate address detection solicits from the unspecified address (RFC 4862 §5.4); the reply goes to all nodes.
func TestDuplicateAddressDetectionFails(t *testing.T) {
	n := newNeighbour(t)
	a := newAnnouncer(t, &lines{}, "eth0")
	must.Run(t, a.Run)
	set(t, a, vip6)
	until(t, "a first reply", func() bool { return n.resolve(vip6) != nil })
	addr := must.Get(netlink.ParseAddr(vip6.String() + "/64"))(t)
	must.Do(t, n.nl.AddrAdd(n.link, addr)) // with detection
	until(t, "the kernel of the neighbour to find the duplicate", func() bool {
		all := must.Get(n.nl.AddrList(n.link, netlink.FAMILY_V6))(t)
		for _, x := range all {
			if x.IP.Equal(vip6.AsSlice()) && x.Flags&0x08 != 0 { // IFA_F_DADFAILED
				return true
			}
		}
		return false
	})
}
