package l2

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mdlayher/arp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/datapath/netwatch"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// 100,000 forged frames, each with another MAC address, cause only a few log lines and one entry per VIP.
func TestForgedFrames(t *testing.T) {
	log := &lines{}
	f := newFakeSystem()
	a, r, s := serving(t, log, f, vip4, vips[2])
	f.take()
	go r.readARP(s)
	const frames = 100_000
	for i := range frames {
		mac := []byte{2, 1, byte(i >> 24), byte(i >> 16), byte(i >> 8), byte(i)}
		s.arp.(fakeARP).in <- frame{arp: &arp.Packet{
			Operation: arp.OperationReply, SenderHardwareAddr: mac, SenderIP: []netip.Addr{vip4, vips[2]}[i%2],
		}}
	}
	until(t, "all to be counted", func() bool {
		return testutil.ToFloat64(a.metrics.conflicts.WithLabelValues("eth0")) == frames
	})
	s.close()
	got := log.count(`msg="address conflict"`)
	must.True(t, got >= 1 && got <= 2*logBurst, "%d log lines; want 1 to %d", got, 2*logBurst)
	must.True(t, len(a.conflicts) == 2 && len(a.Conflicts()) == 2,
		"%d conflicts of addresses, conflicts %v", len(a.conflicts), a.Conflicts())
}

// An address is defended immediately, and then at most once in ten seconds, even after a conflict within that time (RFC
// 5227 §2.4 c). Otherwise hosts would keep the other MAC address until their next request.
func TestDefence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		a, _, _ := serving(t, &lines{}, f, vip4)
		go a.runClaims(t.Context())
		f.take()
		start := time.Now()
		var sent []string
		heard := []time.Duration{0, time.Second, 3 * time.Second, 30 * time.Second}
		for at := time.Duration(0); at < time.Minute; at += 500 * time.Millisecond {
			for _, h := range heard {
				if h == at {
					a.conflict(vip4, otherMAC.String(), "eth0", netip.Addr{})
				}
			}
			synctest.Wait()
			if n := len(f.take()); n > 0 {
				sent = append(sent, fmt.Sprintf("%d at %s", n, time.Since(start)))
			}
			time.Sleep(500 * time.Millisecond)
		}
		must.Row(t, "frames", "[2 at 0s 2 at 10s 2 at 30s]", fmt.Sprint(sent))
	})
}

// Gratuitous frames for many addresses are paced, so they do not fill queues.
func TestPace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		var many []netip.Addr
		for i := range 4000 {
			many = append(many, netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}))
		}
		a, r, _ := serving(t, &lines{}, f, many...)
		f.take()
		start := time.Now()
		go r.gratuitous(t.Context(), a.all(), &a.pace)
		synctest.Wait()
		must.Row(t, "frames at once", 2*frameBurst, len(f.take()))
		sent := 0
		for ; sent < 2*(len(many)-frameBurst); sent += len(f.take()) {
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
		}
		if took := time.Since(start); took < 900*time.Millisecond || took > 1100*time.Millisecond {
			t.Errorf("4000 addresses took %s; want about a second", took)
		}
	})
}

// A member that takes over thousands of addresses soon has announced them all.
func TestTakeOverOfMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newSegment(t, 2)
		x.hosts[1].down = true
		var many []netip.Addr
		for i := range 3000 {
			many = append(many, netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}))
		}
		h := x.hosts[0]
		h.r = h.a.responders[0]
		h.open()
		h.a.ctx = t.Context()
		go h.a.runClaims(t.Context())
		start := time.Now()
		h.set(many...)
		for announced := 0; announced < len(many); time.Sleep(time.Millisecond) {
			synctest.Wait()
			for _, text := range h.f.take() {
				if !strings.Contains(text, " 0.0.0.0 ") && strings.HasPrefix(text, "1 ") {
					announced++
				}
			}
		}
		took := time.Since(start)
		must.True(t, took <= 400*time.Millisecond, "%d addresses were announced after %s", len(many), took)
	})
}

// A notification is for the responder of the interface, also when it was renamed; lost ones are for all.
func TestLinkChanged(t *testing.T) {
	a := newAnnouncer(t, &lines{}, "eth0", "eth1", "eth2")
	a.responders[2].open = &sockets{ifi: &net.Interface{Index: 7}}
	link := nl.NewIfInfomsg(unix.AF_UNSPEC)
	link.Index = 7
	name := nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated("eth1"))
	update := &netwatch.Message{Data: append(link.Serialize(), name.Serialize()...)}
	for _, row := range []struct {
		m    *netwatch.Message
		want []int
	}{{update, []int{0, 1, 1}}, {nil, []int{1, 1, 1}}} {
		a.linkChanged(row.m)
		a.linkChanged(row.m) // finds the channels full
		for i, r := range a.responders {
			must.True(t, len(r.changed) == row.want[i], "%v: responder %d has %d", row.m, i, len(r.changed))
			for len(r.changed) > 0 {
				<-r.changed
			}
		}
	}
}
