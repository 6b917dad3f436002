package config

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var exact = cmpopts.IgnoreFields(Config{}, "Text", "decodeAgain")

// mustParse parses a file in this package, with its secrets in the test's directory.
func mustParse(t *testing.T, file string) *Config {
	t.Helper()
	text := must.Get(os.ReadFile(file))(t)
	return mustParseText(t, string(text))
}

func mustParseText(t *testing.T, text string) *Config {
	t.Helper()
	return must.Get(Parse("steelyard.toml", []byte(strings.ReplaceAll(text, "/etc/steelyard/", secrets(t)+"/"))))(t)
}

func TestEmptyFileIsDefault(t *testing.T) {
	c := mustParseText(t, "")
	want := Default()
	want.Empty = true
	want.Warnings = []string{"steelyard.toml: nothing to do: no services and no source of services; " +
		"add a [[service]] or [kubernetes]"}
	must.Equal(t, want, c, exact)
}

// reference.toml has every key with its default, so it means the same as a file with only the keys that have no
// default.
func TestReferenceHasTheDefaults(t *testing.T) {
	got, want := mustParse(t, "reference.toml"), mustParse(t, "testdata/required.toml")
	// tunnel has its default but no effect here, which causes a warning. This test compares only values.
	got.Warnings, want.Warnings = nil, nil
	must.Equal(t, want, got, exact)
}

func TestReferenceHasEveryKey(t *testing.T) {
	text := must.Get(os.ReadFile("reference.toml"))(t)
	d := newDecoder("reference.toml")
	d.onAbsent = func(path string) { t.Errorf("reference.toml does not have %s", path) }
	must.Get(d.decode([]byte(strings.ReplaceAll(string(text), "/etc/steelyard/", secrets(t)+"/"))))(t)
}

// The contract: a literal copy of the file in DESIGN §2.
func TestDesign(t *testing.T) {
	c := mustParse(t, "testdata/design.toml")
	want := &Config{
		Node: Node{"lb1", netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("192.0.2.11")},
		Datapath: Datapath{
			Interfaces: []string{"eth0"}, Mode: ModeAuto, MaxFlows: 1000000,
			SNATPorts: []PortRange{{1024, 32767}, {61000, 65535}}, TunnelPort: 6090, LocalClients: true,
			Timeouts: Timeouts{
				HalfOpen: 30 * time.Second, Established: 130 * time.Minute, Closing: 4 * time.Minute,
				Closed: 10 * time.Second, UDP: 3 * time.Minute,
			},
		},
		BGP: &BGP{
			ASN: 64512, ListenPort: 179,
			Peers: []Peer{{
				Address: netip.MustParseAddr("192.0.2.1"), ASN: 64500, Port: 179, Password: NewSecret("good password"),
				MaxReceived: 1000, HoldTime: 9 * time.Second, ConnectRetry: 2 * time.Second, GracefulRestart: true,
				NodeSelector: "rack=a",
			}},
			Communities: []Community{{parts: [3]uint32{64512<<16 | 100}}},
			LocalPref:   100, AggregateV4: 32, AggregateV6: 128, Weighted: lb.WeightedMovable,
			RestartTime:      30 * time.Second,
			MaxRoutes:        1000,
			GracefulShutdown: 2 * time.Second,
		},
		L2: &L2{
			Interfaces: []string{"eth0"}, Members: []netip.Addr{netip.MustParseAddr("192.0.2.12")}, Port: 7946,
			Secrets: []Secret{NewSecret("a good secret of enough bytes")}, SpreadLocal: true,
			ProbeOwn: 15 * time.Second,
		},
		Pools: []Pool{{
			Name: "public",
			Ranges: []lb.AddrRange{
				{From: netip.MustParseAddr("203.0.113.0"), To: netip.MustParseAddr("203.0.113.15")},
				{From: netip.MustParseAddr("203.0.113.40"), To: netip.MustParseAddr("203.0.113.50")},
				{From: netip.MustParseAddr("2001:db8:1::"), To: netip.MustParseAddr("2001:db8:1::f")},
			},
			Announce: []lb.AnnouncerKind{lb.AnnounceBGP}, AutoAssign: true, Grace: 10 * time.Minute,
		}},
		Services: []Service{{
			Name: "web", Addresses: []netip.Addr{netip.MustParseAddr("203.0.113.10")},
			Ports: []lb.Port{{Port: 80, Target: 8080, Protocol: lb.TCP}, {Port: 443, Target: 8443, Protocol: lb.TCP},
				{Port: 53, Target: 53, Protocol: lb.UDP}},
			Backends: []lb.Backend{{Addr: netip.MustParseAddr("10.0.0.21"), Weight: 1},
				{Addr: netip.MustParseAddr("10.0.0.22"), Port: 9000, Weight: 3}},
			Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Encap: lb.EncapIPIP, SNAT: true,
			MinHealthy: 1, OnDown: "reset", OnAllDown: "withdraw",
			Check: lb.CheckSpec{
				Type: lb.CheckHTTP, Path: "/healthz", Interval: 2 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3,
				Status:      []lb.StatusRange{{From: 200, To: 399}},
				ServicePort: lb.Port{Port: 80, Target: 8080, Protocol: lb.TCP},
			},
			Announce: []lb.AnnouncerKind{lb.AnnounceBGP},
		}},
		Kubernetes: &Kubernetes{
			LoadBalancerClasses: []string{""}, Allocate: true, Proxy: ProxyAuto, Forward: lb.MethodTunnel,
			MaxEndpointsPerService: 10000, PanicHold: 30 * time.Second, NodeProbe: 300 * time.Millisecond,
		},
		Probe: Probe{time.Second, 500 * time.Millisecond, 2, 1, "http://127.0.0.1:10256/healthz", "keep", 0},
		Admin: Admin{Socket: "/run/steelyard/steelyard.sock"},
		Log:   Log{slog.LevelInfo, "text"},
	}
	must.Equal(t, want, c, exact)
}

// Each pair is the long and the short form of one setting.
func TestForms(t *testing.T) {
	const service = "[[service]]\nname = \"web\"\n"
	for _, c := range []struct{ name, long, short string }{
		{"one address", service + `address = ["203.0.113.10"]
			ports = ["80"]
			backends = ["10.0.0.21"]`, service + `address = "203.0.113.10"
			ports = ["80"]
			backends = ["10.0.0.21"]`},
		{"backends", service + `address = "203.0.113.10"
			ports = ["80:80/tcp"]
			[[service.backends]]
			address = "10.0.0.21"
			port = 9000
			weight = 1`, service + `address = "203.0.113.10"
			ports = ["80"]
			backends = ["10.0.0.21:9000"]`},
		{"check", service + `address = "203.0.113.10"
			ports = ["80"]
			backends = ["10.0.0.21"]
			[service.check]
			type = "http"
			path = "/"`, service + `address = "203.0.113.10"
			ports = ["80"]
			backends = ["10.0.0.21"]
			check = "http"`},
		{"peers", `[bgp]
			asn = 64512
			[[bgp.peers]]
			address = "192.0.2.1"
			asn = 64500
			[[bgp.peers]]
			address = "fe80::1%eth0"
			asn = 64501`, `[bgp]
			asn = 64512
			peers = [{ address = "192.0.2.1", asn = 64500 }, { address = "fe80::1%eth0", asn = 64501 }]`},
		{"pool", `[[pool]]
			name = "a"
			addresses = ["203.0.113.1/32", "203.0.113.16-203.0.113.31"]`, `[[pool]]
			name = "a"
			addresses = ["203.0.113.1", "203.0.113.16/28"]`},
		{"timeout follows a short interval", service + `address = "203.0.113.10"
			ports = ["80"]
			backends = ["10.0.0.21"]
			check = { interval = "200ms", timeout = "200ms" }
			[probe]
			interval = "100ms"
			timeout = "100ms"`, service + `address = "203.0.113.10"
			ports = ["80"]
			backends = ["10.0.0.21"]
			check = { interval = "200ms" }
			[probe]
			interval = "100ms"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			long, short := mustParseText(t, c.long), mustParseText(t, c.short)
			long.Warnings, short.Warnings = nil, nil
			must.Equal(t, long, short, exact)
		})
	}
}

func TestByteOrderMarkAndWindowsLines(t *testing.T) {
	c := mustParseText(t, "\xef\xbb\xbf[node]\r\nname = \"lb1\"\r\n")
	must.True(t, c.Node.Name == "lb1", "got %+v", c.Node)
}

func TestCheckDefaults(t *testing.T) {
	base := defaultCheck()
	with := func(f func(*lb.CheckSpec)) lb.CheckSpec {
		c := base
		f(&c)
		return c
	}
	for _, c := range []struct {
		ports, check string
		want         lb.CheckSpec
		asked        lb.Port
	}{
		{`"80"`, ``, base, lb.Port{Port: 80, Target: 80, Protocol: lb.TCP}},
		{`"53/udp", "80:8080"`, ``, base, lb.Port{Port: 80, Target: 8080, Protocol: lb.TCP}},
		{`"80", "53/udp"`, `{ type = "dns", host = "example.net" }`,
			with(func(c *lb.CheckSpec) { c.Type, c.Host = lb.CheckDNS, "example.net" }),
			lb.Port{Port: 53, Target: 53, Protocol: lb.UDP}},
		{`"443/udp"`, `{ port = 8080 }`, with(func(c *lb.CheckSpec) { c.Port = 8080 }),
			lb.Port{Port: 443, Target: 443, Protocol: lb.UDP}},
		{`"443/udp"`, `"none"`, with(func(c *lb.CheckSpec) { c.Type = lb.CheckNone }),
			lb.Port{Port: 443, Target: 443, Protocol: lb.UDP}},
		{`"53/udp"`, `{ type = "udp", send = "ping", expect_body = "pong" }`,
			with(func(c *lb.CheckSpec) { c.Type, c.Send, c.Body = lb.CheckUDP, "ping", "pong" }),
			lb.Port{Port: 53, Target: 53, Protocol: lb.UDP}},
		{`"443"`, `{ type = "https", expect_status = "200, 301-308", tls_server_name = "a.example.net",` +
			` host = "b.example.net:443" }`,
			with(func(c *lb.CheckSpec) {
				c.Type, c.Path, c.TLSServerName, c.Host = lb.CheckHTTPS, "/", "a.example.net", "b.example.net:443"
				c.Status = []lb.StatusRange{{From: 200, To: 200}, {From: 301, To: 308}}
			}), lb.Port{Port: 443, Target: 443, Protocol: lb.TCP}},
		{`"80"`, `"health-check-node-port"`,
			with(func(c *lb.CheckSpec) { c.Type, c.Path, c.Port = lb.CheckNodePort, "/healthz", 10256 }),
			lb.Port{Port: 80, Target: 80, Protocol: lb.TCP}},
		{`"80"`, `{ type = "health-check-node-port", port = 30123 }`,
			with(func(c *lb.CheckSpec) { c.Type, c.Path, c.Port = lb.CheckNodePort, "/healthz", 30123 }),
			lb.Port{Port: 80, Target: 80, Protocol: lb.TCP}},
	} {
		t.Run(c.ports+" "+c.check, func(t *testing.T) {
			text := "[[service]]\nname = \"s\"\naddress = \"203.0.113.10\"\nbackends = [\"10.0.0.21\"]\n"
			text += fmt.Sprintf("ports = [%s]\n", c.ports)
			if c.check != "" {
				text += "check = " + c.check + "\n"
			}
			s := mustParseText(t, text).Services[0]
			c.want.ServicePort = c.asked
			must.Equal(t, c.want, s.Check)
			must.Row(t, "on_all_down", c.want.Type == lb.CheckNodePort, s.OnAllDown == OnAllDownUnanswered)
			var names []string
			for _, p := range s.Ports {
				names = append(names, p.Name())
			}
			must.Equal(t, portNames(c.ports), strings.Join(names, " "))
		})
	}
}

// portNames converts a ports list to the ports' names: `"53/udp", "80:8080"` to "53/udp 80/tcp".
func portNames(list string) string {
	names := strings.Split(strings.ReplaceAll(list, `"`, ""), ", ")
	for i, n := range names {
		number, protocol, udp := strings.Cut(n, "/")
		if !udp {
			protocol = "tcp"
		}
		number, _, _ = strings.Cut(number, ":")
		names[i] = number + "/" + protocol
	}
	return strings.Join(names, " ")
}

func TestWarnings(t *testing.T) {
	got := mustParseText(t, `[bgp]
asn = 64512

[l2]
members = ["192.0.2.12"]
unencrypted = true

[[pool]]
name = "p"
addresses = ["203.0.113.0/28"]
namespaces = ["default"]
service_selector = "a=b"

[[service]]
name = "s"
address = "203.0.113.10"
ports = ["80"]
tunnel = "gue"
allow = ["2001:db8::/32"]
backends = [{ address = "10.0.0.1", weight = 0 }, { address = "10.0.0.2", drain = true }]
`).Warnings
	want := []string{
		`1: bgp: has no peers, so it announces nothing; add [[bgp.peers]]`,
		`6: l2.unencrypted: any host that can send with a member's address to port 7946 can take over ` +
			`addresses; share a secret through secret_file`,
		`11: pool[0].namespaces (pool "p"): has no effect without Kubernetes; add [kubernetes], or leave it out`,
		`12: pool[0].service_selector (pool "p"): has no effect without Kubernetes; add [kubernetes], or leave it out`,
		`18: service[0].tunnel (service "s"): has no effect with forward = "nat"; ` +
			`write forward = "tunnel", or leave tunnel out`,
		`19: service[0].allow (service "s"): no source may connect to 203.0.113.10; add a prefix of its family`,
		`20: service[0].backends (service "s"): none accepts new connections; set weight and drain = false on one`,
	}
	for i := range want {
		want[i] = "steelyard.toml:" + want[i]
	}
	must.Equal(t, want, got)
}

func TestSNAT(t *testing.T) {
	const service = "[[service]]\nname = \"s\"\naddress = \"203.0.113.10\"\nports = [\"80\"]\n" +
		"backends = [\"10.0.0.1\"]\n"
	for _, x := range []struct {
		keys    string
		want    bool
		warning string
	}{
		{"", true, ""}, {"snat = true", true, ""}, {"snat = false", false, ""},
		{"snat = false\nforward = \"dsr\"", false, `has no effect with forward = "dsr"`},
	} {
		c := mustParseText(t, service+x.keys)
		must.Row(t, x.keys, x.want, c.Services[0].SNAT)
		got := strings.Join(c.Warnings, "")
		must.True(t, strings.Contains(got, "snat") == (x.warning != "") && strings.Contains(got, x.warning),
			"%q: warnings %q; want %q", x.keys, got, x.warning)
	}
}

func TestMinimal(t *testing.T) {
	c := mustParse(t, "testdata/minimal.toml")
	must.True(t, len(c.Warnings) == 0 && len(c.Services) == 1 && len(c.Services[0].Backends) == 3 &&
		len(c.BGP.Peers) == 1, "got %+v", c)
}

func TestLoad(t *testing.T) {
	dir := t.TempDir()
	_, err := Load(filepath.Join(dir, "none.toml"))
	want := Errors{{File: filepath.Join(dir, "none.toml"), Problem: "cannot be read: no such file or directory",
		Hint: "name the file with -c"}}
	must.True(t, err != nil && err.Error() == want.Error(), "got %v, want %v", err, want)
	must.True(t, errors.Is(err, fs.ErrNotExist), "%v is not fs.ErrNotExist", err)
	denied := unreadable("a.toml", &fs.PathError{Op: "open", Path: "a.toml", Err: syscall.EACCES})
	must.Equal(t, "a.toml: cannot be read: permission denied; use sudo", denied.Error())
	// Secret files are relative to the configuration's directory.
	dir = secrets(t)
	file := filepath.Join(dir, "steelyard.toml")
	text := "[bgp]\nasn = 1\npeers = [{ address = \"192.0.2.1\", asn = 2, password_file = \"peer.key\" }]\n"
	must.Do(t, os.WriteFile(file, []byte(text), 0o644))
	c, err := Load(file)
	must.True(t, err == nil && c.BGP.Peers[0].Password.Reveal() == "good password", "got %+v, %v", c, err)
}

// An endless file is an error and does not use up the machine's memory.
func TestEndlessFile(t *testing.T) {
	want := "/dev/zero: cannot be read: it is larger than 64 MiB; name the file with -c"
	_, err := Load("/dev/zero")
	must.True(t, err != nil && err.Error() == want, "error %v; want %s", err, want)
}
