package e2e

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
)

// Killed with -9 and started again: nobody notices, neither clients nor the router.
func TestKilledAgentCostsNothing(t *testing.T) {
	variants(t, func(t *testing.T, kind peers.RouterKind, mode string) {
		s := newSite(t, kind, mode, 1, 3)
		four, six := labtest.Connect(t, s.client(), netip.AddrPortFrom(vip4, 9000), 200), labtest.Connect(t, s.client(), netip.AddrPortFrom(vip6, 9000), 200)
		streams := []*traffic.Stream{
			s.client().Stream(t.Context(), url(vip4), 5*time.Millisecond, 2*time.Second),
			s.client().Stream(t.Context(), url(vip6), 5*time.Millisecond, 2*time.Second),
		}
		stop := s.watchRoutes(t)
		s.agents[0].Kill()
		exchange(t, four, "without an agent")
		exchange(t, six, "without an agent")
		s.checkAnswered(t, 200)
		if err := s.agents[0].Start(); err != nil {
			t.Fatal(err)
		}
		if err := s.agents[0].WaitReady(t.Context(), 15*time.Second); err != nil {
			t.Fatal(err)
		}
		if err := s.router.WaitEstablished(t.Context(), 40*time.Second, s.Balancers[0].V4, s.Balancers[0].V6); err != nil {
			t.Fatal(err)
		}
		labtest.Until(t, 10*time.Second, "the new agent has announced", func() error {
			if !s.agents[0].Process().Log.Contains("route announced") {
				return errors.New("not yet")
			}
			return nil
		})
		s.checkAnswered(t, 200)
		exchange(t, four, "with the new agent")
		exchange(t, six, "with the new agent")
		stop()
		for i, tr := range streams {
			tr.Stop()
			r := tr.Between(time.Time{}, time.Time{})
			t.Logf("%s: %s", vips[i], r)
			if r.Err() != nil || r.Answered() < 100 {
				t.Errorf("%s: %d answered; %v", vips[i], r.Answered(), r.Err())
			}
		}
	})
}

// watchRoutes looks at the router's routes all the time until stop is called, which fails the test if one was ever gone.
func (s *site) watchRoutes(t *testing.T) (stop func()) {
	quit, done := make(chan struct{}), make(chan int)
	var gone []string
	go func() {
		looks := 0
		defer func() { done <- looks }()
		for {
			select {
			case <-quit:
				return
			default:
			}
			looks++
			for _, vip := range vips {
				if via, err := s.Topology.Router.NextHops(host(vip)); err != nil || len(via) != 1 {
					gone = append(gone, vip.String())
				}
			}
		}
	}()
	return func() {
		close(quit)
		if looks := <-done; len(gone) > 0 || looks < 100 {
			t.Errorf("of %d looks at the router's table, routes were missing in %d: %s", looks, len(gone), strings.Join(gone[:min(3, len(gone))], ", "))
		}
	}
}

// What "steelyard cleanup" leaves must be what was there before the agent.
func TestCleanupLeavesTheMachineAsItWas(t *testing.T) {
	for _, mode := range []string{"tc", "xdp"} {
		t.Run(mode, func(t *testing.T) {
			s := newSite(t, peers.BIRD, mode, 1, 3)
			lb := s.Balancers[0]
			s.checkAnswered(t, 20)
			if _, err := s.agents[0].CLI(t.Context(), "cleanup"); err == nil {
				t.Error("cleanup beside a running agent succeeded")
			}
			s.checkAnswered(t, 20)
			if err := s.agents[0].Terminate(t.Context(), 10*time.Second); err != nil {
				t.Fatal(err)
			}
			if out, err := s.agents[0].CLI(t.Context(), "cleanup"); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			for path, want := range map[string]string{
				"/proc/sys/net/ipv4/conf/eth0/forwarding": "0", "/proc/sys/net/ipv6/conf/eth0/forwarding": "0",
			} {
				if got, err := lb.ReadFile(path); err != nil || strings.TrimSpace(got) != want {
					t.Errorf("%s is %q, %v; want %s", path, got, err, want)
				}
			}
			if out, err := lb.Run(t.Context(), "ls", "/sys/fs/bpf"); err != nil || strings.Contains(out, "steelyard") {
				t.Errorf("still pinned: %s %v", out, err)
			}
			if out, err := lb.Run(t.Context(), "ip", "-details", "link", "show", "eth0"); err != nil || strings.Contains(out, "xdp") {
				t.Errorf("XDP is still attached: %s %v", out, err)
			}
		})
	}
}
