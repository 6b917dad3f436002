package lb_test

import (
	"context"
	"errors"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func settled(e *lb.Engine) bool {
	synctest.Wait()
	select {
	case <-e.Settled():
		return true
	default:
		return false
	}
}

// Settled is closed once every source is complete and every service has had a plan, and stays closed.
func TestSettled(t *testing.T) {
	for _, tt := range []struct {
		name            string
		source, results bool
		wait            time.Duration
		want            bool
	}{
		{"nothing yet", false, false, time.Hour, false},
		{"results, the source is not complete", false, true, time.Hour, false},
		{"source complete, no results", true, false, 9 * time.Second, false},
		{"source complete and results", true, true, 0, true},
		{"source complete, no results for longer than Settle", true, false, 11 * time.Second, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inEngine(t, lbtest.New(), func(t *testing.T, e *lb.Engine) {
				s := service("web", []netip.Addr{vip1}, "10.0.0.1")
				e.Put(s)
				if tt.source {
					e.Complete("file")
				}
				if tt.results {
					answer(e, s, lb.StateHealthy)
				}
				time.Sleep(tt.wait)
				if got := settled(e); got != tt.want {
					t.Errorf("settled: %t; want %t", got, tt.want)
				}
				if st, err := e.Status(t.Context()); err != nil || st.Settled != tt.want {
					t.Errorf("Status: settled %t, %v; want %t", st.Settled, err, tt.want)
				}
				if tt.want {
					e.Put(service("more", []netip.Addr{vip2}, "10.0.0.2"))
					if !settled(e) {
						t.Error("not settled after another service; want settled for good")
					}
				}
			})
		})
	}
}

// A query of an engine that does not run fails with its context.
func TestQueriesEndWithTheirContext(t *testing.T) {
	fx := lbtest.New()
	e := must.Get(lb.NewEngine(lb.EngineOptions{Datapath: fx, Announcer: fx, Prober: fx}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := e.Behind(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Behind: %v; want canceled", err)
	}
	if _, err := e.Status(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Status: %v; want canceled", err)
	}
}
