package lb_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A panic loses one object. Each panic is counted, but logged with its stack only once. The trouble of a persistent
// object ends when it is handled again, the trouble of a message after a while.
func TestBoundary(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		var told []string
		b := &lb.Boundary{Log: slog.New(slog.NewTextHandler(&text, nil))}
		b.Changed = func(x lb.Trouble) { told = append(told, fmt.Sprint(x.Part, " ", x.Object, " ", x.Reason)) }
		panics := func() { panic("odd") }
		for range 2 {
			must.Need(t, !b.Do(lb.PartService, "a/web", panics) && !b.Do(lb.PartFrame, "eth0", panics),
				"a panic counts as success")
		}
		n := b.Panics()
		must.True(t, n[lb.PartService] == 2 && n[lb.PartFrame] == 2, "panics %v; want 2 each", n)
		want := []string{"service a/web panic: odd", "frame eth0 panic: odd"}
		must.Equal(t, want, told)
		must.Row(t, "stacks in the log, one for each object", 2, strings.Count(text.String(), "stack="))
		must.True(t, b.Do(lb.PartService, "a/web", func() {}) && b.Do(lb.PartFrame, "eth0", func() {}),
			"no success after a panic")
		must.Equal(t, []string{"frame eth0: panic: odd"}, b.Troubles())
		time.Sleep(11 * time.Minute)
		must.True(t, len(b.Troubles()) == 0, "troubles %q; want none after a while", b.Troubles())
		for i := range 9 {
			b.Report(lb.PartRoom, fmt.Sprint(i), "refused")
		}
		got := b.Troubles()
		must.True(t, len(got) == 4 && got[3] == "room: 6 more", "troubles %q; want three, and how many more", got)
	})
}

// stumbling returns a boundary in which one part panics on one object while on is set.
func stumbling(part lb.Part, object string) (b *lb.Boundary, on *atomic.Bool) {
	on = new(atomic.Bool)
	on.Store(true)
	return &lb.Boundary{Log: slog.New(slog.DiscardHandler), Before: func(p lb.Part, o string) {
		if p == part && o == object && on.Load() {
			panic("injected")
		}
	}}, on
}

// When planning one service panics, 200 others are served. A service from an earlier run stays announced and in the
// kernel. When it changes and planning works again, its new plan is applied.
func TestPanicOfAPlan(t *testing.T) {
	b, on := stumbling(lb.PartPlan, "bad")
	fx := lbtest.New(frontend(vip1))
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		bad := service("bad", []netip.Addr{vip1}, "10.0.0.1")
		bad.Check.Type = lb.CheckNone
		e.Put(bad)
		others := []netip.Addr{}
		for i := range 200 {
			vip := netip.AddrFrom4([4]byte{203, 0, 114, byte(i)})
			s := service(fmt.Sprint("other", i), []netip.Addr{vip}, "10.0.0.2")
			s.Check.Type = lb.CheckNone
			e.Put(s)
			others = append(others, vip)
		}
		e.Complete("file")
		wantAnnounced(t, fx, append([]netip.Addr{vip1}, others...)...)
		p, held := fx.Served(frontend(vip1))
		must.True(t, held && p == nil, "the frontend of an earlier run is %+v, held %t; want it as it was", p, held)
		got := b.Troubles()
		must.True(t, len(got) == 1 && strings.Contains(got[0], "plan bad: panic: injected"), "troubles %q", got)
		on.Store(false)
		changed := *bad
		e.Put(&changed)
		wantTargets(t, fx, frontend(vip1), 1)
		wantAnnounced(t, fx, append([]netip.Addr{vip1}, others...)...)

		on.Store(true)
		changed.Ports = lb.PortsOn([]lb.Backend{{Addr: netip.MustParseAddr("10.0.0.7"), Weight: 1}}, bad.Ports[0].Port)
		again := changed
		e.Put(&again)
		e.Delete("other0")
		wantAnnounced(t, fx, append([]netip.Addr{vip1}, others[1:]...)...)
		if p, _ := fx.Served(frontend(vip1)); p.Targets[0].Addr.Addr() != netip.MustParseAddr("10.0.0.1") {
			t.Errorf("targets %v; want the previous ones", p.Targets)
		}
		on.Store(false)
		e.Delete("bad")
		wantAnnounced(t, fx, others[1:]...)
		must.Equal(t, nil, b.Troubles())
	}, func(o *lb.EngineOptions) { o.Boundary = b })
}

// A frozen service that is deleted leaves nothing.
func TestFrozenServiceIsDeleted(t *testing.T) {
	fx := lbtest.New(frontend(vip1))
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		e.Put(service("bad", []netip.Addr{vip1}, "10.0.0.1").Freeze())
		e.Complete("file")
		wantAnnounced(t, fx, vip1)
		e.Drain(lb.Drains{Services: []string{"bad"}})
		wantAnnounced(t, fx)
		e.Drain(lb.Drains{})
		wantAnnounced(t, fx, vip1)
		e.Delete("bad")
		wantAnnounced(t, fx)
		_, held := fx.Served(frontend(vip1))
		must.True(t, !held, "the frontend is still there")
	})
}

// When the status of one service panics, the others still have one.
func TestPanicOfAStatus(t *testing.T) {
	b, _ := stumbling(lb.PartStatus, "bad")
	inEngine(t, lbtest.New(), func(t *testing.T, e *lb.Engine) {
		e.Put(service("bad", []netip.Addr{vip1}, "10.0.0.1"))
		e.Put(service("good", []netip.Addr{vip2}, "10.0.0.1"))
		st, err := e.Status(t.Context())
		must.True(t, err == nil && len(st.Services) == 1 && st.Services[0].Service == "good",
			"services %+v, %v; want the good one", st.Services, err)
	}, func(o *lb.EngineOptions) { o.Boundary = b })
}
