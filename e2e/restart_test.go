package e2e

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// killed: SIGKILL and a restart of the agent fail no request and no connection and remove no route. The history stays.
func (s *site) killed(t *testing.T) {
	before := must.Get(s.Agents[0].CLI(t.Context(), "events", "--kind", "routes"))(t)
	s.survivesRestart(t, func(a *lab.Agent) error { a.Kill(); return nil }, (*lab.Agent).Start)
	after := must.Get(s.Agents[0].CLI(t.Context(), "events", "--kind", "routes"))(t)
	if !strings.Contains(before, "route announced") || !strings.HasPrefix(after, before) || after == before {
		t.Errorf("events before:\n%s\nand after:\n%s", before, after)
	}
}

// restartsBySignal: so it is with the signal that systemd sends for a restart.
func (s *site) restartsBySignal(t *testing.T) {
	end := func(a *lab.Agent) error { return a.EndForRestart(t.Context(), lab.Ready) }
	s.survivesRestart(t, end, (*lab.Agent).Start)
}

// restartsByCommand: so it is with "steelyard restart", which keeps the process, and refuses an invalid file.
func (s *site) restartsByCommand(t *testing.T) {
	a := s.Agents[0]
	pid := a.Process().Pid()
	s.survivesRestart(t, func(*lab.Agent) error { return nil }, func(a *lab.Agent) error {
		out, err := a.CLI(t.Context(), "restart")
		return errors.Join(err, labtest.ErrorIf(!strings.HasPrefix(out, "restarted: version "),
			"the output is %q", out))
	})
	if now := a.Process().Pid(); now != pid {
		t.Errorf("process %d became %d", pid, now)
	}
	a.Kill()
	must.Do(t, a.Start())
	labtest.Until(t, lab.Ready, "the agent starts", func() error { // before its first lines Go ignores the signal
		return labtest.ErrorIf(!a.Process().Log.Contains("interface attached"), "not yet")
	})
	if err := a.EndForRestart(t.Context(), lab.Ready); err != nil {
		t.Errorf("during the start: %v", err)
	}
	must.Do(t, errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready)))
	c := s.Config[0]
	missing := c
	missing.Interfaces = []string{"none-0"}
	for _, text := range []string{c.TOML() + "\n[nonsense]\n", missing.TOML()} {
		must.Do(t, a.Configure(text))
		out, err := a.CLI(t.Context(), "restart")
		if err == nil || !a.Process().Running() || strings.Contains(a.Process().Log.Tail(100), "agent restarts") {
			t.Errorf("a restart with an invalid file: %s", out)
		}
	}
	must.Do(t, a.Configure(c.TOML()))
}

func (s *site) survivesRestart(t *testing.T, end, start func(*lab.Agent) error) {
	four := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip4, 9000), 200)
	six := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip6, 9000), 200)
	streams := []*traffic.Stream{
		s.Client().Stream(t.Context(), labtest.URL(vip4), 10*time.Millisecond, 4*time.Second),
		s.Client().Stream(t.Context(), labtest.URL(vip6), 10*time.Millisecond, 4*time.Second),
	}
	stop := s.watchRoutes(t)
	must.Do(t, end(s.Agents[0]))
	labtest.Exchange(t, four, "without an agent")
	labtest.Exchange(t, six, "without an agent")
	s.checkAnswered(t, 200)
	must.Do(t, start(s.Agents[0]))
	must.Do(t, s.Agents[0].WaitReady(t.Context(), lab.Ready))
	b := s.Balancers[0]
	must.Do(t, s.Daemon.WaitEstablished(t.Context(), lab.Ready, b.V4, b.V6))
	labtest.Until(t, lab.Ready, "the new agent has announced", func() error {
		return labtest.ErrorIf(!s.Agents[0].Process().Log.Contains("route announced"), "not yet")
	})
	s.checkAnswered(t, 200)
	labtest.Exchange(t, four, "with the new agent")
	labtest.Exchange(t, six, "with the new agent")
	stop()
	for i, tr := range streams {
		tr.Stop()
		r := tr.Between(time.Time{}, time.Time{})
		t.Logf("%s: %s", vips[i], r)
		if r.Err() != nil || r.Answered() < 100 {
			t.Errorf("%s: %d answered; %v", vips[i], r.Answered(), r.Err())
		}
	}
}

// watchRoutes polls the router's routes until stop is called, which fails the test if a route was ever missing.
func (s *site) watchRoutes(t *testing.T) (stop func()) {
	quit, done := make(chan struct{}), make(chan int)
	var missing []string
	go func() {
		polls := 0
		defer func() { done <- polls }()
		for {
			select {
			case <-quit:
				return
			default:
			}
			polls++
			time.Sleep(time.Millisecond) // leave the processors to the balancer
			for _, vip := range vips {
				if via, err := s.Topology.Router.NextHops(labtest.HostRoute(vip)); err != nil || len(via) != 1 {
					missing = append(missing, vip.String())
				}
			}
		}
	}()
	return func() {
		close(quit)
		if polls := <-done; len(missing) > 0 || polls < 100 {
			first := strings.Join(missing[:min(3, len(missing))], ", ")
			t.Errorf("of %d polls of the router's table, routes were missing in %d: %s", polls, len(missing), first)
		}
	}
}

// cleansUp: "steelyard cleanup" removes all that the agent has set on the node.
func (s *site) cleansUp(t *testing.T) {
	lb := s.Balancers[0]
	s.checkAnswered(t, 20)
	if _, err := s.Agents[0].CLI(t.Context(), "cleanup"); err == nil {
		t.Error("cleanup beside a running agent succeeded")
	}
	s.checkAnswered(t, 20)
	must.Do(t, s.Agents[0].Terminate(t.Context(), lab.Ready))
	must.Get(s.Agents[0].CLI(t.Context(), "cleanup"))(t)
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
	out, err := lb.Run(t.Context(), "ip", "-details", "link", "show", "eth0")
	if err != nil || strings.Contains(out, "xdp") {
		t.Errorf("XDP is still attached: %s %v", out, err)
	}
}
