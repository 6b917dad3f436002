package datapath

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/datapath/internal/route"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// Changes that never end postpone nothing: an address that is added meanwhile is used (D11).
func TestSteadyChangesPostponeNothing(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookTC, false, nil)
	fx.service(lb.TCP, "b1")
	fx.watch()
	labtest.Until(t, 10*time.Second, "the first look at the network", func() error {
		return wrong(fx.d.verifier.Pause() == 0, "none yet")
	})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- fx.host.Do(func() error {
			r := &netlink.Route{LinkIndex: route.LoopbackIndex, Dst: prefix("10.1.2.0/24")}
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
