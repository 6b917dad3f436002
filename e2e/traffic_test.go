package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestStandalone covers two standalone load balancers: announcements, balancing, reload, failed servers, a lost BGP
// session, drain and termination.
func TestStandalone(t *testing.T) {
	variants(t, func(t *testing.T, kind peers.RouterKind, mode string) {
		s := newCheckedSite(t, kind, mode, 2, 2, quick)
		t.Run("is attached as configured", func(t *testing.T) { s.attached(t, mode) })
		t.Run("balances evenly", s.balances)
		t.Run("replies to ping and refuses other ports", s.refuses)
		t.Run("balances UDP", s.balancesUDP)
		t.Run("keeps connections during a reload that adds a server", s.reloads)
		t.Run("rejects an invalid file and continues", s.rejectsInvalidFile)
		t.Run("removes a failed server in time", s.serverFails)
		t.Run("withdraws when all servers fail", s.allServersFail)
		t.Run("announces again after a lost session", s.losesSession)
		t.Run("is drained, stays drained after a restart, and is undrained", s.drains)
		t.Run("a server is drained and undrained", s.drainsServer)
		t.Run("withdraws before it exits", s.terminates)
	})
}

func (s *site) attached(t *testing.T, mode string) {
	var info struct {
		Interfaces []struct{ Interface, Mode, Hook string }
	}
	must.Do(t, s.Agents[0].Get(t.Context(), "/v1/status", &info))
	i := info.Interfaces
	must.True(t, len(i) == 1 && i[0].Mode == mode && i[0].Hook == labtest.TCHook(t), "interfaces %+v", i)
}

func (s *site) balances(t *testing.T) {
	for _, vip := range vips {
		r := s.Load(t, vip, 1000)
		must.Do(t, r.Err())
		labtest.CheckEven(t, r, s.active)
	}
}

func (s *site) refuses(t *testing.T) {
	for _, vip := range vips {
		must.Do(t, s.Client().Ping(t.Context(), vip))
		took, err := s.dial(t, vip, 81)
		must.True(t, errors.Is(err, syscall.ECONNREFUSED) && took <= 5*time.Second,
			"port 81 of %s: %v after %s; want connection refused", vip, err, took)
	}
}

func (s *site) balancesUDP(t *testing.T) {
	for _, vip := range vips {
		r := s.Client().UDP(t.Context(), netip.AddrPortFrom(vip, 5353), 100, 0, 2*time.Second)
		must.True(t, r.Err() == nil && len(r.Servers) == s.active, "%s: %s, %v", vip, r, r.Err())
	}
}

func (s *site) reloads(t *testing.T) {
	four := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip4, 9000), 200)
	six := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip6, 9000), 200)
	for i, a := range s.Agents {
		s.active = 3
		s.Config[i].Services = s.services(s.active)
		must.Do(t, errors.Join(a.Configure(s.Config[i].TOML()), a.Reload()))
	}
	for _, vip := range vips {
		labtest.Until(t, "the new server gets requests", func() error {
			r := s.Load(t, vip, 60)
			if r.Err() != nil {
				return lab.Permanent(r.Err())
			}
			return labtest.ErrorIf(len(r.Servers) < 3, "%s", r.String())
		})
		labtest.CheckEven(t, s.Load(t, vip, 1000), 3)
	}
	labtest.Exchange(t, four, "after the reload")
	labtest.Exchange(t, six, "after the reload")
}

func (s *site) rejectsInvalidFile(t *testing.T) {
	a, text := s.Agents[0], s.Config[0].TOML()
	invalid := strings.Replace(text, `"web"`, `"web"`+"\nprots = 1", 1)
	must.Do(t, errors.Join(a.Configure(invalid), a.Reload()))
	labtest.Until(t, "status has the reason", func() error {
		out, err := a.CLI(t.Context(), "status")
		return labtest.ErrorIf(err != nil || !strings.Contains(out, "no such key; did you mean ports?"),
			"%v\n%s", err, out)
	})
	s.checkAnswered(t, 100)
	_, err := a.CLI(t.Context(), "check", "-c", lab.AgentConfigPath)
	must.True(t, err != nil, "check accepts the invalid file")
	must.Do(t, errors.Join(a.Configure(text), a.Reload()))
	labtest.Until(t, "status has no error", func() error {
		out, err := a.CLI(t.Context(), "status")
		return labtest.ErrorIf(err != nil || strings.Contains(out, "refused"), "%v\n%s", err, out)
	})
}

// serverFails allows detection for the check to fail, and a margin for the datapath change on a busy machine.
func (s *site) serverFails(t *testing.T) {
	failed := s.Servers[1]
	conns := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip4, 9000), 30)
	onIt := conns.Servers()[failed.Name()]
	stream := s.Client().Stream(t.Context(), labtest.URL(vip4), 5*time.Millisecond, 300*time.Millisecond)
	off := time.Now()
	must.Do(t, failed.PowerOff())
	for _, a := range s.Agents {
		labtest.Until(t, "the check has failed", func() error { return backends(t, a, "unhealthy", 2) })
	}
	left := time.Since(off)
	labtest.Until(t, "requests have been answered since then", func() error {
		r := stream.Between(time.Now().Add(-300*time.Millisecond), time.Time{})
		return labtest.ErrorIf(r.Answered() < 20, "%s", r.String())
	})
	stream.Stop()
	late := stream.Between(off.Add(detection+250*time.Millisecond), time.Time{})
	must.True(t, late.Err() == nil, "more than %s after the failure: %v", detection+250*time.Millisecond, late.Err())
	t.Logf("the check failed %s after the server; the bound is %s", left, detection)
	must.Need(t, onIt > 0, "no connection was on the failed server")
	// The agent resets the failed server's connections, so the exchange fails long before the context ends.
	start := time.Now()
	errs := conns.Exchange(t.Context())
	took := time.Since(start)
	must.True(t, len(errs) == onIt && took <= 5*time.Second,
		"%d of %d connections of the failed server ended, after %s", len(errs), onIt, took)
	must.Do(t, failed.PowerOn())
	for _, a := range s.Agents {
		labtest.Until(t, "it is healthy again", func() error { return backends(t, a, "healthy", 6) })
	}
}

// backends returns nil if exactly n of an agent's backends are in this state.
func backends(t *testing.T, a *lab.Agent, state string, n int) error {
	var all []struct{ Address, State, Reason string }
	if err := a.Get(t.Context(), "/v1/backends", &all); err != nil {
		return err
	}
	have := map[string]bool{} // a backend with several ports has a state for each
	for _, b := range all {
		if b.State == state {
			have[b.Address] = true
		}
	}
	return labtest.ErrorIf(len(have) != n, "%d backends are %s, want %d: %+v", len(have), state, n, all)
}

func (s *site) allServersFail(t *testing.T) {
	start := time.Now()
	for _, w := range s.web {
		must.Do(t, w.Stop())
	}
	s.waitRoutes(t)
	// A busy machine also delays the router. "make bench BENCH=convergence" measures.
	took := time.Since(start)
	must.True(t, took <= 10*time.Second, "withdrawn after %s; want about %s", took, detection)
	for _, w := range s.web {
		must.Do(t, w.Start())
	}
	s.waitRoutes(t, s.Balancers...)
	s.waitAnswered(t)
}

// waitAnswered waits until 200 of 200 requests to each VIP are answered. A router that adds a next hop moves flows to
// another load balancer, which with nat has no state for them and resets them.
func (s *site) waitAnswered(t *testing.T) {
	t.Helper()
	for _, vip := range vips {
		labtest.Until(t, "every request is answered", func() error { return s.Load(t, vip, 200).Err() })
	}
}

func (s *site) losesSession(t *testing.T) {
	for _, a := range []netip.Addr{s.Balancers[0].V4, s.Balancers[0].V6} {
		must.Do(t, s.Daemon.Reset(t.Context(), a))
	}
	must.Do(t, s.Daemon.WaitEstablished(t.Context(), lab.Ready, s.Balancers[0].V4, s.Balancers[0].V6))
	s.waitRoutes(t, s.Balancers...)
	s.waitAnswered(t)
}

// drains drains a service, then the node. Traffic that still arrives is served.
func (s *site) drains(t *testing.T) {
	a := s.Agents[0]
	command := func(want string, args ...string) {
		t.Helper()
		out, err := a.CLI(t.Context(), args...)
		must.True(t, err == nil && out == want, "%v: %v: %q; want %q", args, err, out, want)
	}
	s.waitRoutes(t, s.Balancers...)
	out, err := a.CLI(t.Context(), "drain", "unknown")
	must.True(t, err != nil && strings.Contains(out, `there is no service "unknown"`),
		"drain of an unknown service: %v: %s", err, out)
	command("drained: [web]", "drain", "web")
	s.waitRoutes(t, s.Balancers[1:]...)
	must.Do(t, shows(t, a, "drained by the operator", "routes"))
	s.checkAnswered(t, 40)
	a.Kill()
	must.Do(t, errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready)))
	s.waitRoutes(t, s.Balancers[1:]...)
	command("drained: the node", "drain", "--node")
	command("drained: the node", "undrain", "web")
	command("drained: nothing", "undrain", "--node")
	s.waitRoutes(t, s.Balancers...)
	s.checkAnswered(t, 40)
}

// drainsServer drains a server on every balancer. It keeps its connections and gets no new ones, also after a restart.
func (s *site) drainsServer(t *testing.T) {
	server := s.Servers[0]
	all := func(command string) {
		t.Helper()
		for _, a := range s.Agents {
			must.Get(a.CLI(t.Context(), command, "web", server.V4.String()))(t)
		}
	}
	conns := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip4, 9000), 60)
	before := conns.Servers()[server.Name()]
	must.True(t, before > 0, "no connection to %s: %v", server, conns.Servers())
	all("drain")
	a := s.Agents[0]
	must.Do(t, shows(t, a, "drained by the operator", "backends"))
	a.Kill()
	must.Do(t, errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready)))
	s.waitRoutes(t, s.Balancers...)
	r := s.Load(t, vip4, 100)
	must.True(t, r.Err() == nil && r.Servers[server.Name()] == 0, "%v, %v", r, r.Err())
	labtest.Exchange(t, conns, "while a server is drained")
	must.Equal(t, before, conns.Servers()[server.Name()])
	all("undrain")
	labtest.Until(t, "the server is used again", func() error {
		r := s.Load(t, vip4, 100)
		return labtest.ErrorIf(r.Servers[server.Name()] == 0, "%v", r)
	})
}

// terminates checks that on SIGTERM the agent withdraws its routes before it exits.
func (s *site) terminates(t *testing.T) {
	a := s.Agents[0]
	p := a.Process()
	must.Do(t, p.Signal(syscall.SIGTERM))
	<-p.Done()
	for _, vip := range vips {
		got, err := s.Topology.Router.NextHops(labtest.HostRoute(vip))
		must.True(t, err == nil && len(got) == 1 && got[0] == labtest.Hops(vip, s.Balancers[1:])[0],
			"the next hops of %s after the end of the agent: %v, %v; want lb2", vip, got, err)
	}
	must.Do(t, p.Wait(t.Context())) // status 0
	s.checkAnswered(t, 100)
}

// farClient adds a client behind its own router. The link from that router to the lab's router has this MTU.
func (s *site) farClient(t *testing.T, mtu int) traffic.Client {
	t.Helper()
	edge, client := labtest.Host(t, s.Lab, "edge"), labtest.Host(t, s.Lab, "far")
	on := func(texts ...string) (p []netip.Prefix) {
		for _, text := range texts {
			p = append(p, netip.MustParsePrefix(text))
		}
		return p
	}
	must.Do(t, errors.Join(
		edge.Forward(),
		s.Link(lab.End{Host: s.Topology.Router, Name: "far", Addresses: on("198.18.1.1/30", "2001:db8:301::1/64")},
			lab.End{Host: edge, Name: "up", Addresses: on("198.18.1.2/30", "2001:db8:301::2/64")},
			lab.LinkOptions{MTU: mtu}),
		s.Link(lab.End{Host: edge, Name: "far", Addresses: on("198.18.2.1/24", "2001:db8:302::1/64")},
			lab.End{Host: client, Name: "eth0", Addresses: on("198.18.2.2/24", "2001:db8:302::2/64")},
			lab.LinkOptions{}),
		edge.AddRoute(lab.Default, netip.MustParseAddr("198.18.1.1")),
		edge.AddRoute(lab.Default6, netip.MustParseAddr("2001:db8:301::1")),
		client.AddRoute(lab.Default, netip.MustParseAddr("198.18.2.1")),
		client.AddRoute(lab.Default6, netip.MustParseAddr("2001:db8:302::1")),
		s.Topology.Router.AddRoute(on("198.18.2.0/24")[0], netip.MustParseAddr("198.18.1.2")),
		s.Topology.Router.AddRoute(on("2001:db8:302::/64")[0], netip.MustParseAddr("2001:db8:301::2"))))
	return traffic.From(client)
}

const transferSize = 10 << 20

// transfers downloads and uploads transferSize bytes between a client and each VIP.
func transfers(t *testing.T, client traffic.Client) {
	for _, vip := range vips {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		start := time.Now()
		down, err := client.Get(ctx, fmt.Sprintf("%s?size=%d", labtest.URL(vip), transferSize))
		must.True(t, err == nil && len(down.Body) >= transferSize, "%d bytes from %s: %v", len(down.Body), vip, err)
		took := time.Since(start)
		up, err := client.Upload(ctx, labtest.URL(vip), transferSize)
		must.True(t, err == nil && up.Status == 200, "to %s: status %d, %v", vip, up.Status, err)
		t.Logf("%s: %s down, %s up", vip, took, time.Since(start)-took)
		cancel()
	}
}

// pathMTU checks that path MTU discovery works through a load balancer. An ICMP error (fragmentation needed, packet too
// big) quotes a packet that the load balancer has rewritten, so it forwards the error to the original sender.
func (s *site) pathMTU(t *testing.T) {
	t.Run("far client", func(t *testing.T) { transfers(t, s.farClient(t, 1300)) })
	t.Run("near client", func(t *testing.T) { transfers(t, s.Client()) })
}
