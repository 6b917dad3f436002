package datapath

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// After an overrun of its socket the watcher reports that everything may have changed, counts it, and goes on.
func TestWatcherSurvivesAnOverrun(t *testing.T) {
	t.Parallel()
	h := labtest.Host(t, labtest.New(t), "h")
	var overruns atomic.Uint64
	var w *watcher
	do := func(f func() error) {
		t.Helper()
		if err := h.Do(f); err != nil {
			t.Fatal(err)
		}
	}
	change := func(n int) func() error {
		return func() error {
			lo, err := netlink.LinkByIndex(loopbackIndex)
			if err != nil {
				return err
			}
			for i := range n {
				to := prefix(fmt.Sprintf("10.%d.%d.0/24", i/256, i%256))
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
		lo, err := netlink.LinkByIndex(loopbackIndex)
		if err == nil {
			err = netlink.LinkSetUp(lo)
		}
		if err != nil {
			return err
		}
		w, err = openWatcher(&overruns, nil)
		if err == nil {
			err = w.socket.SetReceiveBufferSize(1, true)
		}
		return err
	})
	do(change(200)) // nobody receives
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.run(ctx) }()
	found := func(want changes, what string) {
		t.Helper()
		var all changes
		labtest.Until(t, 5*time.Second, what, func() error {
			select {
			case c := <-w.found:
				all.add(c)
			default:
			}
			return wrong(all != want, "%+v", all)
		})
	}
	found(changes{links: true, routes: true}, "everything may have changed")
	if overruns.Load() == 0 {
		t.Error("no overrun is counted")
	}
	labtest.Until(t, 5*time.Second, "the socket is empty", func() error {
		select {
		case <-w.found:
			return fmt.Errorf("more")
		case <-time.After(50 * time.Millisecond):
			return nil
		}
	})
	do(change(1))
	found(changes{routes: true}, "the next change is noticed")
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// Changes that never end postpone nothing: an address that is added meanwhile is used (D11).
func TestSteadyChangesPostponeNothing(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookTC, false, nil)
	fx.service(lb.TCP, "b1")
	fx.watch()
	labtest.Until(t, 10*time.Second, "the first look at the network", func() error {
		return wrong(fx.d.verifier.pause() == 0, "none yet")
	})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- fx.host.Do(func() error {
			r := &netlink.Route{LinkIndex: loopbackIndex, Dst: prefix("10.1.2.0/24")}
			for ctx.Err() == nil {
				if err := errors.Join(netlink.RouteAdd(r), netlink.RouteDel(r)); err != nil {
					return err
				}
			}
			return nil
		})
	}()
	second := netip.MustParsePrefix("192.0.2.2/24")
	if err := fx.host.AddAddress("eth0", second); err != nil {
		t.Error(err)
	}
	flow := 0
	labtest.Until(t, 20*time.Second, "flows come from the new address", func() error {
		flow++
		from := fx.run(fx.on(flow, dptest.TCP, dptest.SYN).Frame()).out.Src
		return wrong(from.Addr() != second.Addr(), "from %s", from)
	})
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
