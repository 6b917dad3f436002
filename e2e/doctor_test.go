package e2e

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// examined is the output of "steelyard doctor -o json".
type examined struct {
	Verdict admin.Verdict
	Status  admin.Info
	Checks  []lb.Diagnosis
}

// doctor runs "steelyard doctor", and checks its exit code and its time.
func (s *incidents) doctor(t *testing.T) (x examined) {
	t.Helper()
	start := time.Now()
	out, err := s.agent.CLI(t.Context(), "doctor", "-o", "json")
	took := time.Since(start)
	t.Logf("doctor took %s", took.Round(time.Millisecond))
	must.True(t, took < 11*time.Second*lab.TimeFactor, "it took %s", took)
	i := strings.LastIndex(out, "\n}")
	must.Need(t, i > 0, "no output: %v", err)
	must.Do(t, json.Unmarshal([]byte(out[:i+2]), &x))
	must.True(t, (err == nil) == (x.Verdict == admin.OK), "%s, but exit with %v", x.Verdict, err)
	return x
}

// found returns the findings of the checks, without those of the status.
func (x examined) found() (all []lb.Finding) {
	for _, c := range x.Checks {
		all = append(all, c.Findings...)
	}
	return all
}

// sickness is a fault that a check finds without traffic.
type sickness struct {
	name       string
	begin, end func()
	code       string
	words      []string // in the text of the finding
}

// TestDoctor checks that "steelyard doctor" names faults that clients suffer from without traffic, and that it finds
// nothing in a network that works, however unusual. The agent does not probe for its own addresses by itself.
func TestDoctor(t *testing.T) {
	t.Parallel()
	s := newIncidents(t)
	b, router, server, other := s.Balancers[0], s.Topology.Router, s.Servers[0], s.Servers[1]
	six := lab.AgentService{Name: "six", Addresses: []netip.Addr{vip6}, Ports: []string{"80:8080"}}
	for _, n := range s.Servers {
		six.Backends = append(six.Backends, lab.AgentBackend{Address: n.V6})
	}
	s.text = strings.NewReplacer("probe_own = \"2s\"", "probe_own = \"0s\"",
		`"203.0.113.0/24"`, `"203.0.113.0/24", "2001:db8:1::/64"`).Replace(s.text) + lab.AgentServices(six)
	must.Do(t, s.agent.Configure(s.text))
	must.Get(s.agent.CLI(t.Context(), "restart"))(t)
	// An address that servers reach only through the router, such as that of another interface.
	far := netip.MustParsePrefix("198.51.101.9/32")
	must.Do(t, errors.Join(b.AddAddress("lo", far), router.AddRoute(far, b.V4)))
	labtest.Until(t, "clients are served", func() error { return s.served(t) })
	settle := func() { time.Sleep(6 * time.Second) } // until routers should use the routes
	settle()
	s.healthy(t, "with an ordinary network", "own-addresses", "routers", "speakers", "server-routes", "mtu")
	s.unusual(t)
	do := func(err error) { t.Helper(); must.Do(t, err) }
	bgp := b.Gateway4
	filter := fmt.Sprintf("import where net != %s/32 && net != %s/128;", s.web, vip6)
	var speaker net.Conn
	for _, x := range []sickness{
		{name: "another host answers ARP for an address",
			begin: func() { do(s.rival.AddAddress("eth0", labtest.HostRoute(s.lan))) },
			end:   func() { do(s.rival.DeleteAddress("eth0", labtest.HostRoute(s.lan))) },
			code:  "address-conflict", words: []string{s.lan.String(), mac(t, s.rival.Host).String()}},
		{name: "the router filters routes",
			begin: func() { s.bird(t, "import all;", filter); settle() },
			end:   func() { s.bird(t, filter, "import all;") },
			code:  "router-lacks-route", words: []string{bgp.String(), s.web.String(), vip6.String()}},
		{name: "another BGP speaker on this node connects to the router",
			begin: func() {
				c, err := b.Dial(t.Context(), "tcp", netip.AddrPortFrom(bgp, 179).String())
				do(err)
				speaker = c
			},
			end:  func() { do(speaker.Close()) },
			code: "other-speaker", words: []string{filepath.Base(os.Args[0])[:4], bgp.String()}},
		{name: "a server by dsr has the wrong gateway",
			begin: func() { run(t, server.Host, "ip route replace default via "+s.rival.V4.String()) },
			end:   func() { run(t, server.Host, "ip route replace default via "+server.Gateway4.String()) },
			code:  "server-route", words: []string{server.V4.String(), far.Addr().String()}},
		{name: "a server by dsr has no default route",
			begin: func() { run(t, other.Host, "ip route del default") },
			end:   func() { run(t, other.Host, "ip route add default via "+other.Gateway4.String()) },
			code:  "server-route", words: []string{other.V4.String()}},
		{name: "the path to a server has a smaller MTU, and no router says so",
			begin: func() { run(t, s.Switch, "ip link set "+server.Port+" mtu 1400") },
			end:   func() { run(t, s.Switch, "ip link set "+server.Port+" mtu 1500") },
			code:  "mtu", words: []string{"1500 bytes to " + server.V4.String(), "1400 bytes pass"}},
		{name: "the path to the router has a smaller MTU",
			begin: func() { run(t, s.Switch, "ip link set router mtu 1400") },
			end:   func() { run(t, s.Switch, "ip link set router mtu 1500") },
			code:  "mtu", words: []string{bgp.String(), b.Gateway6.String()}},
		{name: "nftables drops what checks send",
			begin: func() { do(b.Drop(t.Context(), "output", "tcp dport 8080")); s.waitSilent(t) },
			end:   func() { do(b.StopDropping(t.Context())) },
			code:  "filtered", words: []string{"a filter on this node", ":8080"}},
		{name: "nftables drops the answers to checks",
			begin: func() { do(b.Drop(t.Context(), "input", "tcp sport 8080")); s.waitSilent(t) },
			end:   func() { do(b.StopDropping(t.Context())) },
			code:  "answers-filtered", words: []string{"on eth0", "drops the answer"}},
		{name: "nftables drops BGP",
			begin: func() { do(s.dropBGP(t)); s.waitNoSession(t) },
			end:   func() { do(s.acceptBGP(t)) },
			code:  "filtered", words: []string{bgp.String() + ":179"}},
		{name: "kube-proxy holds an address in IPVS mode without strictARP",
			begin: func() {
				run(t, b.Host, "ip link add kube-ipvs0 type bridge")
				run(t, b.Host, fmt.Sprintf("ip address add %s/32 dev kube-ipvs0", s.lan))
			},
			end:  func() { run(t, b.Host, "ip link del kube-ipvs0") },
			code: "strict-arp", words: []string{s.lan.String()}},
	} {
		labtest.Until(t, "clients are served before: "+x.name, func() error { return s.served(t) })
		x.begin()
		now := s.doctor(t)
		i := slices.IndexFunc(now.found(), func(f lb.Finding) bool { return f.Code == x.code })
		if must.True(t, i >= 0, "%s: %+v", x.name, now); i >= 0 {
			f := now.found()[i]
			for _, word := range x.words {
				must.True(t, strings.Contains(f.Text, word), "%s: %q does not say %q", x.name, f.Text, word)
			}
			must.True(t, f.Remedy != "", "%s: %q has no remedy", x.name, f.Text)
			t.Logf("%s: %s", x.name, f.Text)
		}
		x.end()
	}
	labtest.Until(t, "clients are served again", func() error { return s.served(t) })
	t.Run("bundle", s.bundled)
	t.Run("a thousand servers", s.thousand)
}

// healthy checks that nothing is found, and that these checks asked.
func (s *incidents) healthy(t *testing.T, when string, asked ...string) {
	t.Helper()
	x := s.doctor(t)
	must.True(t, len(x.found()) == 0, "%s: %+v", when, x.found())
	for _, c := range x.Checks {
		must.True(t, c.NotAsked == "" || !slices.Contains(asked, c.Check), "%s: %s was not asked: %s", when, c.Check,
			c.NotAsked)
	}
}

// unusual checks that nothing is found in networks that only look wrong.
func (s *incidents) unusual(t *testing.T) {
	server, router, b := s.Servers[0], s.Topology.Router, s.Balancers[0]
	run(t, s.Switch, "ip link set "+server.Port+" mtu 1400")
	run(t, server.Host, "ip link set eth0 mtu 1400")
	s.healthy(t, "with a server whose link has a smaller MTU", "mtu")
	run(t, server.Host, "ip link set eth0 mtu 1500")
	run(t, s.Switch, "ip link set "+server.Port+" mtu 1500")

	for _, h := range []*lab.Host{server.Host, router} {
		for _, line := range []string{
			"add table inet quiet", "add chain inet quiet in { type filter hook input priority 0 ; }",
			"add chain inet quiet out { type filter hook output priority 0 ; }",
			"add rule inet quiet in meta l4proto icmp drop", "add rule inet quiet out meta l4proto icmp drop",
		} {
			run(t, h, "nft "+line)
		}
	}
	s.healthy(t, "with hosts that ignore ICMP", "mtu", "routers")
	run(t, server.Host, "nft flush table inet quiet")
	run(t, server.Host, "nft add rule inet quiet in meta l4proto icmp meta length > 1000 drop") // some firewalls do
	s.healthy(t, "with a server that ignores large pings", "mtu")
	run(t, server.Host, "nft flush table inet quiet")
	run(t, server.Host, "nft add rule inet quiet in ip saddr 198.51.101.9 meta l4proto icmp drop")
	s.healthy(t, "with a server that ignores pings from other networks", "server-routes")
	run(t, server.Host, "nft delete table inet quiet")
	run(t, router, "nft delete table inet quiet")

	run(t, b.Host, "nft add table inet other")
	run(t, b.Host, "nft add chain inet other in { type filter hook input priority 0 ; }")
	run(t, b.Host, "nft add rule inet other in tcp dport 22 drop")
	s.healthy(t, "with a filter for something else")
	run(t, b.Host, "nft delete table inet other")
}

// waitSilent waits until the checks of a server have failed.
func (s *incidents) waitSilent(t *testing.T) {
	labtest.Until(t, "the checks fail", func() error {
		return shows(t, s.agent, lb.NoResponse, "backends")
	})
}

func (s *incidents) waitNoSession(t *testing.T) {
	labtest.Until(t, "the session ends", func() error {
		var i admin.Info
		err := s.agent.Get(t.Context(), "/v1/status", &i)
		return errors.Join(err, labtest.ErrorIf(i.PeersUp > 0, "%d are established", i.PeersUp))
	})
}

// bundled checks that a bundle has what a report needs, that only its owner can read it, and that no secret is in it.
func (s *incidents) bundled(t *testing.T) {
	const password, token, comment = "pa55word-of-the-peer", "t0ken-of-the-admin-api", "old-passw0rd"
	b := s.Balancers[0].Host
	must.Do(t, errors.Join(b.WriteFile("/run/secrets/peer", password+"\n", 0o600),
		b.WriteFile("/run/secrets/token", token+"\n", 0o600)))
	text := "# password was " + comment + "\n" + strings.Replace(s.text, "[[bgp.peers]]\n",
		"[[bgp.peers]]\npassword_file = \"/run/secrets/peer\"\n", 1) +
		"\n[admin]\nlisten = \"127.0.0.1:9999\"\ntoken_file = \"/run/secrets/token\"\n"
	must.Do(t, s.agent.Configure(text))
	must.Get(s.agent.CLI(t.Context(), "restart"))(t)
	run(t, b, "nft add table inet bundled")
	defer run(t, b, "nft delete table inet bundled")
	name := filepath.Join(t.TempDir(), "report.tar.gz")
	must.Do(t, os.WriteFile(name, nil, 0o644))
	out, _ := s.agent.CLI(t.Context(), "doctor", "--bundle", name)
	must.True(t, strings.Contains(out, "own-addresses"), "the output is %q", out)
	must.Equal(t, os.FileMode(0o600), must.Get(os.Stat(name))(t).Mode())
	files := unpack(t, name)
	for _, secret := range []string{password, token, comment} {
		for file, text := range files {
			must.True(t, !strings.Contains(text, secret), "%s contains %s", file, secret)
		}
	}
	for file, word := range map[string]string{
		"doctor.txt": "own-addresses", "doctor.json": "\"verdict\"", "status.json": "\"findings\"",
		"services.json": s.web.String(), "backends.json": "\"state\"", "routes.json": "\"announced\"",
		"peers.json": s.Balancers[0].Gateway4.String(), "events.json": "agent started",
		"steelyard.toml": "/run/secrets/peer", "version.txt": "schema", "kernel.txt": "#",
		"network.txt": "route ", "nft.txt": "table inet bundled",
	} {
		text, ok := files["steelyard/"+file]
		must.True(t, ok && strings.Contains(text, word), "%s: present %t, does not contain %q", file, ok, word)
	}
	_, failed := files["steelyard/errors.txt"]
	must.True(t, !failed, "%s", files["steelyard/errors.txt"])
}

// thousand checks that the checks end in time with 1,000 servers.
func (s *incidents) thousand(t *testing.T) {
	server := s.Servers[1]
	run(t, server.Host, "ip route add local 10.1.0.0/16 dev lo")
	run(t, s.Balancers[0].Host, "ip route add 10.1.0.0/16 via "+server.V4.String())
	many := lab.AgentService{Name: "many", Addresses: []netip.Addr{s.web}, Ports: []string{"81"},
		Check: lab.AgentCheck{Type: "none"}}
	for i := range 1000 {
		many.Backends = append(many.Backends,
			lab.AgentBackend{Address: netip.AddrFrom4([4]byte{10, 1, byte(i / 250), byte(1 + i%250)})})
	}
	s.configure(t, s.text+lab.AgentServices(many))
	run(t, s.Switch, "ip link set "+server.Port+" mtu 1400")
	x := s.doctor(t)
	must.True(t, slices.ContainsFunc(x.found(), func(f lb.Finding) bool { return f.Code == "mtu" }), "%+v", x.Checks)
}

// unpack returns the files of a tar.gz by name.
func unpack(t *testing.T, name string) map[string]string {
	t.Helper()
	f := must.Get(os.Open(name))(t)
	defer f.Close()
	files := map[string]string{}
	for r := tar.NewReader(must.Get(gzip.NewReader(f))(t)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		must.Do(t, err)
		files[h.Name] = string(must.Get(io.ReadAll(r))(t))
	}
}
