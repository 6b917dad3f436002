package agent

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Interfaces of the file that do not exist: check names each with its line, and the start of the agent warns.
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
	if err == nil || started != nil || len(cfg.Warnings) != len(want) {
		t.Fatalf("Check: %v; load: %+v, %v", err, cfg, started)
	}
	for i, line := range strings.Split(err.Error(), "\n") {
		if !strings.HasSuffix(line, want[i]) || !strings.Contains(cfg.Warnings[i], want[i]) {
			t.Errorf("%s, warning %s; want %s", line, cfg.Warnings[i], want[i])
		}
	}
}

// Without any interface of the file the agent waits. It starts when the first of them exists, and attaches the others
// when they exist: a card that is slow or broken does not stop the others.
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
		labtest.Until(t, stepTimeout, what, func() error {
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

// A BGP peer with an address of this machine: check refuses it with its line. The start of the agent warns: an address
// that the machine has got later ends no agent.
func TestPeerOfThisMachine(t *testing.T) {
	path := writeConfig(t, "", `[datapath]
interfaces = ["lo"]
[node]
router_id = "192.0.2.11"
[bgp]
asn = 64512
peers = [{ address = "127.0.0.1", asn = 64500 }]
`+webTOML)
	checkedNotAtStart(t, path, ":7: bgp.peers[0].address: 127.0.0.1 is the address of lo; write that of the router")
}

// Members of [l2] that this machine cannot reach: the same.
func TestMembersOfAnotherFamily(t *testing.T) {
	path := writeConfig(t, "", `[node]
address = "192.0.2.11"
[datapath]
interfaces = ["lo"]
[l2]
unencrypted = true
members = ["2001:db8::12"]
`)
	checkedNotAtStart(t, path, ":7: l2.members[0]: 2001:db8::12 has no effect: this node is a member by")
}

// reloadFile is reload of a file.
func reloadFile(path string) (*config.Config, error) {
	text, err := config.Read(path)
	if err != nil {
		return nil, err
	}
	return reload(path, text)
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
