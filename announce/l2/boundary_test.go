package l2

import (
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/mdlayher/arp"

	"github.com/steelyard-lb/steelyard/lb"
)

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
