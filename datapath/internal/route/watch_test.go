package route

import (
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/vishvananda/netlink"
)

// After an overrun of its socket, the Watcher reports that everything may have changed, counts the overrun, and
// continues.
func TestWatcherSurvivesAnOverrun(t *testing.T) {
	t.Parallel()
	h := labtest.Host(t, labtest.New(t), "h")
	var overruns atomic.Uint64
	var w *Watcher
	do := func(f func() error) {
		t.Helper()
		must.Do(t, h.Do(f))
	}
	change := func(n int) func() error {
		return func() error {
			lo, err := netlink.LinkByIndex(LoopbackIndex)
			if err != nil {
				return err
			}
			for i := range n {
				to := &net.IPNet{IP: net.IPv4(10, byte(i/256), byte(i), 0), Mask: net.CIDRMask(24, 32)}
				r := &netlink.Route{LinkIndex: lo.Attrs().Index, Dst: to}
				if err := netlink.RouteAdd(r); err != nil {
					return err
				}
				if err := netlink.RouteDel(r); err != nil {
					return err
				}
			}
			return nil
		}
	}
	do(func() (err error) {
		lo, err := netlink.LinkByIndex(LoopbackIndex)
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err != nil {
			return err
		}
		w, err = OpenWatcher(&overruns, func(f func()) bool { f(); return true })
		if err == nil {
			err = w.socket.SetReceiveBufferSize(1, true)
		}
		return err
	})
	do(change(200)) // nobody is receiving
	must.Run(t, w.Run)
	found := func(want Changes, what string) {
		t.Helper()
		var all Changes
		labtest.Until(t, what, func() error {
			select {
			case c := <-w.Found:
				all.Add(c)
			default:
			}
			if all != want {
				return fmt.Errorf("%+v", all)
			}
			return nil
		})
	}
	found(Changes{Links: true, Routes: true}, "everything may have changed")
	must.True(t, overruns.Load() > 0, "no overrun is counted")
	labtest.Until(t, "the socket is empty", func() error {
		select {
		case <-w.Found:
			return fmt.Errorf("more")
		case <-time.After(50 * time.Millisecond):
			return nil
		}
	})
	do(change(1))
	found(Changes{Routes: true}, "the next change is noticed")
}
