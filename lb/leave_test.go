package lb_test

import (
	"context"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Before a planned withdrawal a route has a lower preference for some time, so that routers choose others first (RFC
// 8326). A withdrawal for another reason is immediate, even during that time.
func TestGracefulWithdrawal(t *testing.T) {
	const grace = 2 * time.Second
	synctest.Test(t, func(t *testing.T) {
		fx := lbtest.New()
		o := engineOptions(fx)
		o.Grace = func([]lb.AnnouncerKind) time.Duration { return grace }
		e := must.Get(lb.NewEngine(o))(t)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- e.Run(ctx) }()
		lowered := func(want ...bool) {
			t.Helper()
			synctest.Wait()
			var got []bool
			for _, a := range fx.Announcements() {
				got = append(got, a.LowerPreference)
			}
			must.Equal(t, want, got)
		}
		one, two := service("one", []netip.Addr{vip1}, "10.0.0.1"), service("two", []netip.Addr{vip2}, "10.0.0.2")
		serve(e, one, two)
		lowered(false, false)

		e.Drain(lb.Drains{}.With(lb.DrainTarget{Service: "one"}, true))
		lowered(true, false)
		st, err := e.Status(t.Context())
		must.True(t, err == nil && st.Routes[0].Reason == "with a lower preference: drained by the operator",
			"status %+v, %v", st.Routes, err)
		time.Sleep(grace - time.Millisecond)
		lowered(true, false)
		time.Sleep(2 * time.Millisecond)
		lowered(false)
		e.Put(one) // the grace period does not start again
		lowered(false)

		e.Drain(lb.Drains{})
		lowered(false, false)
		e.Drain(lb.Drains{}.With(lb.DrainTarget{Service: "one"}, true))
		lowered(true, false)
		answer(e, one, lb.StateUnhealthy)
		lowered(false)

		answer(e, one, lb.StateHealthy)
		e.Drain(lb.Drains{})
		lowered(false, false)
		cancel()
		lowered(true, true)
		answer(e, two, lb.StateUnhealthy)
		lowered(true)
		select {
		case err := <-done:
			t.Errorf("Run has ended: %v", err)
		case <-time.After(grace - time.Millisecond):
		}
		time.Sleep(2 * time.Millisecond)
		lowered()
		must.Do(t, <-done)
		must.Row(t, "violations of the order", nil, fx.Violations())
	})
}
