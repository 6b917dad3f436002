package l2

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/mdlayher/arp"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Gratuitous frames are sent at once and after each delay since then, until the context ends.
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
			if got := len(f.take()); got != want {
				t.Errorf("%d frames; want %d", got, want)
			}
			time.Sleep(time.Second)
		}
		cancel()
		a.bursts.Wait()
		time.Sleep(time.Minute)
		if got := f.take(); len(got) > 0 {
			t.Errorf("sent after the end: %q", got)
		}
	})
}

// Run serves until its context ends; after that Set sends nothing.
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
	if len(sent) != 4*len(many) {
		t.Fatalf("%d frames; want %d", len(sent), 4*len(many))
	}
	for i := range many { // two frames for each, in the order of the addresses
		if want := fmt.Sprintf(" 192.0.2.%d ", 12+i); !strings.Contains(sent[2*i], want) {
			t.Errorf("frame %d is %q; want one for %s", 2*i, sent[2*i], want)
		}
	}
	if _, left := f.counts(); left != 0 {
		t.Errorf("%d sockets are left open", left)
	}
}

// A frame that panics is lost; the next one is answered.
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
		left.Store(2) // after it was read
		done := make(chan error)
		go func() { done <- r.readARP(s) }()
		for range 2 {
			s.arp.(fakeARP).in <- frame{arp: &arp.Packet{
				Operation: arp.OperationRequest, SenderHardwareAddr: otherMAC,
				SenderIP: netip.MustParseAddr("192.0.2.1"), TargetIP: vip4,
			}}
		}
		synctest.Wait()
		if got := counted(a); got[0] != 1 || b.Panics()[lb.PartFrame] != 1 || len(b.Troubles()) != 1 {
			t.Errorf("%v replies, panics %v, troubles %q; want one of each", got[0], b.Panics(), b.Troubles())
		}
		down := &net.OpError{Op: "read", Err: errors.New("network is down")}
		s.arp.(fakeARP).in <- frame{err: down}
		<-done
		s.close()
	})
}
