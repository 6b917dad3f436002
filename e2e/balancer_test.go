package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestOneBalancer covers a single load balancer, because no other hides its failures. One network serves all scenarios.
func TestOneBalancer(t *testing.T) {
	t.Parallel()
	variants(t, func(t *testing.T, kind peers.RouterKind, mode string) {
		t.Parallel()
		s := newSite(t, kind, mode, 1, 3)
		t.Run("path MTU", s.pathMTU)
		t.Run("carries datagrams of 60 KB", func(t *testing.T) {
			for _, vip := range vips {
				s.largeDatagrams(t, vip)
			}
		})
		t.Run("the agent is killed", s.killed)
		t.Run("the agent restarts by a signal", s.restartsBySignal)
		t.Run("the agent restarts by a command", s.restartsByCommand)
		t.Run("an address becomes the machine's own", s.addressBecomesOwn)
		t.Run("the uplink is deleted and created again", func(t *testing.T) { s.uplinkRecreated(t, mode) })
		t.Run("several uplinks", func(t *testing.T) { s.severalUplinks(t, mode) })
		t.Run("cleanup", s.cleansUp)
	})
}

// addressBecomesOwn checks that a service address that the machine is given is withdrawn, and that its packets reach
// the machine. Once the machine loses the address, the service has it again. check and reload reject such an address.
func (s *site) addressBecomesOwn(t *testing.T) {
	b, a := s.Balancers[0], s.Agents[0]
	s.checkAnswered(t, 20)
	must.Do(t, b.AddAddress("eth0", labtest.HostRoute(vip4)))
	const reason = "refused: 203.0.113.10 is the address of eth0"
	labtest.Until(t, "the address is refused", func() error { return shows(t, a, reason, "routes") })
	must.Get(s.Topology.Router.WaitNextHops(t.Context(), lab.Ready, labtest.HostRoute(vip4)))(t)
	own := must.Get(traffic.ServeHTTP(b.Host, "the balancer", netip.AddrPortFrom(vip4, 7000)))(t)
	must.Do(t, s.Topology.Router.AddRoute(labtest.HostRoute(vip4), b.V4))
	labtest.Until(t, "the machine itself answers there", func() error {
		got, err := s.Client().Get(t.Context(), fmt.Sprintf("http://%s:7000/", vip4))
		return errors.Join(err, labtest.ErrorIf(got.Server != own.Name, "%s answered", got.Server))
	})
	must.True(t, shows(t, a, reason, "check", lab.AgentConfigPath) != nil, "check accepts the address of this machine")
	out, err := a.CLI(t.Context(), "reload")
	must.True(t, err != nil, "a reload accepts the address of this machine: %s", out)
	must.Do(t, errors.Join(
		s.Topology.Router.DeleteRoute(labtest.HostRoute(vip4)), b.DeleteAddress("eth0", labtest.HostRoute(vip4))))
	s.waitRoutes(t, b)
	s.waitAnswered(t)
}

// shows returns an error unless a command's output contains text.
func shows(t *testing.T, a *lab.Agent, text string, command ...string) error {
	out, err := a.CLI(t.Context(), command...)
	return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, text), "%s", out))
}

// uplinkRecreated checks that an uplink that is deleted and created again, as by a driver reload, is attached again.
func (s *site) uplinkRecreated(t *testing.T, mode string) {
	balancer, router := s.Balancers[0], s.Topology.Router
	s.checkAnswered(t, 20)
	must.Get(balancer.Run(t.Context(), "ip", "link", "delete", "eth0"))(t)
	attached := func(want string) func() error {
		return func() error { return shows(t, s.Agents[0], want, "status") }
	}
	labtest.Until(t, "status shows that it does not exist", attached("interface not found"))
	near := []netip.Prefix{netip.PrefixFrom(balancer.V4, 30), netip.PrefixFrom(balancer.V6, 64)}
	far := []netip.Prefix{netip.PrefixFrom(balancer.Gateway4, 30), netip.PrefixFrom(balancer.Gateway6, 64)}
	err := s.Link(
		lab.End{Host: balancer.Host, Name: "eth0", Addresses: near},
		lab.End{Host: router, Name: balancer.Port, Addresses: far},
		lab.LinkOptions{SoftwareChecksums: mode == "xdp"})
	must.Do(t, errors.Join(err, balancer.AddRoute(lab.Default, balancer.Gateway4),
		balancer.AddRoute(lab.Default6, balancer.Gateway6)))
	labtest.Until(t, "it is attached again", attached(mode+" (tcx)"))
	s.waitRoutes(t, s.Balancers...)
	s.waitAnswered(t)
}

// severalUplinks checks that the load balancer can receive requests on one uplink and reach the servers through
// another.
func (s *site) severalUplinks(t *testing.T, mode string) {
	balancer := s.Balancers[0]
	inside := s.linkToServers(t, mode)
	must.Do(t, s.Agents[0].Terminate(t.Context(), lab.Ready))
	s.Config[0].Interfaces = []string{"eth0", "eth1"}
	must.Do(t, errors.Join(s.Agents[0].Configure(s.Config[0].TOML()), s.Agents[0].Start()))
	s.waitRoutes(t, balancer)
	s.waitAnswered(t)
	s.checkAnswered(t, 200)
	for _, w := range s.web {
		clients := w.Clients()
		must.True(t, clients[inside[0].Addr()] > 0 && clients[inside[1].Addr()] > 0,
			"%s had requests from %v; want the balancer's addresses on eth1", w.Name, clients)
	}
	labtest.Exchange(t, labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip4, 9000), 50), "over two uplinks")
}

// linkToServers adds eth1 to the load balancer, on the servers' link, and returns its addresses there.
func (s *site) linkToServers(t *testing.T, mode string) []netip.Prefix {
	t.Helper()
	inside := []netip.Prefix{netip.MustParsePrefix("192.0.2.100/25"), netip.MustParsePrefix("2001:db8:2::100/64")}
	must.Do(t, s.Link(
		lab.End{Host: s.Balancers[0].Host, Name: "eth1", Addresses: inside},
		lab.End{Host: s.Switch, Name: "lb1", Bridge: "switch"},
		lab.LinkOptions{SoftwareChecksums: mode == "xdp"}))
	return inside
}

// killed checks that SIGKILL and a restart of the agent fail no request or connection and remove no route. The history
// stays.
func (s *site) killed(t *testing.T) {
	before := must.Get(s.Agents[0].CLI(t.Context(), "events", "--kind", "routes"))(t)
	s.survivesRestart(t, func(a *lab.Agent) error { a.Kill(); return nil }, (*lab.Agent).Start)
	after := must.Get(s.Agents[0].CLI(t.Context(), "events", "--kind", "routes"))(t)
	must.True(t, strings.Contains(before, "route announced") && strings.HasPrefix(after, before) && after != before,
		"events before:\n%s\nand after:\n%s", before, after)
}

// restartsBySignal checks the same with the signal that systemd sends for a restart.
func (s *site) restartsBySignal(t *testing.T) {
	end := func(a *lab.Agent) error { return a.EndForRestart(t.Context(), lab.Ready) }
	s.survivesRestart(t, end, (*lab.Agent).Start)
}

// restartsByCommand checks the same with "steelyard restart", which keeps the process and rejects an invalid file.
func (s *site) restartsByCommand(t *testing.T) {
	a := s.Agents[0]
	pid := a.Process().Pid()
	s.survivesRestart(t, func(*lab.Agent) error { return nil }, func(a *lab.Agent) error {
		out, err := a.CLI(t.Context(), "restart")
		return errors.Join(err, labtest.ErrorIf(!strings.HasPrefix(out, "restarted: version "),
			"the output is %q", out))
	})
	now := a.Process().Pid()
	must.True(t, now == pid, "process %d became %d", pid, now)
	a.Kill()
	must.Do(t, a.Start())
	labtest.Until(t, "the agent starts", func() error { // before its first lines, Go ignores the signal
		return labtest.ErrorIf(!a.Process().Log.Contains("programs attached"), "not yet")
	})
	must.Do(t, a.EndForRestart(t.Context(), lab.Ready)) // during startup
	must.Do(t, errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready)))
	c := s.Config[0]
	missing := c
	missing.Interfaces = []string{"none-0"}
	for _, text := range []string{c.TOML() + "\n[nonsense]\n", missing.TOML()} {
		must.Do(t, a.Configure(text))
		out, err := a.CLI(t.Context(), "restart")
		must.True(t, err != nil && a.Process().Running() &&
			!strings.Contains(a.Process().Log.Tail(100), "agent restarting"), "a restart with an invalid file: %s", out)
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
	labtest.Until(t, "the new agent has announced", func() error {
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
		must.True(t, r.Err() == nil && r.Answered() >= 20, "%s: %d answered; %v", vips[i], r.Answered(), r.Err())
	}
}

// watchRoutes polls the router's routes until stop is called. stop fails the test if a route was ever missing.
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
			time.Sleep(time.Millisecond) // leave the CPUs to the load balancer
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

// cleansUp checks that "steelyard cleanup" removes everything that the agent has set on the node.
func (s *site) cleansUp(t *testing.T) {
	lb := s.Balancers[0]
	s.checkAnswered(t, 20)
	_, err := s.Agents[0].CLI(t.Context(), "cleanup")
	must.True(t, err != nil, "cleanup beside a running agent succeeded")
	s.checkAnswered(t, 20)
	must.Do(t, s.Agents[0].Terminate(t.Context(), lab.Ready))
	must.Get(s.Agents[0].CLI(t.Context(), "cleanup"))(t)
	for _, family := range []string{"ipv4", "ipv6"} {
		got := must.Get(lb.ReadFile("/proc/sys/net/" + family + "/conf/eth0/forwarding"))(t)
		must.Row(t, "forwarding of "+family, "0", strings.TrimSpace(got))
	}
	out := must.Get(lb.Run(t.Context(), "ls", "/sys/fs/bpf"))(t)
	must.True(t, !strings.Contains(out, "steelyard"), "still pinned: %s", out)
	out = must.Get(lb.Run(t.Context(), "ip", "-details", "link", "show", "eth0"))(t)
	must.True(t, !strings.Contains(out, "xdp"), "XDP is still attached: %s", out)
}

var binary string // the program under test

func TestMain(m *testing.M) { os.Exit(labtest.Main(m, &binary)) }
