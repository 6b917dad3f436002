package e2e

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// incident is a fault that others cause on the load balancer. While it lasts, the first line of "steelyard status" is
// not OK, one command names the cause, and docs/troubleshooting.md lists the finding's code under the client's symptom.
type incident struct {
	name    string
	symptom string // heading in docs/troubleshooting.md, or "" if clients are served
	begin   func()
	end     func()
	code    string // finding's code, or "" if the load balancer works as configured
	command string // prints words
	words   []string
}

// incidents is a network for incidents: the services web with nat, direct with dsr, and lan announced with ARP.
type incidents struct {
	*site
	web, direct, lan netip.Addr
	agent            *lab.Agent
	text             string // the configuration
	rival            lab.Node
	draw             *rand.Rand
}

func newIncidents(t *testing.T) *incidents {
	seed, err := strconv.ParseUint(os.Getenv("STEELYARD_SEED"), 10, 64)
	if err != nil {
		seed = rand.Uint64()
	}
	draw := rand.New(rand.NewPCG(seed, 0))
	last := draw.Perm(80)
	address := func(network string, i int) netip.Addr {
		return netip.MustParseAddr(fmt.Sprintf("%s.%d", network, 100+last[i]))
	}
	s := &incidents{
		site: newBareSite(t, lab.Shape{Servers: 4}), draw: draw,
		web: address("203.0.113", 0), direct: address("203.0.113", 1), lan: address("192.0.2", 2),
	}
	draw.Shuffle(len(s.Servers), func(i, k int) { s.Servers[i], s.Servers[k] = s.Servers[k], s.Servers[i] })
	s.rival, s.Servers = s.Servers[3], s.Servers[:3]
	t.Logf("STEELYARD_SEED=%d: web is %s, direct %s, lan %s; the server that suffers is %s",
		seed, s.web, s.direct, s.lan, s.Servers[0])
	for _, n := range s.Servers {
		s.site.web = append(s.site.web, labtest.HTTP(t, n, 8080))
		s.echo = append(s.echo, labtest.TCPEcho(t, n, 8443))
		must.Do(t, traffic.OwnVIP(n.Host, s.direct))
		must.Get(traffic.ServeHTTP(n.Host, n.Name(), netip.AddrPortFrom(s.direct, 80)))(t)
	}
	s.Daemon = labtest.Router(t, s.Topology.Router, peers.BIRD, s.RouterConfig())
	check := lab.AgentCheck{Type: "tcp", Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 2}
	var backends []lab.AgentBackend
	for _, n := range s.Servers {
		backends = append(backends, lab.AgentBackend{Address: n.V4})
	}
	b := s.Balancers[0]
	c := lab.BGPAgent(b, labtest.ASN, labtest.RouterASN,
		lab.AgentService{Name: "web", Addresses: []netip.Addr{s.web}, Ports: []string{"80:8080", "443:8443"},
			Backends: backends, Check: check},
		lab.AgentService{Name: "direct", Addresses: []netip.Addr{s.direct}, Ports: []string{"80"}, Forward: "dsr",
			Backends: backends, Check: check},
		lab.AgentService{Name: "lan", Addresses: []netip.Addr{s.lan}, Ports: []string{"80:8080"},
			Backends: backends, Check: check},
	)
	c.Mode = []string{"tc", "xdp-generic"}[draw.IntN(2)]
	c.L2 = []string{"eth0"}
	c.Extra = fmt.Sprintf("[[pool]]\nname = \"routed\"\naddresses = [\"203.0.113.0/24\"]\nannounce = [\"bgp\"]\n\n"+
		"[[pool]]\nname = \"lan\"\naddresses = [\"%s/32\"]\nannounce = [\"l2\"]\n", s.lan)
	s.text = strings.Replace(c.TOML(), "[datapath]\n", "[datapath]\nsnat_ports = \"1024-1151\"\n", 1)
	s.text = strings.Replace(s.text, "[l2]\n", "[l2]\nprobe_own = \"2s\"\n", 1)
	s.agent = must.Get(lab.StartAgent(b.Host, lab.AgentOptions{Binary: binary, Config: s.text}))(t)
	s.Agents = append(s.Agents, s.agent)
	must.Do(t, s.agent.WaitReady(t.Context(), lab.Ready))
	return s
}

// run runs a command on a host.
func run(t *testing.T, h *lab.Host, command string) {
	t.Helper()
	words := strings.Fields(command)
	must.Get(h.Run(t.Context(), words[0], words[1:]...))(t)
}

// dropBGP makes the load balancer and the router drop the BGP packets that they send.
func (s *incidents) dropBGP(t *testing.T) error {
	const port = "tcp dport 179"
	return errors.Join(
		s.Balancers[0].Drop(t.Context(), "output", port), s.Topology.Router.Drop(t.Context(), "output", port))
}

func (s *incidents) acceptBGP(t *testing.T) error {
	return errors.Join(s.Balancers[0].StopDropping(t.Context()), s.Topology.Router.StopDropping(t.Context()))
}

// configure replaces text in the agent's configuration and reloads it. The file may be invalid.
func (s *incidents) configure(t *testing.T, text string) {
	t.Helper()
	must.Do(t, s.agent.Configure(text))
	s.agent.CLI(t.Context(), "reload")
}

// bird replaces text in the router's configuration.
func (s *incidents) bird(t *testing.T, old, now string) {
	t.Helper()
	const path = "/run/bird/bird.conf"
	text := must.Get(s.Daemon.ReadFile(path))(t)
	must.Do(t, s.Daemon.WriteFile(path, strings.ReplaceAll(text, old, now), 0o600))
	must.Get(s.Daemon.Show(t.Context(), "configure"))(t)
}

// served returns an error unless clients are served on all ports.
func (s *incidents) served(t *testing.T) error {
	for _, to := range []netip.AddrPort{
		netip.AddrPortFrom(s.web, 80), netip.AddrPortFrom(s.web, 443), netip.AddrPortFrom(s.direct, 80),
		netip.AddrPortFrom(s.lan, 80),
	} {
		if _, err := s.dial(t, to.Addr(), to.Port()); err != nil {
			return fmt.Errorf("%s: %w", to, err)
		}
	}
	return nil
}

// load sends requests to all addresses until the test ends.
func (s *incidents) load(t *testing.T) {
	tick := time.NewTicker(250 * time.Millisecond)
	t.Cleanup(tick.Stop)
	go func() {
		for range tick.C {
			if t.Context().Err() != nil {
				return
			}
			for _, vip := range []netip.Addr{s.web, s.direct, s.lan} {
				go func() {
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					if c, err := s.Client().Dial(ctx, "tcp", netip.AddrPortFrom(vip, 80).String()); err == nil {
						c.Close()
					}
				}()
			}
		}
	}()
}

// reported returns an error unless the incident makes the status not OK and the command names the cause.
func (s *incidents) reported(t *testing.T, x incident) error {
	out, err := s.agent.CLI(t.Context(), "status", "--check")
	first, _, _ := strings.Cut(out, "\n")
	silent := x.code == lb.FoundNoPackets.Code // others may have stopped the clients
	if x.code != "" && (first == "OK" || (err == nil) != silent) {
		return fmt.Errorf("the first line is %q, exit with %v", first, err)
	}
	var i admin.Info
	if x.code != "" && s.agent.Process().Running() {
		if err := s.agent.Get(t.Context(), "/v1/status", &i); err != nil {
			return err
		}
		if !slices.ContainsFunc(i.Findings, func(f lb.Finding) bool { return f.Code == x.code }) {
			return fmt.Errorf("no finding %s in %+v", x.code, i.Findings)
		}
	}
	out, _ = s.agent.CLI(t.Context(), strings.Fields(x.command)...)
	for _, w := range x.words {
		if !strings.Contains(out, w) {
			return fmt.Errorf("%s does not say %q:\n%s", x.command, w, out)
		}
	}
	return nil
}

// TestIncidents checks that the status is not OK while clients fail, and that one command names the cause. It omits
// slow servers and lost ICMP errors, which are invisible here; a route limit on the router, which looks like a filter;
// renamed interfaces and weights, which harm no client (TestInterfaceIsRenamed, TestWhichRoutesHaveWeights); nodes that
// are all excluded (TestWrongStarts, TestSetupFindings); and a host that claims the address later (TestNextConflict,
// TestConflictsInStatus). The addresses, the server and the mode are drawn once, because other ones need another agent;
// the time of each incident is drawn for itself. STEELYARD_SEED repeats a run.
func TestIncidents(t *testing.T) {
	t.Parallel()
	s := newIncidents(t)
	labtest.Until(t, "clients are served", func() error { return s.served(t) })
	s.load(t)
	labtest.Until(t, "the usual rate is known", func() error {
		var services []lb.ServiceStatus
		err := s.agent.Get(t.Context(), "/v1/services", &services)
		return errors.Join(err, labtest.ErrorIf(!slices.ContainsFunc(services, func(x lb.ServiceStatus) bool {
			return x.Address == s.web && x.Port == 80 && x.PacketRate >= 5
		}), "few packets a second"))
	})
	b, server, client := s.Balancers[0], s.Servers[0], s.Clients[0]
	router, rivalMAC := s.Topology.Router, mac(t, s.rival.Host).String()
	do := func(err error) { t.Helper(); must.Do(t, err) }
	explain := func(vip netip.Addr) string { return fmt.Sprintf("explain %s %s:80", client.V4, vip) }
	page := must.Get(os.ReadFile("../docs/troubleshooting.md"))(t)
	try := func(x incident, reported bool) {
		t.Helper()
		what, f := "clients fail", func() error { return labtest.ErrorIf(s.served(t) == nil, "all are served") }
		if reported {
			what, f = "it is reported", func() error { return s.reported(t, x) }
		} else if x.symptom == "" {
			return
		}
		took, err := lab.Until(t.Context(), lab.Ready, what, f)
		t.Logf("%s: %s after %s", x.name, what, took.Round(time.Millisecond))
		must.True(t, err == nil, "%s: %v", x.name, err)
		_, section, _ := strings.Cut(string(page), "\n## "+x.symptom+"\n")
		section, _, _ = strings.Cut(section, "\n## ")
		must.True(t, x.symptom == "" || strings.Contains(section, "`"+x.code+"`"),
			"docs/troubleshooting.md: %q does not name %q", x.symptom, x.code)
	}
	var release func() // closes the connections that use up the source ports
	slow := []incident{
		{name: "a server by dsr has the wrong gateway", symptom: "Every third request fails",
			begin: func() { run(t, server.Host, "ip route replace default via "+s.rival.V4.String()) },
			end:   func() { run(t, server.Host, "ip route replace default via "+server.Gateway4.String()) },
			code:  "server-replies", command: "status", words: []string{server.V4.String(), "ip route get"}},
		{name: "another server by dsr has no default route", symptom: "Every third request fails",
			begin: func() { run(t, s.Servers[1].Host, "ip route del default") },
			end:   func() { run(t, s.Servers[1].Host, "ip route add default via "+s.Servers[1].Gateway4.String()) },
			code:  "server-replies", command: "status", words: []string{s.Servers[1].V4.String()}},
		{name: "the router filters the route", symptom: "Times out",
			begin: func() { s.bird(t, "import all;", fmt.Sprintf("import where net != %s/32;", s.web)) },
			end:   func() { s.bird(t, fmt.Sprintf("import where net != %s/32;", s.web), "import all;") },
			code:  "no-packets", command: "status",
			words: []string{"OK, but no packet for " + s.web.String(), "birdc"}},
	}
	for _, x := range slow { // concurrently, because they take more than a minute
		x.begin()
	}
	for _, x := range slow {
		try(x, false)
	}
	for _, x := range slow {
		try(x, true)
		x.end()
	}
	for _, x := range []incident{
		{name: "the router drops the answers", symptom: "Times out",
			begin: func() { do(router.Drop(t.Context(), "forward", "ip saddr "+s.lan.String())) },
			end:   func() { do(router.StopDropping(t.Context())) },
			code:  "unanswered", command: "status", words: []string{s.lan.String() + ":80/tcp of lan"}},
		{name: "a server's process is killed", begin: func() { do(s.site.web[0].Stop()) },
			end:  func() { do(s.site.web[0].Start()) },
			code: "backend-down", command: "backends", words: []string{server.V4.String(), "connection refused"}},
		{name: "a server is off", begin: func() { do(s.Switch.SetDown(server.Port)) },
			end:  func() { do(s.Switch.SetUp(server.Port)) },
			code: "backend-down", command: "backends", words: []string{server.V4.String(), "no r"}},
		{name: "a port is dead on all servers", symptom: "Refused",
			begin: func() { do(errors.Join(s.echo[0].Stop(), s.echo[1].Stop(), s.echo[2].Stop())) },
			end:   func() { do(errors.Join(s.echo[0].Start(), s.echo[1].Start(), s.echo[2].Start())) },
			code:  "port-down", command: "status", words: []string{s.web.String() + ":443/tcp of web: none"}},
		{name: "a server by dsr lacks the address", begin: func() { do(traffic.DisownVIP(server.Host, s.direct)) },
			end:  func() { do(traffic.OwnVIP(server.Host, s.direct)) },
			code: "backend-down", command: "status",
			words: []string{server.V4.String() + ":80 of direct", "interface lo"}},
		{name: "another host answers ARP without claiming the address", symptom: "Times out",
			begin: func() {
				do(s.rival.AddAddress("eth0", labtest.HostRoute(s.lan)))
				run(t, router, fmt.Sprintf("ip neigh replace %s lladdr %s dev segment", s.lan, mac(t, s.rival.Host)))
			},
			end: func() {
				do(s.rival.DeleteAddress("eth0", labtest.HostRoute(s.lan)))
				run(t, router, fmt.Sprintf("ip neigh del %s dev segment", s.lan))
			},
			code: "address-conflict", command: "status", words: []string{s.lan.String(), rivalMAC}},
		{name: "another host has the address first",
			begin: func() {
				without, _, _ := strings.Cut(s.text, "[[service]]\nname = \"lan\"")
				s.configure(t, without)
				do(s.rival.AddAddress("eth0", labtest.HostRoute(s.lan)))
				s.configure(t, s.text)
			},
			end:  func() { do(s.rival.DeleteAddress("eth0", labtest.HostRoute(s.lan))) },
			code: "address-conflict", command: "status", words: []string{s.lan.String(), rivalMAC}},
		{name: "nftables drops what the checks send", symptom: "Times out",
			begin: func() { do(b.Drop(t.Context(), "output", "tcp dport { 80, 8080, 8443 }")) },
			end:   func() { do(b.StopDropping(t.Context())) },
			code:  "all-backends-down", command: "status", words: []string{"failed within", "nft list ruleset"}},
		{name: "nftables drops BGP", symptom: "Times out",
			begin: func() { do(s.dropBGP(t)) },
			end:   func() { do(s.acceptBGP(t)) },
			code:  "no-session", command: "status", words: []string{"check filters for that port"}},
		{name: "the router expects another AS", symptom: "Times out",
			begin: func() { s.bird(t, fmt.Sprintf(" as %d;", labtest.ASN), " as 64999;") },
			end:   func() { s.bird(t, " as 64999;", fmt.Sprintf(" as %d;", labtest.ASN)) },
			code:  "no-session", command: "status", words: []string{"bad peer as", "expects an AS number other than"}},
		{name: "only the router has a password", symptom: "Times out",
			begin: func() { s.bird(t, "hold time", "password \"x\"; hold time") },
			end:   func() { s.bird(t, "password \"x\"; hold time", "hold time") },
			code:  "no-session", command: "status", words: []string{"it has a password, this node has none"}},
		{name: "the link is down", symptom: "Times out", begin: func() { do(s.Switch.SetDown(b.Port)) },
			end:  func() { do(s.Switch.SetUp(b.Port)) },
			code: "nothing-announced", command: "status", words: []string{"eth0: ", "it is down"}},
		{name: "the file has a typo",
			begin: func() { s.configure(t, strings.Replace(s.text, "forward", "forwrad", 1)) },
			end:   func() { s.configure(t, s.text) },
			code:  "reload-rejected", command: "status", words: []string{"forwrad", "did you mean forward"}},
		{name: "the file is truncated", begin: func() { s.configure(t, s.text[:strings.LastIndex(s.text, "timeout")]) },
			end:  func() { s.configure(t, s.text) },
			code: "reload-rejected", command: "status", words: []string{"lan"}},
		{name: "the client is not allowed",
			begin: func() {
				const dsr = "forward = \"dsr\"\n"
				s.configure(t, strings.Replace(s.text, dsr, dsr+"allow = [\"192.0.2.9\"]\n", 1))
			},
			end:     func() { s.configure(t, s.text) },
			command: explain(s.direct),
			words:   []string{"not_allowed", "the source is not in the service's allow list"}},
		{name: "source ports are exhausted", symptom: "Refused",
			begin: func() { _, release = holdConnections(t, s.site, netip.AddrPortFrom(s.web, 443), 500) },
			end:   func() { release() },
			code:  "capacity", command: "status", words: []string{"snat_exhausted", "web to"}},
		{name: "the agent is killed", begin: s.agent.Kill, end: func() {},
			command: "status", words: []string{"DOWN", "forwarded for", s.web.String(), "drop the routes in"}},
	} {
		labtest.Until(t, "clients are served before: "+x.name, func() error {
			return errors.Join(s.served(t), labtest.ErrorIf(x.code != "" && s.reported(t, x) == nil, "still reported"))
		})
		time.Sleep(time.Duration(s.draw.Int64N(int64(2 * time.Second)))) // intervals are at most 2 s
		x.begin()
		try(x, false)
		try(x, true)
		x.end()
	}
}

// mac returns the MAC address of a host.
func mac(t *testing.T, h *lab.Host) (address net.HardwareAddr) {
	t.Helper()
	must.Do(t, h.Do(func() error {
		nic, err := net.InterfaceByName("eth0")
		if err == nil {
			address = nic.HardwareAddr
		}
		return err
	}))
	return address
}
