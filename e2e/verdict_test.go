package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestVerdictFollowsClients: the first line of status tells a port that nobody reaches from a server that nobody
// misses, and is not OK while connections fail for want of source ports. Log and metrics say the same.
func TestVerdictFollowsClients(t *testing.T) {
	t.Parallel()
	s := newBareSite(t, lab.Shape{Clients: 1, Balancers: 1, Servers: 2})
	for _, n := range s.Servers {
		s.web = append(s.web, labtest.HTTP(t, n, 8080))
		s.echo = append(s.echo, labtest.TCPEcho(t, n, 9000))
	}
	s.Daemon = labtest.Router(t, s.Topology.Router, peers.BIRD, s.RouterConfig())
	b := s.Balancers[0]
	c := lab.BGPAgent(b, labtest.ASN, labtest.RouterASN, lab.AgentService{
		Name: "web", Addresses: []netip.Addr{vip4}, Ports: []string{"80:8080", "9000"},
		Backends: []lab.AgentBackend{{Address: s.Servers[0].V4}, {Address: s.Servers[1].V4}},
		Check:    lab.AgentCheck{Type: "tcp", Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2},
	})
	text := strings.Replace(c.TOML(), "[datapath]\n", "[datapath]\nsnat_ports = \"1024-1031\"\n", 1)
	agent := must.Get(lab.StartAgent(b.Host, lab.AgentOptions{Binary: binary, Config: text}))(t)
	t.Cleanup(agent.Kill)
	if err := agent.WaitReady(t.Context(), lab.Ready); err != nil {
		t.Fatalf("%v\n%s", err, agent.Process().Log.Tail(20))
	}
	s.Agents = append(s.Agents, agent)
	s.WaitRouted(t, []netip.Addr{vip4}, b)

	verdict := func(metric int, want ...string) {
		t.Helper()
		labtest.Until(t, lab.Ready, want[0], func() error {
			out, err := agent.CLI(t.Context(), "status", "--check")
			first, _, _ := strings.Cut(out, "\n")
			for _, text := range want {
				if !strings.Contains(first, text) {
					return fmt.Errorf("the first line is %q; want %q", first, want)
				}
			}
			if (err == nil) != (metric == 0) {
				return fmt.Errorf("%s: exit with %v", first, err)
			}
			m := labtest.Metrics(t, agent, "steelyard_verdict")
			return labtest.ErrorIf(m != fmt.Sprintf("steelyard_verdict %d\n", metric), "%s", m)
		})
	}
	logged := func(code string) {
		t.Helper()
		labtest.Until(t, lab.Ready, "the log names "+code, func() error {
			if !agent.Process().Log.Contains(`msg="verdict changed" component=agent verdict=DEGRADED was=`) ||
				!agent.Process().Log.Contains(" code="+code+" ") {
				return errors.New("not yet")
			}
			return nil
		})
	}
	verdict(0, "OK")

	s.echo[0].Stop()
	verdict(1, "DEGRADED: 1 of 4 backends are not healthy: "+netip.AddrPortFrom(s.Servers[0].V4, 9000).String())
	if took, err := s.dial(t, vip4, 9000); err != nil {
		t.Errorf("with one of two servers: %v after %s", err, took)
	}

	s.echo[1].Stop()
	verdict(1, "DEGRADED: 203.0.113.10:9000/tcp of web: none of its backends is healthy (0 of 2)")
	if took, err := s.dial(t, vip4, 9000); err == nil || took > 4*time.Second {
		t.Errorf("without a server: %v after %s; want it to be refused at once", err, took)
	}
	if took, err := s.dial(t, vip4, 80); err != nil {
		t.Errorf("the other port: %v after %s", err, took)
	}
	out, err := agent.CLI(t.Context(), "services")
	if err != nil || !strings.Contains(out, "down") {
		t.Errorf("services: %v\n%s", err, out)
	}
	if m := labtest.Metrics(t, agent, `steelyard_findings{code="port-down"`); !strings.HasSuffix(m, " 1\n") {
		t.Errorf("metrics: %q", m)
	}
	logged("port-down")
	for _, e := range s.echo {
		must.Do(t, e.Start())
	}
	verdict(0, "OK")

	if failed := holdConnections(t, s, 40); failed == 0 {
		t.Fatal("40 connections by 16 source ports: none failed")
	}
	verdict(1, "DEGRADED", "snat_exhausted", "web to")
	logged("capacity")
}

// holdConnections opens n connections at once, keeps those that succeed until the end of the test, and returns how many
// did not.
func holdConnections(t *testing.T, s *site, n int) (failed int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	var all sync.WaitGroup
	open := make([]net.Conn, n)
	for i := range n {
		all.Go(func() { open[i], _ = s.Client().Dial(ctx, "tcp", netip.AddrPortFrom(vip4, 9000).String()) })
	}
	all.Wait()
	for _, c := range open {
		if c == nil {
			failed++
			continue
		}
		t.Cleanup(func() { c.Close() })
	}
	return failed
}
