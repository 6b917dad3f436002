package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// fakeHost has an interface eth0 with one address of each family, and a default route over it.
type fakeHost struct{ noName, noRoute, noV4 bool }

func (h fakeHost) name() (string, error) {
	if h.noName {
		return "", errors.New("no name")
	}
	return "host", nil
}

func (h fakeHost) defaultInterface() (string, error) {
	if h.noRoute {
		return "", errors.New("no route")
	}
	return "eth0", nil
}

func (h fakeHost) addresses(iface string) (v4, v6 netip.Addr, err error) {
	switch {
	case iface != "eth0":
		_, err := netlink.LinkByName("no-such-link")
		return v4, v6, fmt.Errorf("interface %s: %w", iface, err)
	case h.noV4:
		return v4, ip("2001:db8::1"), nil
	}
	return ip("192.0.2.1"), ip("2001:db8::1"), nil
}

func ip(s string) netip.Addr { return netip.MustParseAddr(s) }

func TestDescribe(t *testing.T) {
	eth0 := []string{"eth0"}
	bgp := &config.BGP{ASN: 64512}
	for _, tt := range []struct {
		name string
		host fakeHost
		env  string // NODE_NAME
		cfg  config.Config
		want node
		err  string
	}{
		{name: "nothing configured",
			want: node{"host", ip("192.0.2.1"), ip("192.0.2.1"), ip("2001:db8::1"), eth0, eth0}},
		{name: "NODE_NAME before the host name", env: "pod-node",
			want: node{"pod-node", ip("192.0.2.1"), ip("192.0.2.1"), ip("2001:db8::1"), eth0, eth0}},
		{
			name: "all configured", env: "pod-node", host: fakeHost{noName: true, noRoute: true},
			cfg: config.Config{
				Node:     config.Node{Name: "n", RouterID: ip("192.0.2.9"), Address: ip("192.0.2.2")},
				Datapath: config.Datapath{Interfaces: []string{"eth0", "eth1"}},
				L2:       &config.L2{Interfaces: []string{"eth2"}},
			},
			want: node{
				"n", ip("192.0.2.9"), ip("192.0.2.2"), ip("2001:db8::1"), []string{"eth0", "eth1"}, []string{"eth2"},
			},
		},
		{name: "IPv6 address configured, L2 on the uplinks",
			cfg:  config.Config{Node: config.Node{Address: ip("2001:db8::2")}, L2: &config.L2{}},
			want: node{"host", ip("192.0.2.1"), ip("192.0.2.1"), ip("2001:db8::2"), eth0, eth0}},
		{name: "no IPv4, no BGP", host: fakeHost{noV4: true},
			want: node{name: "host", address6: ip("2001:db8::1"), interfaces: eth0, l2Interfaces: eth0}},
		{name: "no IPv4, BGP with a router ID", host: fakeHost{noV4: true},
			cfg:  config.Config{BGP: bgp, Node: config.Node{RouterID: ip("192.0.2.9")}},
			want: node{"host", ip("192.0.2.9"), netip.Addr{}, ip("2001:db8::1"), eth0, eth0}},
		{name: "no IPv4, BGP", host: fakeHost{noV4: true}, cfg: config.Config{BGP: bgp},
			err: "interface eth0 has no IPv4 address to use as BGP identifier; set node.router_id"},
		{name: "no host name", host: fakeHost{noName: true}, err: "find the host name: no name; set node.name"},
		{name: "no default route", host: fakeHost{noRoute: true},
			err: "find the uplink: no route; set datapath.interfaces"},
		{name: "unknown interface", cfg: config.Config{Datapath: config.Datapath{Interfaces: []string{"eth9"}}},
			err: "interface eth9: Link not found; name an interface of this machine"},
		{
			name: "unknown first interface",
			cfg:  config.Config{Datapath: config.Datapath{Interfaces: []string{"eth9", "eth0"}}},
			want: node{
				"host", ip("192.0.2.1"), ip("192.0.2.1"), ip("2001:db8::1"), []string{"eth9", "eth0"},
				[]string{"eth9", "eth0"},
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("NODE_NAME", tt.env)
			got, err := describe(&tt.cfg, tt.host)
			if tt.err != "" {
				must.Equal(t, tt.err, fmt.Sprint(err))
				return
			}
			must.Do(t, err)
			must.Equal(t, tt.want, got)
		})
	}
}

func TestNodeAddress(t *testing.T) {
	for _, tt := range []struct{ n, want string }{
		{"192.0.2.1 2001:db8::1", "192.0.2.1"}, {" 2001:db8::1", "2001:db8::1"},
	} {
		v4, v6, _ := strings.Cut(tt.n, " ")
		n := node{address6: ip(v6)}
		if v4 != "" {
			n.address4 = ip(v4)
		}
		got := n.address()
		must.True(t, got == ip(tt.want), "%q: %s; want %s", tt.n, got, tt.want)
	}
}

// thisHost needs no privileges. The loopback interface has no global address.
func TestThisHost(t *testing.T) {
	v4, v6, err := thisHost{}.addresses("lo")
	must.True(t, err == nil && !v4.IsLoopback() && !v6.IsLoopback() && !v6.IsLinkLocalUnicast(),
		"lo: %s, %s, %v", v4, v6, err)
	_, _, err = thisHost{}.addresses("no-such-link")
	must.True(t, err != nil && strings.HasPrefix(err.Error(), "interface no-such-link: "), "unknown interface: %v", err)
	name, err := (thisHost{}).name()
	must.True(t, err == nil && name != "", "host name %q, %v", name, err)
}

// A node has the peers whose node_selector matches its labels, follows changes of both, and has them when it starts
// again without the API server.
func TestPeersOfANode(t *testing.T) {
	const text = `
[kubernetes]
[bgp]
asn = 64512
listen_port = -1
peers = [
  { address = "127.0.0.1", asn = 64500 },
  { address = "127.0.0.2", asn = 64500, node_selector = "rack=a" },
  { address = "127.0.0.3", asn = 64500, node_selector = "rack in (b, c), !canary" },
]
`
	dir, cfg := t.TempDir(), parse(t, text)
	start := func() (setLabels func(map[string]string), want func(step string, peers ...string)) {
		t.Helper()
		a := must.Get(newAnnouncers(cfg, facts, dir, prometheus.NewRegistry(), nil, discard))(t)
		return a.setLabels, func(step string, peers ...string) {
			t.Helper()
			labtest.Until(t, step, func() error {
				var got []string
				for _, p := range a.peers() {
					got = append(got, p.Peer.String())
				}
				return labtest.ErrorIf(fmt.Sprint(got) != fmt.Sprint(peers), "peers %v", got)
			})
		}
	}
	setLabels, want := start()
	want("the labels are not known", "127.0.0.1")
	setLabels(map[string]string{"rack": "a"})
	want("rack a", "127.0.0.1", "127.0.0.2")
	setLabels(map[string]string{"rack": "b", "canary": ""})
	want("a canary", "127.0.0.1")
	setLabels(map[string]string{"rack": "b"})
	want("rack b", "127.0.0.1", "127.0.0.3")
	_, want = start()
	want("the next start", "127.0.0.1", "127.0.0.3")

	cfg.Kubernetes = nil
	_, want = start()
	want("without Kubernetes", "127.0.0.1", "127.0.0.2", "127.0.0.3")
}

func TestHealthRelay(t *testing.T) {
	var r healthRelay
	var got []string
	report := func(service string) { r.report(lb.Health{Key: lb.CheckKey{Service: service}}) }
	report("a")
	report("b")
	r.deliverTo(func(h lb.Health) { got = append(got, h.Key.Service) })
	report("c")
	must.Equal(t, []string{"a", "b", "c"}, got)
}

type behindFunc func(context.Context) (time.Time, error)

func (f behindFunc) Behind(ctx context.Context) (time.Time, error) { return f(ctx) }

func TestCheckEngine(t *testing.T) {
	for _, want := range []error{nil, errors.New("no answer")} {
		err := checkEngine(behindFunc(func(ctx context.Context) (time.Time, error) {
			if d, ok := ctx.Deadline(); !ok || time.Until(d) > engineTimeout || time.Until(d) < engineTimeout/2 {
				t.Errorf("deadline %s, %t; want %s from now", d, ok, engineTimeout)
			}
			return time.Time{}, want
		}))
		must.True(t, errors.Is(err, want), "%v; want %v", err, want)
	}
}

type publishes struct{ state lb.Progress }

func (p publishes) Progress() lb.Progress { return p.state }
func (publishes) InForce(s string) bool   { return s == "default/web" }

// Health requests are answered from what the engine publishes. The engine does not respond if an event has waited too
// long.
func TestEngineHealth(t *testing.T) {
	since := time.Unix(1, 0)
	for _, tt := range []struct {
		waiting time.Duration
		want    error
	}{{0, nil}, {engineTimeout / 2, nil}, {engineTimeout + time.Second, errEngine}} {
		p := publishes{lb.Progress{Behind: since, Applied: tt.waiting == 0}}
		if tt.waiting > 0 {
			p.state.Waiting = time.Now().Add(-tt.waiting)
		}
		h := &engineHealth{engine: p}
		got, err := h.behind()
		must.True(t, got.Equal(since) && errors.Is(err, tt.want) && h.applied() == p.state.Applied,
			"an event waits for %s: behind %s, %v, applied %t", tt.waiting, got, err, h.applied())
		must.True(t, h.inForce("default/web") && !h.inForce("default/db"), "in force is wrong")
	}
}

// rulesState is the state of rules that are in force, unless one is missing since a time.
type rulesState struct{ behind time.Time }

func (r rulesState) RulesInForce() bool     { return r.behind.IsZero() }
func (r rulesState) RulesBehind() time.Time { return r.behind }

// A service proxy is as late as the older of the engine's and the rules' changes, and starts with the later of the two.
func TestServiceProxyHealth(t *testing.T) {
	zero, older, newer := time.Time{}, time.Unix(1, 0), time.Unix(2, 0)
	for _, tt := range []struct{ engine, rules, want time.Time }{
		{zero, zero, zero}, {older, zero, older}, {zero, older, older}, {older, newer, older}, {newer, older, older},
	} {
		h := &engineHealth{publishes{lb.Progress{Behind: tt.engine, Applied: true}}, rulesState{tt.rules}}
		got, err := h.behind()
		must.True(t, err == nil && got.Equal(tt.want) && h.applied() == tt.rules.IsZero(),
			"%+v: behind %s, %v, applied %t", tt, got, err, h.applied())
	}
	h := &engineHealth{publishes{}, rulesState{}}
	must.True(t, !h.applied(), "applied before the engine has applied its part")
}

// check reports each missing interface of the file with its line. The start of the agent only warns.
func TestMissingInterfacesAreReported(t *testing.T) {
	const text = "[datapath]\ninterfaces = [\"none-0\", \"lo\",\n  \"none-1\"]\n"
	path := writeConfig(t, "", text+`[bgp]
asn = 64512
peers = [{ address = "192.0.2.1", asn = 64500 }]
[node]
router_id = "192.0.2.2"
`+webTOML)
	want := []string{
		":2: datapath.interfaces[0]: there is no interface none-0; name an interface of this machine",
		":3: datapath.interfaces[2]: there is no interface none-1; name an interface of this machine",
	}
	_, err := Check(path, false)
	cfg, started := load(path)
	must.Need(t, err != nil && started == nil && len(cfg.Warnings) == len(want),
		"Check: %v; load: %+v, %v", err, cfg, started)
	for i, line := range strings.Split(err.Error(), "\n") {
		must.True(t, strings.HasSuffix(line, want[i]) && strings.Contains(cfg.Warnings[i], want[i]),
			"%s, warning %s; want %s", line, cfg.Warnings[i], want[i])
	}
}

// Without any interface of the file the agent waits. It starts when the first one exists, and attaches the others when
// they appear, so that a slow or broken card does not stop the others.
func TestStartsWithTheInterfacesThatExist(t *testing.T) {
	labtest.Root(t)
	self := must.Get(os.Executable())(t)
	l := labtest.New(t)
	h, peer := labtest.Host(t, l, "lb"), labtest.Host(t, l, "peer")
	connect := func(name, prefix string) {
		t.Helper()
		at := lab.End{Host: h, Name: name, Addresses: []netip.Prefix{netip.MustParsePrefix(prefix)}}
		must.Do(t, l.Link(at, lab.End{Host: peer, Name: name}, lab.LinkOptions{}))
	}
	cfg := lab.AgentConfig{Name: "lb1", Mode: "tc", Interfaces: []string{"eth0", "eth1"}}
	agent, err := lab.StartAgent(h, lab.AgentOptions{Binary: self, Config: cfg.TOML()}) // it will not be ready
	must.Do(t, err)
	state := func(what string, verdict admin.Verdict, reasons ...string) {
		t.Helper()
		labtest.Until(t, what, func() error {
			var i admin.Info
			if err := agent.Get(t.Context(), "/v1/status", &i); err != nil {
				return err
			}
			for _, r := range reasons {
				if !strings.Contains(strings.Join(i.Reasons, "; "), r) {
					return fmt.Errorf("reasons %q; want %q", i.Reasons, r)
				}
			}
			if i.Verdict != verdict {
				return fmt.Errorf("%s, %q; want %s", i.Verdict, i.Reasons, verdict)
			}
			if i.Waiting == "" && strings.Contains(strings.Join(i.Warnings, "\n"), "there is no interface eth1") {
				return fmt.Errorf("warnings %q about an interface that exists", i.Warnings)
			}
			return nil
		})
	}
	state("it waits", admin.Down, "waiting for the network: interface eth0: Link not found")
	connect("eth1", "192.0.2.1/24")
	state("it works by the second interface", admin.Degraded, "interface eth0: interface not found")
	connect("eth0", "198.51.100.1/24")
	state("it works by both", admin.OK)
	must.Do(t, agent.Terminate(t.Context(), stepTimeout))
}

// check refuses a BGP peer with an address of this machine, and members of [l2] that it cannot reach, with their lines.
// The start of the agent only warns, because an address that the machine received later must not stop the agent.
func TestPeersOfThisMachine(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{`router_id = "192.0.2.11"
[bgp]
asn = 64512
peers = [{ address = "127.0.0.1", asn = 64500 }]
` + webTOML, "bgp.peers[0].address: 127.0.0.1 is the address of lo; write the router's address"},
		{`address = "192.0.2.11"
[l2]
unencrypted = true
members = ["2001:db8::12"]
`, "l2.members[0]: 2001:db8::12 has no effect: this node is a member through"},
	} {
		path := writeConfig(t, "", "[datapath]\ninterfaces = [\"lo\"]\n[node]\n"+tt.text)
		checkedNotAtStart(t, path, ":7: "+tt.want)
	}
}

// reloadFile is reload of a file.
func reloadFile(path string) (*config.Config, error) {
	text, err := config.Read(path)
	if err != nil {
		return nil, err
	}
	return reload(nil, path, text)
}

// checkedNotAtStart fails the test unless check and a reload refuse a file with an error that contains want, and the
// start of the agent only warns.
func checkedNotAtStart(t *testing.T, path, want string) {
	t.Helper()
	if _, err := Check(path, false); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("Check: %v; want %s", err, want)
	}
	if _, err := reloadFile(path); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("reload: %v; want %s", err, want)
	}
	cfg, err := load(path)
	if err != nil || !slices.ContainsFunc(cfg.Warnings, func(w string) bool { return strings.Contains(w, want) }) {
		t.Errorf("load: %v, %+v; want a warning %s", err, cfg, want)
	}
	must.Get(Check(path, true))(t)
}

// A source of a BGP session that the machine does not have is a warning of check, of a reload and of the start.
func TestSourceOfAnotherMachine(t *testing.T) {
	path := writeConfig(t, "", `[datapath]
interfaces = ["lo"]
[node]
router_id = "192.0.2.11"
[bgp]
asn = 64512
peers = [{ address = "192.0.2.1", asn = 64500, source = "192.0.2.99" }]
`+webTOML)
	const want = ":7: bgp.peers[0].source: no interface has 192.0.2.99"
	for name, f := range map[string]func(string) (*config.Config, error){
		"load": load, "reload": reloadFile, "check": func(p string) (*config.Config, error) { return Check(p, false) },
	} {
		cfg, err := f(path)
		must.True(t, err == nil && len(cfg.Warnings) == 1 && strings.Contains(cfg.Warnings[0], want),
			"%s: %v, %+v; want a warning %s", name, err, cfg, want)
	}
}
