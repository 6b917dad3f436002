package datapath

import (
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
)

// numbered returns the plan of the ith of many services of one backend, with this weight.
func (fx *fixture) numbered(i, weight int) *lb.FrontendPlan {
	return lb.Build(&lb.Service{
		Name: fmt.Sprint(i), VIPs: []netip.Addr{netip.AddrFrom4([4]byte{203, 1, byte(i >> 8), byte(i)})},
		Ports: lb.PortsOn([]lb.Backend{{Addr: fx.addr("unknown"), Weight: weight}},
			lb.Port{Port: 80, Target: 8080, Protocol: lb.TCP}),
		Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Check: lb.CheckSpec{Type: lb.CheckNone},
	}, nil, lb.Drains{}).Frontends[0]
}

// A change of one frontend leaves as much garbage with thousands that have a fault as with a few.
func TestAChangeIsIndependentOfOtherFaults(t *testing.T) {
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	put := func(from, to int) {
		var d lb.Delta
		for i := from; i < to; i++ {
			d.Put = append(d.Put, fx.numbered(i, 1))
		}
		fx.apply(d)
		if len(x.now) != to {
			t.Fatalf("%d faults of %d frontends", len(x.now), to)
		}
	}
	garbage := func() uint64 {
		const changes = 50
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for i := range changes {
			fx.apply(lb.Delta{Put: []*lb.FrontendPlan{fx.numbered(0, 2+i)}})
		}
		runtime.ReadMemStats(&after)
		return (after.TotalAlloc - before.TotalAlloc) / changes
	}
	put(0, 16)
	few := garbage()
	put(16, 4096)
	if many := garbage(); many > few+few/2 {
		t.Errorf("a change leaves %d bytes of garbage with 4096 faults, and %d with 16", many, few)
	}
}

// While this node has a fault, each VIP has it, also one that is put then, and not long one that is removed.
func TestFaultsOfTheNodeFollowChanges(t *testing.T) {
	t.Parallel()
	fx, x := verified(t, ModeTC, false, nil, func(*fixture) {})
	plans := []*lb.FrontendPlan{fx.numbered(0, 1), fx.numbered(1, 1), fx.numbered(2, 1)}
	fx.apply(lb.Delta{Put: plans[:2]})
	fx.watch()
	fx.do(func() error { return ip(netlink.LinkSetDown)(fx) })
	const down = "no interface forwards: eth0 is down"
	reported := func(want ...string) error {
		var errs []error
		for i, p := range plans {
			errs = append(errs, wrong(x.of(p.VIP) != want[i], "fault of %s: %q", p.VIP, x.of(p.VIP)))
		}
		return errors.Join(errs...)
	}
	labtest.Until(t, noticed, "it is reported", func() error { return reported(down, down, "") })
	fx.apply(lb.Delta{Put: plans[2:], Delete: []lb.Frontend{plans[1].Frontend}})
	if f := x.of(plans[2].VIP); f != down {
		t.Errorf("fault %q when Apply returns", f)
	}
	labtest.Until(t, 5*time.Second, "the removed one has no fault", func() error {
		return errors.Join(reported(down, "", down), wrong(fx.d.verifier.Faults() != 2, "%d", fx.d.verifier.Faults()))
	})
	fx.do(func() error { return ip(netlink.LinkSetUp)(fx) })
	labtest.Until(t, 5*time.Second, "the faults of the frontends themselves are reported again", func() error {
		return wrong(x.of(plans[0].VIP) == down || x.of(plans[0].VIP) == "" || x.of(plans[0].VIP) != x.of(plans[2].VIP),
			"%q, %q", x.of(plans[0].VIP), x.of(plans[2].VIP))
	})
}
