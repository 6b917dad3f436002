package bgp_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestNewStartsNothing(t *testing.T) {
	before := runtime.NumGoroutine()
	s := newSpeaker(t, (&router{port: 1}).options())
	if err := s.Set(t.Context(), announcements(vip4)); err != nil {
		t.Error(err)
	}
	if n := runtime.NumGoroutine(); n > before {
		t.Errorf("%d goroutines, before %d", n, before)
	}
}

// Run leaves no goroutine running, although Serve of gobgp never returns.
func TestNoGoroutineIsLeft(t *testing.T) {
	r := startRouter(t)
	for range 3 {
		s := newSpeaker(t, r.options())
		stop := must.Run(t, s.Run)
		must.Do(t, s.Set(t.Context(), announcements(vip4, vip6)))
		r.awaitPaths(t, 2)
		labtest.Until(t, timeout, "the speaker has the session", func() error {
			p := s.Peers()[0]
			return labtest.ErrorIf(p.State != "established", "%+v", p)
		})
		must.Do(t, s.Set(t.Context(), nil))
		stop()
		if p := s.Peers()[0]; p.State != "idle" || p.Routes != 0 {
			t.Errorf("after Run: %+v", p)
		}
		r.forgetNeighbour(t)
	}
	// The router is also a gobgp server: what it leaves behind does not count.
	labtest.Until(t, timeout, "all goroutines to end", func() error {
		b := make([]byte, 1<<20)
		for stack := range strings.SplitSeq(string(b[:runtime.Stack(b, true)]), "\n\n") {
			if strings.Contains(stack, "/announce/bgp.") || strings.Contains(stack, "/announce/bgp/guard.") {
				return errors.New(stack)
			}
		}
		return nil
	})
}

// Run without a Set opens no session and returns when its context ends.
func TestRunEndsBeforeSet(t *testing.T) {
	r := startRouter(t)
	s := newSpeaker(t, r.options())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Run(ctx); err != nil {
		t.Error(err)
	}
}

// A speaker can run again and then announces the last set.
func TestRunTwice(t *testing.T) {
	t.Parallel()
	r := startRouter(t)
	s := newSpeaker(t, r.options())
	must.Do(t, s.Set(t.Context(), announcements(vip4)))
	for range 2 {
		stop := must.Run(t, s.Run)
		r.awaitPaths(t, 1)
		stop()
		r.awaitPaths(t, 0)
		r.forgetNeighbour(t)
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	r := startRouter(t)
	s := newSpeaker(t, r.options())
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(s)
	text := `# HELP steelyard_bgp_peer_up Whether the BGP session with the peer is established.
# TYPE steelyard_bgp_peer_up gauge
steelyard_bgp_peer_up{peer="127.0.0.1"} %d
# HELP steelyard_bgp_routes_announced Routes announced to the peer.
# TYPE steelyard_bgp_routes_announced gauge
steelyard_bgp_routes_announced{peer="127.0.0.1"} %d
# HELP steelyard_bgp_session_transitions_total Transitions of the BGP session with the peer to up and down.
# TYPE steelyard_bgp_session_transitions_total counter
steelyard_bgp_session_transitions_total{peer="127.0.0.1",to="down"} 0
steelyard_bgp_session_transitions_total{peer="127.0.0.1",to="up"} %d
`
	gathered := func(up, routes, ups int) error {
		return testutil.GatherAndCompare(reg, strings.NewReader(fmt.Sprintf(text, up, routes, ups)))
	}
	if err := gathered(0, 0, 0); err != nil {
		t.Error(err)
	}
	must.Run(t, s.Run)
	must.Do(t, s.Set(t.Context(), announcements(vip4, vip6)))
	labtest.Until(t, timeout, "metrics of a session", func() error { return gathered(1, 2, 1) })
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("promlint: %v %v", problems, err)
	}
}

// BenchmarkSet adds or removes one of 10,000 VIPs with an established session.
func BenchmarkSet(b *testing.B) {
	r := startRouter(b)
	s := newSpeaker(b, r.options())
	must.Run(b, s.Run)
	list := make([]lb.Announcement, 10_000)
	for i := range list {
		list[i] = lb.Announcement{VIP: netip.AddrFrom4([4]byte{100, 64, byte(i >> 8), byte(i)}), Weight: 1}
	}
	began := time.Now()
	must.Do(b, s.Set(b.Context(), list))
	first := time.Since(began)
	r.awaitPaths(b, len(list))
	arrived := time.Since(began)
	for i := 0; b.Loop(); i++ {
		must.Do(b, s.Set(b.Context(), list[:len(list)-i%2]))
	}
	b.ReportMetric(float64(first.Milliseconds()), "first-ms")
	b.ReportMetric(float64(arrived.Milliseconds()), "all-at-router-ms")
}
