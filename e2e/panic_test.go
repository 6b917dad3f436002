package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// panicSite has panicServices services on two load balancers, which are [l2] members. Only the first one also announces
// over BGP, so it receives all packets. Its agent panics where a test says so.
type panicSite struct {
	*site
	agent *lab.Agent // of the first load balancer
}

func newPanicSite(t *testing.T) *panicSite {
	s := &panicSite{site: newBareSite(t, lab.Shape{Clients: 1, Balancers: 2, Servers: 2})}
	for _, n := range s.Servers {
		s.web = append(s.web, labtest.HTTP(t, n, 8080))
	}
	s.Daemon = labtest.Router(t, s.Topology.Router, peers.BIRD, s.RouterConfig())
	faulty := labtest.FaultyBinary(t)
	for i, b := range s.Balancers {
		c := lab.BGPAgent(b, labtest.ASN, labtest.RouterASN, servicesOf(s.site, 80)...)
		c.L2, c.L2SecretFile, c.L2Members = []string{"eth0"}, gossipKeyFile, []netip.Addr{s.Balancers[1-i].V4}
		must.Do(t, b.WriteFile(gossipKeyFile, "a secret of the members\n", 0o600))
		name := faulty
		c.Env = []string{labtest.FaultsEnv}
		if i == 1 {
			name, c.ASN, c.Peers = binary, 0, nil
		}
		s.Config = append(s.Config, c)
		s.Agents = append(s.Agents, labtest.Agent(t, b.Host, name, c))
	}
	s.agent = s.Agents[0]
	s.WaitRouted(t, []netip.Addr{addressOf(0), addressOf(panicServices - 1)}, s.Balancers[0])
	return s
}

func addressOf(i int) netip.Addr { return netip.AddrFrom4([4]byte{203, 0, 113, byte(10 + i)}) }

// broken is the service with something that the agent cannot handle, beside 200 others.
const broken, panicServices = 7, 201

// servicesOf returns all services. port is the broken one's port, beside 80.
func servicesOf(s *site, port int) (list []lab.AgentService) {
	for i := range panicServices {
		v := lab.AgentService{
			Name: fmt.Sprintf("web-%03d", i), Addresses: []netip.Addr{addressOf(i)}, Ports: []string{"80:8080"},
			Backends: []lab.AgentBackend{{Address: s.Servers[0].V4}, {Address: s.Servers[1].V4}}, Check: s.check,
		}
		if i == broken && port != 80 {
			v.Ports = append(v.Ports, fmt.Sprintf("%d:8080", port))
		}
		list = append(list, v)
	}
	return list
}

// fault makes the agent panic from now on where line says; "" stops this.
func (s *panicSite) fault(t *testing.T, line string) {
	t.Helper()
	must.Do(t, s.agent.WriteFile(labtest.FaultsPath, line+"\n", 0o600))
}

// configure gives the broken service another port, beside 80, and waits until the agent has read the configuration.
func (s *panicSite) configure(t *testing.T, port int) {
	t.Helper()
	c := s.Config[0]
	c.Services = servicesOf(s.site, port)
	must.Do(t, s.agent.Configure(c.TOML()))
	must.Get(s.agent.CLI(t.Context(), "reload"))(t)
}

// allServed sends a request to each service.
func (s *panicSite) allServed(t *testing.T, when string) {
	t.Helper()
	for i := range panicServices {
		err := s.request(t, addressOf(i), 80)
		must.True(t, err == nil, "%s: %v", when, err)
	}
}

func (s *panicSite) request(t *testing.T, vip netip.Addr, port uint16) error {
	_, err := s.Client().Get(t.Context(), fmt.Sprintf("http://%s/", netip.AddrPortFrom(vip, port)))
	return err
}

// panicked waits until the part has had another panic and the status names the object.
func (s *panicSite) panicked(t *testing.T, part, was, object string) {
	t.Helper()
	labtest.Until(t, "a panic of "+part, func() error {
		if n := labtest.Panics(t, s.agent, part); n == was {
			return fmt.Errorf("steelyard_panics_total is %s", n)
		}
		out, err := s.agent.CLI(t.Context(), "status")
		return labtest.ErrorIf(!strings.HasPrefix(out, "DEGRADED") || !strings.Contains(out, part+" "+object),
			"status: %v\n%s", err, out)
	})
}

// TestPanicOfOneObject checks that a panic in any part of the agent loses only one object, which works again after its
// next change.
func TestPanicOfOneObject(t *testing.T) {
	s := newPanicSite(t)
	name := fmt.Sprintf("web-%03d", broken)
	ports := 8000
	// The service's plan and tables stay as they were.
	for _, part := range []string{"plan", "table"} {
		t.Run(part, func(t *testing.T) {
			was := labtest.Panics(t, s.agent, part)
			s.fault(t, part+" "+name)
			ports++
			s.configure(t, ports)
			s.panicked(t, part, was, name)
			s.allServed(t, "after the panic")
			must.True(t, s.request(t, addressOf(broken), uint16(ports)) != nil,
				"port %d is served, although it could not be handled", ports)
			s.fault(t, "")
			ports++
			s.configure(t, ports)
			labtest.Until(t, "the service is handled again", func() error {
				return s.request(t, addressOf(broken), uint16(ports))
			})
			s.healed(t, part)
		})
	}
	// The other parts handle each object once.
	peersRequest := func() error { return s.agent.Get(t.Context(), "/v1/peers", new(any)) }
	newAddress := func() error { return s.agent.AddAddress("eth0", netip.MustParsePrefix("192.0.2.77/24")) }
	for _, tt := range []struct {
		part, object string
		cause        func() error // nil if it occurs by itself
		again        string       // a command and its output once the object is handled again
	}{
		{"status", name, nil, "services " + name},
		{"probe", name, nil, ""},
		{"http", `"/v1/peers"`, peersRequest, "peers 192.0.2.1"},
		// The other session announces the IPv4 addresses.
		{"peer", "2001:db8:2::1", nil, "peers 2001:db8:2::1 64500 established"},
		{"frame", "eth0", nil, ""},
		{"member", s.Balancers[1].V4.String(), nil, ""},
		{"netlink", "", newAddress, ""},
	} {
		t.Run(tt.part, func(t *testing.T) {
			was := labtest.Panics(t, s.agent, tt.part)
			s.fault(t, tt.part+" "+tt.object)
			if tt.cause != nil {
				err := tt.cause()
				must.True(t, (err != nil) == (tt.part == "http"), "cause: %v", err)
			}
			s.panicked(t, tt.part, was, tt.object)
			s.allServed(t, "after the panic")
			s.fault(t, "")
			s.healed(t, tt.part)
			s.prints(t, tt.again)
		})
	}
}

// prints waits until a command prints a line with these words in this order.
func (s *panicSite) prints(t *testing.T, again string) {
	t.Helper()
	command, words, _ := strings.Cut(again, " ")
	if command == "" {
		return
	}
	labtest.Until(t, again, func() error {
		out, err := s.agent.CLI(t.Context(), command)
		prints := strings.Contains(strings.Join(strings.Fields(out), " "), words)
		return errors.Join(err, labtest.ErrorIf(!prints, "it prints\n%s", out))
	})
}

// healed waits until a part has had no panic for longer than any of its objects takes to recur.
func (s *panicSite) healed(t *testing.T, part string) {
	t.Helper()
	labtest.Until(t, part+" panics no more", func() error {
		was := labtest.Panics(t, s.agent, part)
		time.Sleep(2 * time.Second)
		return labtest.ErrorIf(labtest.Panics(t, s.agent, part) != was, "another panic")
	})
}

// TestVerdictFollowsClients checks that the first line of status distinguishes a port that nobody can reach from a
// server that nobody misses. It is not OK while connections fail because source ports are exhausted. Log and metrics
// agree.
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
	must.Do(t, agent.WaitReady(t.Context(), lab.Ready))
	s.Agents = append(s.Agents, agent)
	s.WaitRouted(t, []netip.Addr{vip4}, b)

	verdict := func(metric int, want ...string) {
		t.Helper()
		labtest.Until(t, want[0], func() error {
			out, err := agent.CLI(t.Context(), "status", "--check")
			first, _, _ := strings.Cut(out, "\n")
			lacks := func(text string) bool { return !strings.Contains(first, text) }
			m := labtest.Metrics(t, agent, "steelyard_verdict")
			return errors.Join(
				labtest.ErrorIf(slices.ContainsFunc(want, lacks), "the first line is %q; want %q", first, want),
				labtest.ErrorIf((err == nil) != (metric == 0), "%s: exit with %v", first, err),
				labtest.ErrorIf(m != fmt.Sprintf("steelyard_verdict %d\n", metric), "%s", m))
		})
	}
	logged := func(code string) {
		t.Helper()
		labtest.Until(t, "the log names "+code, func() error {
			log := &agent.Process().Log
			return labtest.ErrorIf(!log.Contains(`msg="verdict changed" component=agent verdict=DEGRADED was=`) ||
				!log.Contains(" code="+code+" "), "not yet")
		})
	}
	verdict(0, "OK")

	s.echo[0].Stop()
	verdict(1, "DEGRADED: 1 of 4 backends are not healthy: "+netip.AddrPortFrom(s.Servers[0].V4, 9000).String())
	must.Get(s.dial(t, vip4, 9000))(t) // through the other server

	s.echo[1].Stop()
	verdict(1, "DEGRADED: 203.0.113.10:9000/tcp of web: none of its backends is healthy (0 of 2)")
	took, err := s.dial(t, vip4, 9000)
	must.True(t, err != nil && took <= 8*time.Second, "without a server: %v after %s; want it refused", err, took)
	must.Get(s.dial(t, vip4, 80))(t)
	must.Do(t, shows(t, agent, "down", "services"))
	m := labtest.Metrics(t, agent, `steelyard_findings{code="port-down"`)
	must.True(t, strings.HasSuffix(m, " 1\n"), "metrics: %q", m)
	logged("port-down")
	for _, e := range s.echo {
		must.Do(t, e.Start())
	}
	verdict(0, "OK")

	failed, release := holdConnections(t, s, netip.AddrPortFrom(vip4, 9000), 80)
	defer release()
	must.Need(t, failed > 0, "80 connections by 16 source ports: none failed")
	verdict(1, "DEGRADED", "snat_exhausted", "web to")
	logged("capacity")
}

// holdConnections opens n connections concurrently. It returns how many failed, and a function that closes the others.
func holdConnections(t *testing.T, s *site, to netip.AddrPort, n int) (failed int, release func()) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	var all sync.WaitGroup
	open := make([]net.Conn, n)
	for i := range n {
		all.Go(func() { open[i], _ = s.Client().Dial(ctx, "tcp", to.String()) })
	}
	all.Wait()
	open = slices.DeleteFunc(open, func(c net.Conn) bool { return c == nil })
	return n - len(open), func() {
		for _, c := range open {
			c.Close()
		}
	}
}
