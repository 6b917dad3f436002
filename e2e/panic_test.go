package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// panicSite has 200 services on two balancers, which are members by [l2]. The first also announces by BGP, so it gets
// all packets. Its agent panics where a test says.
type panicSite struct {
	*site
	agent *lab.Agent // of the first balancer
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
	s.WaitRouted(t, []netip.Addr{addressOf(0), addressOf(199)}, s.Balancers[0])
	return s
}

func addressOf(i int) netip.Addr { return netip.AddrFrom4([4]byte{203, 0, 113, byte(10 + i)}) }

// broken is the service of which the agent cannot handle something.
const broken = 7

// servicesOf are 200 services; port is that of the broken one, beside 80.
func servicesOf(s *site, port int) (list []lab.AgentService) {
	for i := range 200 {
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

// fault makes the agent panic from now on; "" ends it.
func (s *panicSite) fault(t *testing.T, line string) {
	t.Helper()
	must.Do(t, s.agent.WriteFile(labtest.FaultsPath, line+"\n", 0o600))
}

// configure gives the broken service another port, beside 80, and waits until the agent has read it.
func (s *panicSite) configure(t *testing.T, port int) {
	t.Helper()
	c := s.Config[0]
	c.Services = servicesOf(s.site, port)
	must.Do(t, s.agent.Configure(c.TOML()))
	must.Get(s.agent.CLI(t.Context(), "reload"))(t)
}

// allServed makes a request to each service.
func (s *panicSite) allServed(t *testing.T, when string) {
	t.Helper()
	for i := range 200 {
		if err := s.request(t, addressOf(i), 80); err != nil {
			t.Errorf("%s: %v", when, err)
		}
	}
}

func (s *panicSite) request(t *testing.T, vip netip.Addr, port uint16) error {
	_, err := s.Client().Get(t.Context(), fmt.Sprintf("http://%s/", netip.AddrPortFrom(vip, port)))
	return err
}

// panicked waits until the part has had another panic and the status names the object.
func (s *panicSite) panicked(t *testing.T, part, was, object string) {
	t.Helper()
	labtest.Until(t, lab.Ready, "a panic of "+part, func() error {
		if n := labtest.Panics(t, s.agent, part); n == was {
			return fmt.Errorf("steelyard_panics_total is %s", n)
		}
		out, err := s.agent.CLI(t.Context(), "status")
		return labtest.ErrorIf(!strings.HasPrefix(out, "DEGRADED") || !strings.Contains(out, part+" "+object),
			"status: %v\n%s", err, out)
	})
}

// TestPanicOfOneObject: a panic in any part of the agent loses one object, which works again after its next change.
func TestPanicOfOneObject(t *testing.T) {
	s := newPanicSite(t)
	name := fmt.Sprintf("web-%03d", broken)
	ports := 8000
	// The plan and the tables of a service stay as they were.
	for _, part := range []string{"plan", "table"} {
		t.Run(part, func(t *testing.T) {
			was := labtest.Panics(t, s.agent, part)
			s.fault(t, part+" "+name)
			ports++
			s.configure(t, ports)
			s.panicked(t, part, was, name)
			s.allServed(t, "after the panic")
			if s.request(t, addressOf(broken), uint16(ports)) == nil {
				t.Errorf("port %d is served, although it could not be handled", ports)
			}
			s.fault(t, "")
			ports++
			s.configure(t, ports)
			labtest.Until(t, lab.Ready, "the service is handled again", func() error {
				return s.request(t, addressOf(broken), uint16(ports))
			})
			s.healed(t, part)
		})
	}
	// The others handle each object once.
	peersRequest := func() error { return s.agent.Get(t.Context(), "/v1/peers", new(any)) }
	newAddress := func() error { return s.agent.AddAddress("eth0", netip.MustParsePrefix("192.0.2.77/24")) }
	for _, tt := range []struct {
		part, object string
		cause        func() error // nil: it comes by itself
		again        string       // a command and what it prints when the object is handled again
	}{
		{"status", name, nil, "services " + name},
		{"probe", name, nil, ""},
		{"http", `"/v1/peers"`, peersRequest, "peers 192.0.2.1"},
		// The IPv4 addresses are announced by the other session.
		{"peer", "2001:db8:2::1", nil, "peers 2001:db8:2::1 64500 established"},
		{"frame", "eth0", nil, ""},
		{"member", s.Balancers[1].V4.String(), nil, ""},
		{"netlink", "", newAddress, ""},
	} {
		t.Run(tt.part, func(t *testing.T) {
			was := labtest.Panics(t, s.agent, tt.part)
			s.fault(t, tt.part+" "+tt.object)
			if tt.cause != nil {
				if err := tt.cause(); (err != nil) != (tt.part == "http") {
					t.Errorf("cause: %v", err)
				}
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
	labtest.Until(t, lab.Ready, again, func() error {
		out, err := s.agent.CLI(t.Context(), command)
		if err == nil && !strings.Contains(strings.Join(strings.Fields(out), " "), words) {
			return fmt.Errorf("it prints\n%s", out)
		}
		return err
	})
}

// healed waits until a part has no panic for a while, longer than any of its objects takes to come again.
func (s *panicSite) healed(t *testing.T, part string) {
	t.Helper()
	labtest.Until(t, lab.Ready, part+" panics no more", func() error {
		was := labtest.Panics(t, s.agent, part)
		time.Sleep(2 * time.Second)
		return labtest.ErrorIf(labtest.Panics(t, s.agent, part) != was, "another panic")
	})
}
