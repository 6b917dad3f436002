package l2

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mdlayher/arp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestNew(t *testing.T) {
	_, err := New(Options{})
	must.True(t, err != nil && err.Error() == "no interface given", "without interfaces: %v", err)
	a := must.Get(New(Options{Interfaces: []string{"eth0", "eth1"}, Log: slog.New(slog.DiscardHandler)}))(t)
	const ms = time.Millisecond
	must.Row(t, "repeats after", []time.Duration{100 * ms, 500 * ms, 1000 * ms, 2000 * ms, 4000 * ms}, a.o.Repeat)
	must.True(t, len(a.responders) == 2 && a.responders[1].name == "eth1",
		"%d responders; want one per interface", len(a.responders))
}

// Set replaces the owned VIPs and names the ones it rejects.
func TestSet(t *testing.T) {
	a := newAnnouncer(t, &lines{}, "eth0")
	for _, tt := range []struct {
		vips, owned []string
		err         string
	}{
		{[]string{"192.0.2.10", "2001:db8::10"}, []string{"192.0.2.10", "2001:db8::10"}, ""},
		{[]string{"224.0.0.1", "192.0.2.11", "fe80::1"}, []string{"192.0.2.11"},
			"224.0.0.1: not a global unicast address; fe80::1: not a global unicast address"},
		{nil, nil, ""},
	} {
		var list []lb.Announcement
		for _, v := range tt.vips {
			list = append(list, lb.Announcement{VIP: netip.MustParseAddr(v)})
		}
		text := ""
		if err := a.Set(t.Context(), list); err != nil {
			text = err.Error()
		}
		var owned []string
		for _, v := range a.all() {
			owned = append(owned, v.String())
		}
		must.True(t, text == tt.err && slices.Equal(owned, tt.owned),
			"Set(%v): owned %v, error %q; want %v, %q", tt.vips, owned, text, tt.owned, tt.err)
	}
}

// Replies are sent only for owned VIPs.
func TestReply(t *testing.T) {
	a := newAnnouncer(t, &lines{}, "eth0")
	set(t, a, vip4)
	broken, calls := errors.New("broken"), 0
	send := func() error { calls++; return broken }
	sent, err := a.reply(vip4, send)
	must.True(t, sent && errors.Is(err, broken) && calls == 1, "owned: sent %t, %v, %d calls", sent, err, calls)
	sent, err = a.reply(vip6, send)
	must.True(t, !sent && err == nil && calls == 1, "not owned: sent %t, %v, %d calls", sent, err, calls)
}

// A conflict is counted per frame and logged once per VIP and MAC address. Frames for other addresses are not
// conflicts.
func TestConflict(t *testing.T) {
	log := &lines{}
	a := newAnnouncer(t, log, "eth0")
	set(t, a, vip4, vip6)
	for _, c := range []struct {
		vip netip.Addr
		mac string
	}{{vip4, "m1"}, {vip4, "m1"}, {vip4, "m2"}, {vip6, "m1"}, {vips[2], "m1"}} {
		a.conflict(c.vip, c.mac, "eth0", netip.Addr{})
	}
	must.Row(t, "conflicts counted", 4, testutil.ToFloat64(a.metrics.conflicts.WithLabelValues("eth0")))
	must.Row(t, "log lines", 3, log.count(`msg="address conflict"`))
	// A conflict about an address that is owned later is logged then.
	set(t, a, vips[2])
	a.conflict(vips[2], "m1", "eth0", netip.Addr{})
	must.Row(t, "log lines of the third", 1, log.count("vip="+vips[2].String()))
}

// A conflict that has ended is not reported. The next conflict with the same host has its own start and is logged. A
// host that only replies to probes is reported until a minute after it is gone, however rarely this node probes.
func TestNextConflict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log := &lines{}
		a := newAnnouncer(t, log, "eth0")
		set(t, a, vip4)
		for i, gap := range []time.Duration{0, conflictTime - time.Second, conflictTime} {
			time.Sleep(gap)
			c := a.Conflicts()
			must.True(t, (len(c) == 0) == (gap == 0 || gap == conflictTime), "before conflict %d: %+v", i, c)
			since := time.Now()
			if gap == conflictTime-time.Second { // still the previous conflict
				since = since.Add(-gap)
			}
			a.conflict(vip4, "m1", "eth0", netip.Addr{})
			c = a.Conflicts()
			must.True(t, len(c) == 1 && c[0].Since.Equal(since), "conflict %d: %+v; want one since %s", i, c, since)
		}
		a.o.ProbeOwn = time.Hour
		for turn := range uint64(11 * time.Minute / turnInterval) {
			time.Sleep(turnInterval)
			gone := turn > uint64(10*time.Minute/turnInterval)
			if _, probe := a.turn(turn, time.Now()); len(probe) > 0 && !gone {
				a.conflict(vip4, "m1", "eth0", netip.Addr{})
			}
			must.Need(t, gone || len(a.Conflicts()) == 1, "not reported after %d turns", turn)
		}
		must.True(t, len(a.Conflicts()) == 0, "reported after the host is gone")
		must.Row(t, "log lines", 2, log.count(`msg="address conflict"`))
	})
}

func TestMetricsPassPromlint(t *testing.T) {
	r := prometheus.NewPedanticRegistry()
	a := newAnnouncer(t, &lines{}, "eth0")
	for _, c := range []*prometheus.CounterVec{a.metrics.replies, a.metrics.gratuitous, a.metrics.conflicts} {
		c.WithLabelValues("eth0").Inc()
	}
	r.MustRegister(a)
	described := make(chan *prometheus.Desc, 10)
	a.Describe(described)
	must.Row(t, "metrics", 6, must.Get(testutil.GatherAndCount(r))(t))
	must.Row(t, "described", 6, len(described))
	problems, err := testutil.GatherAndLint(r)
	must.True(t, err == nil && len(problems) == 0, "%v %v", problems, err)
}

// Gratuitous frames are sent immediately and after each delay from then on, until the context ends.
func TestAnnounceRepeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		a, _, _ := serving(t, &lines{}, f, vip6)
		a.o.Repeat = []time.Duration{time.Second, 3 * time.Second, 7 * time.Second}
		f.take()
		ctx, cancel := context.WithCancel(t.Context())
		a.announce(ctx, a.responders, []netip.Addr{vip6})
		for _, want := range []int{1, 1, 0, 1, 0, 0} { // in each second
			synctest.Wait()
			must.Row(t, "frames", want, len(f.take()))
			time.Sleep(time.Second)
		}
		cancel()
		a.bursts.Wait()
		time.Sleep(time.Minute)
		got := f.take()
		must.True(t, len(got) == 0, "sent after the end: %q", got)
	})
}

// Run serves until its context ends. After that, Set sends nothing.
func TestRunWithoutRoot(t *testing.T) {
	f := newFakeSystem()
	a := newAnnouncer(t, &lines{}, "eth0")
	f.use(a)
	stop := must.Run(t, a.Run)
	until(t, "the sockets are open", func() bool { opened, _ := f.counts(); return opened == 3 })
	var many []netip.Addr
	for i := range 9 {
		many = append(many, netip.AddrFrom4([4]byte{192, 0, 2, byte(20 - i)}))
	}
	set(t, a, many...)
	until(t, "the frames and their repetition", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.sent) == 4*len(many)
	})
	set(t, a, many...) // nothing new to announce
	stop()
	set(t, a, append(many, vip4, vip6)...)
	sent := f.take()
	must.Need(t, len(sent) == 4*len(many), "%d frames; want %d", len(sent), 4*len(many))
	for i := range many { // two frames each, in the order of the addresses
		want := fmt.Sprintf(" 192.0.2.%d ", 12+i)
		must.True(t, strings.Contains(sent[2*i], want), "frame %d is %q; want one for %s", 2*i, sent[2*i], want)
	}
	_, left := f.counts()
	must.True(t, left == 0, "%d sockets are left open", left)
}

// A frame whose handling panics is lost; the next one is answered.
func TestPanicOfAFrame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFakeSystem()
		a, r, s := serving(t, &lines{}, f, vip4)
		var left atomic.Int64
		b := &lb.Boundary{Log: slog.New(slog.DiscardHandler), Before: func(lb.Part, string) {
			if left.Add(-1) == 0 {
				panic("injected")
			}
		}}
		a.o.Boundary = b
		left.Store(2) // after the frame was read
		done := make(chan error)
		go func() { done <- r.readARP(s) }()
		for range 2 {
			s.arp.(fakeARP).in <- frame{arp: &arp.Packet{
				Operation: arp.OperationRequest, SenderHardwareAddr: otherMAC,
				SenderIP: netip.MustParseAddr("192.0.2.1"), TargetIP: vip4,
			}}
		}
		synctest.Wait()
		must.True(t, counted(a)[0] == 1 && b.Panics()[lb.PartFrame] == 1 && len(b.Troubles()) == 1,
			"panics %v, troubles %q; want a reply, and one of each", b.Panics(), b.Troubles())
		down := &net.OpError{Op: "read", Err: errors.New("network is down")}
		s.arp.(fakeARP).in <- frame{err: down}
		<-done
		s.close()
	})
}
