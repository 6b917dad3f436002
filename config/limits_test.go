package config

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// withService is a file with one service; %s stands for more of its keys.
const withService = `
[[service]]
name = "s"
address = "203.0.113.10"
ports = ["80"]
backends = ["10.0.0.1", "10.0.0.2"]
%s`

const withPeer = "[bgp]\nasn = 64512\n[[bgp.peers]]\naddress = \"192.0.2.1\"\nasn = 64500\n%s"

// Each key accepts its limits, but not the values beyond them.
func TestLimits(t *testing.T) {
	name := func(n int) string { return strings.Repeat("a", n) }
	host := func(n int) string { return strings.Repeat("a.", 150)[:n-1] + "a" }
	for _, c := range []struct {
		text   string // %s is the value
		ok     []string
		broken []string
	}{
		{"[datapath]\nmax_flows = %s", []string{"1", "100000000"}, []string{"0", "100000001"}},
		{"[datapath]\ntunnel_port = %s", []string{"1", "65535"}, []string{"0", "65536"}},
		{"[datapath]\nsnat_ports = \"%s\"", []string{"1024-1024", "61000-65535", "1024 - 6000", "2000-2001, 2002-2003",
			"2000-2000,2001-2001,2002-2002,2003-2003,2004-2004,2005-2005,2006-2006,2007-2007"},
			[]string{"1023-2000", "2001-2000", "2000", "2000-65536", "2000-2001,2001-2002", "2000-2001,",
				"2000-2000,2001-2001,2002-2002,2003-2003,2004-2004,2005-2005,2006-2006,2007-2007,2008-2008"}},
		{"[datapath.timeouts]\nudp = \"%s\"", []string{"1s", "168h"}, []string{"999ms", "168h1s"}},
		{"[datapath]\ninterfaces = [\"%s\"]", []string{name(15), "eth0.1"},
			[]string{name(16), "", ".", "..", "a/b", "a:b", "a b"}},
		{"[bgp]\nasn = %s", []string{"1", "23455", "23457", "65534", "4294967294"},
			[]string{"0", "23456", "65535", "4294967295", "4294967296"}},
		{"[bgp]\nasn = 64512\n[[bgp.peers]]\naddress = \"192.0.2.1\"\nasn = %s",
			[]string{"1", `"external"`, `"internal"`},
			[]string{"0", "23456", `""`, `"64500"`, `"other"`, "true"}},
		{"[bgp]\nasn = 64512\nlisten_port = %s", []string{"-1", "1", "65535"}, []string{"-2", "0", "65536"}},
		{"[bgp]\nasn = 64512\nlocal_pref = %s", []string{"0", "4294967295"}, []string{"-1", "4294967296"}},
		{"[bgp]\nasn = 64512\naggregate_v4 = %s", []string{"8", "32"}, []string{"7", "33"}},
		{"[bgp]\nasn = 64512\naggregate_v6 = %s", []string{"16", "128"}, []string{"15", "129"}},
		{fmt.Sprintf(withPeer, "port = %s"), []string{"1", "65535"}, []string{"0", "65536"}},
		{fmt.Sprintf(withPeer, "multihop = %s"), []string{"0", "255"}, []string{"-1", "256"}},
		{fmt.Sprintf(withPeer, "ttl_security = true\nmultihop = %s"), []string{"0"}, []string{"1"}},
		{fmt.Sprintf(withPeer, "hold_time = \"%s\""), []string{"0s", "3s", "65535s"},
			[]string{"1s", "2s", "3500ms", "500ms", "65536s"}},
		{"[bgp]\nasn = 64512\nmax_routes = %s", []string{"1", "1048576"}, []string{"0", "1048577"}},
		{fmt.Sprintf(withPeer, "keepalive = \"%s\""), []string{"0s", "1s", "3s"}, []string{"500ms", "3001ms"}},
		{fmt.Sprintf(withPeer, "hold_time = \"0s\"\nkeepalive = \"%s\""), []string{"0s"}, []string{"1s"}},
		{fmt.Sprintf(withPeer, "connect_retry = \"%s\""), []string{"1s", "1h"}, []string{"999ms", "61m"}},
		{fmt.Sprintf(withPeer, "local_asn = %s"), []string{"0", "64999"}, []string{"23456", "-1"}},
		{"[bgp]\nasn = 1\nlisten_port = %s\npeers = [{ address = \"192.0.2.1\", asn = 2, passive = true }]",
			[]string{"179"}, []string{"-1"}},
		{"[bgp]\nasn = 1\nlong_lived_restart_time = \"1h\"\n%s", []string{""}, []string{"long_lived = \"1h\""}},
		{"[bgp]\nasn = 1\nlong_lived = \"%s\"", []string{"0s", "1h"}, []string{"1500ms"}},
		{fmt.Sprintf(withPeer, "max_received = %s"), []string{"0", "4294967295"}, []string{"-1", "4294967296"}},
		{fmt.Sprintf(withPeer, "prepend = %s"), []string{"0", "10"}, []string{"-1", "11"}},
		{"[bgp]\nasn = 64512\n[[bgp.peers]]\naddress = \"192.0.2.1\"\nasn = 64512\nprepend = %s", []string{"0"},
			[]string{"1"}},
		{fmt.Sprintf(withPeer, "med = %s"), []string{"0", "4294967295"}, []string{"-1", "4294967296"}},
		{fmt.Sprintf(withPeer, "local_pref = %s"), []string{"0", "4294967295"}, []string{"-1", "4294967296"}},
		{fmt.Sprintf(withPeer, "source = \"%s\""), []string{"192.0.2.2"}, []string{"2001:db8::2", "0.0.0.0"}},
		{"[l2]\nport = %s", []string{"1", "65535"}, []string{"0", "65536"}},
		{"[probe]\nfall = %s", []string{"1", "100"}, []string{"0", "101"}},
		{"[probe]\nrise = %s", []string{"1", "100"}, []string{"0", "101"}},
		{"[probe]\ninterval = \"%s\"", []string{"10ms", "1h"}, []string{"9ms", "61m"}},
		{"[probe]\ninterval = \"1s\"\ntimeout = \"%s\"", []string{"1ms", "1s"}, []string{"999us", "1001ms"}},
		{"[probe]\nproxy_healthz = \"%s\"", []string{"http://127.0.0.1/", "https://[::1]:1/x"},
			[]string{"ftp://127.0.0.1/", "127.0.0.1:80", "http://", "%%zz"}},
		{"[node]\nname = \"%s\"", []string{host(253), name(63), "lb_1.example.net."},
			[]string{host(254), name(64), "-a", "a..b"}},
		{"[node]\nrouter_id = \"%s\"", []string{"192.0.2.1"}, []string{"2001:db8::1", "0.0.0.0", "224.0.0.1"}},
		{"[admin]\nsocket = \"/%s\"", []string{name(106)}, []string{name(107)}},
		{"[admin]\nlisten = \"%s\"", []string{":9911", "127.0.0.1:0", "[::1]:9911", ""},
			[]string{"localhost:9911", "127.0.0.1", "127.0.0.1:65536"}},
		{"[[pool]]\nname = \"%s\"\naddresses = [\"203.0.113.0/28\"]", []string{name(63), "a.b-c_d"},
			[]string{name(64), "", "-a", "a b"}},
		{"[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.0/28\"]\nnamespaces = [\"%s\"]",
			[]string{name(63), "a-b"}, []string{name(64), "A", "-a"}},
		{"[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.0/28\"]\npriority = %s",
			[]string{"-2147483648", "2147483647"}, []string{"-2147483649", "2147483648"}},
		{"[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.16/28\", \"%s\"]",
			[]string{"203.0.113.15", "203.0.113.32", "203.0.113.0-203.0.113.15"},
			[]string{"203.0.113.16", "203.0.113.31", "203.0.113.0-203.0.113.16", "203.0.113.1-2001:db8::1"}},
		{fmt.Sprintf(withService, "min_healthy = %s"), []string{"1", "2"}, []string{"0", "3"}},
		{fmt.Sprintf(withService, "affinity = \"%s\""), []string{"0s", "24h"}, []string{"-1s", "24h1s"}},
		{fmt.Sprintf(withService, "[[service.backends]]\naddress = \"10.0.0.3\"\nweight = %s"), nil, []string{"1"}},
		{"[[service]]\nname = \"s\"\naddress = \"203.0.113.10\"\nports = [\"80\"]\n" +
			"backends = [{ address = \"10.0.0.3\", weight = %s }]", []string{"0", "1000"}, []string{"-1", "1001"}},
		{"[[service]]\nname = \"s\"\naddress = \"203.0.113.10\"\nports = [\"80\"]\n" +
			"backends = [{ address = \"10.0.0.3\", port = %s }]", []string{"0", "65535"}, []string{"-1", "65536"}},
		{"[kubernetes]\nload_balancer_class = \"%s\"", []string{"", "a.example/b", name(63)},
			[]string{name(64), "/a", "A/b"}},
		{"[kubernetes]\nload_balancer_class = %s",
			[]string{`["", "a/b"]`, `["a"]`}, []string{"[]", `["a", "a"]`, "[7]"}},
		{"[kubernetes]\nload_balancer_class = [\"\", \"a/b\"]\n" +
			"[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.1\"]\nclass = %q",
			[]string{"", "a/b"}, []string{"a", "a b"}},
	} {
		parse := func(value string) error {
			_, err := Parse("steelyard.toml", []byte(fmt.Sprintf(c.text, value)))
			return err
		}
		for _, value := range c.ok {
			must.Row(t, fmt.Sprintf(c.text, value), nil, parse(value))
		}
		for _, value := range c.broken {
			must.True(t, parse(value) != nil, "%s: accepted", fmt.Sprintf(c.text, value))
		}
	}
}

// Values that differ from the default reach the result.
func TestValues(t *testing.T) {
	c := mustParseText(t, `
[datapath]
snat_ports = "2000-3000"
tunnel_port = 1
[bgp]
asn = 64512
listen_port = -1
weighted = false
[[bgp.peers]]
address = "192.0.2.1"
asn = 64500
hold_time = "0s"
graceful_restart = false
bfd = true
[kubernetes]
allocate = false
exclude_nodes = ["unschedulable"]
proxy = "replace"
socket_lb = "off"
external_ips = "any"
panic_hold = "0s"
node_probe = "off"
max_endpoints_per_service = 7
[admin]
listen = ":9911"
[log]
level = "warn"
`)
	p := c.BGP.Peers[0]
	must.True(t, slices.Equal(c.Datapath.SNATPorts, []PortRange{{2000, 3000}}) && c.Datapath.TunnelPort == 1,
		"datapath %+v", c.Datapath)
	must.True(t, c.BGP.ListenPort == -1 && c.BGP.Weighted == lb.WeightedNever && p.HoldTime == 0 &&
		!p.GracefulRestart && p.BFD == (BFD{Interval: 100 * time.Millisecond, Multiplier: 3}), "bgp %+v", c.BGP)
	must.True(t, c.Kubernetes.NoSocketLB && c.Kubernetes.AnyExternalIP, "kubernetes %+v", c.Kubernetes)
	must.True(t, !c.Kubernetes.Allocate && c.Kubernetes.MaxEndpointsPerService == 7 && c.Kubernetes.PanicHold == 0 &&
		c.Kubernetes.NodeProbe == 0 && slices.Equal(c.Kubernetes.ExcludeNodes, []string{NodeUnschedulable}),
		"kubernetes %+v", c.Kubernetes)
	must.True(t, c.Admin.Listen == ":9911" && c.Log.Level.String() == "WARN", "admin %+v, log %+v", c.Admin, c.Log)
}

// The default timeout follows the interval down, not up.
func TestTimeoutFollowsInterval(t *testing.T) {
	for interval, want := range map[string]time.Duration{
		"10ms": 10 * time.Millisecond, "500ms": 500 * time.Millisecond, "1h": 500 * time.Millisecond,
	} {
		must.Row(t, interval, want, mustParseText(t, fmt.Sprintf("[probe]\ninterval = %q", interval)).Probe.Timeout)
	}
}

func TestOverlap(t *testing.T) {
	parse := func(s string) lb.AddrRange {
		from, to, _ := strings.Cut(s, "-")
		return lb.AddrRange{From: netip.MustParseAddr(from), To: netip.MustParseAddr(to)}
	}
	for _, c := range []struct {
		a, b string
		want bool
	}{
		{"192.0.2.1-192.0.2.5", "192.0.2.5-192.0.2.9", true},
		{"192.0.2.1-192.0.2.5", "192.0.2.6-192.0.2.9", false},
		{"192.0.2.1-192.0.2.9", "192.0.2.4-192.0.2.4", true},
		{"192.0.2.1-192.0.2.9", "::-ffff::", false},
	} {
		a, b := parse(c.a), parse(c.b)
		must.True(t, overlap(a, b) == c.want && overlap(b, a) == c.want,
			"%s and %s: overlap %t, want %t", c.a, c.b, overlap(a, b), c.want)
	}
	must.Equal(t, "0.0.0.0/0", formatRange(parse("0.0.0.0-255.255.255.255")))
	r := parse("192.0.2.1-192.0.2.9")
	must.Equal(t, "[192.0.2.1/32 192.0.2.2/31 192.0.2.4/30 192.0.2.8/31]", fmt.Sprint(r.Prefixes()))
	for without, want := range map[string]string{
		"192.0.2.4/30": "[{192.0.2.1 192.0.2.3} {192.0.2.8 192.0.2.9}]", "192.0.2.9/29": "[{192.0.2.1 192.0.2.7}]",
		"192.0.2.0/24": "[]", "192.0.2.16/28": "[{192.0.2.1 192.0.2.9}]", "::/0": "[{192.0.2.1 192.0.2.9}]",
	} {
		must.Row(t, without, want, fmt.Sprint(r.Without(netip.MustParsePrefix(without))))
	}
	must.Row(t, "zero", []lb.AddrRange{r}, r.Without(netip.Prefix{}))
}

func TestSpecialAddresses(t *testing.T) {
	for addr, want := range map[string]string{
		"0.255.255.255": `"this network" (RFC 1122 §3.2.1.3)`, "1.0.0.0": "",
		"126.255.255.255": "", "127.0.0.0": "loopback",
		"128.0.0.0": "", "169.253.255.255": "", "169.254.255.255": "link-local", "169.255.0.0": "",
		"223.255.255.255": "",
		"224.0.0.0":       "multicast", "239.255.255.255": "multicast", "240.0.0.0": "reserved or broadcast",
		"255.255.255.255": "reserved or broadcast", "::": "the unspecified address", "::1": "loopback", "::2": "",
		"fe7f:ffff::": "", "fe80::": "link-local", "febf::": "link-local", "fec0::": "", "feff::": "",
		"ff00::": "multicast",
	} {
		a := netip.MustParseAddr(addr)
		must.Row(t, addr, want, specialIn(lb.AddrRange{From: a, To: a}))
	}
}

// Paths in a document with quoted keys, whose first array element has its own table.
func TestScanPaths(t *testing.T) {
	var got []string
	const text = "[[a]]\n[a.b]\nc = 1\n'd\\e' = 2\n[[a]]\n[[a.f]]\n[a.f.g]\n\"h\\\"i\" = {j = [1], k = 2}\n"
	for _, p := range scan(text) {
		got = append(got, fmt.Sprintf("%d %s", p.Line, p.Path))
	}
	want := []string{"1 a[0]", "2 a[0].b", "3 a[0].b.c", `4 a[0].b."d\\e"`, "5 a[1]", "6 a[1].f[0]", "7 a[1].f[0].g",
		`8 a[1].f[0].g."h\"i"`, `8 a[1].f[0].g."h\"i".j`, `8 a[1].f[0].g."h\"i".j[0]`, `8 a[1].f[0].g."h\"i".k`}
	must.Equal(t, want, got)
}

// Bare keys have the same characters as in TOML; in a path, any other key is quoted.
func TestJoinKey(t *testing.T) {
	for key, want := range map[string]string{
		"azAZ09_-": "t.azAZ09_-", "": `t.""`, "a.b": `t."a.b"`, "a`": "t.\"a`\"", "a{": `t."a{"`, "a@": `t."a@"`,
		"a[": `t."a["`, "a/": `t."a/"`, "a:": `t."a:"`,
	} {
		must.Equal(t, want, joinKey("t", key))
	}
}

// A text that ends within a comment, a key or a string has the positions of what it contains.
func TestScanEndsAnywhere(t *testing.T) {
	for text, want := range map[string]int{
		"a = 1 # end": 1, "a = 1\n# end": 1, "a =": 1, "a": 1, "a = \"x": 1, "a = \"x\\": 1, "[": 1, "": 0,
	} {
		must.Row(t, text, want, len(scan(text)))
	}
}

func TestParentPath(t *testing.T) {
	for path, want := range map[string]string{"a.b[1].c": "a.b[1]", "a.b[1]": "a.b", "a.b": "a", "a": "", "": ""} {
		got, ok := parentPath(path)
		must.True(t, got == want && ok == (want != ""), "%q: %q, %t, want %q", path, got, ok, want)
	}
}

// Keys that have no effect without Kubernetes cause warnings only if they are set.
func TestNoWarningWithoutKeys(t *testing.T) {
	text := "[bgp]\nasn = 64512\npeers = [{ address = \"192.0.2.1\", asn = 64500 }]\n" +
		"[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.0/28\"]\n" + fmt.Sprintf(withService, "")
	must.Equal(t, nil, mustParseText(t, text).Warnings)
}

// A secret file has up to three secrets, whose order is preserved.
func TestSecretsOfMembers(t *testing.T) {
	dir := t.TempDir()
	const one, two, three, four = "the first secret", "the second secret", "the third secret", "the fourth secret"
	for _, tt := range []struct {
		lines []string
		ok    bool
	}{
		{[]string{one}, true}, {[]string{one, two, three}, true}, {[]string{one, "", two, ""}, true},
		{[]string{one, two, three, four}, false}, {[]string{one, "short"}, false}, {[]string{""}, false},
		{[]string{one, "\x00 is not text at all"}, false},
	} {
		text := strings.Join(tt.lines, "\n") + "\n"
		must.Do(t, os.WriteFile(filepath.Join(dir, "s"), []byte(text), 0o600))
		c, err := Parse(filepath.Join(dir, "f"), []byte("[l2]\nsecret_file = \"s\""))
		if (err == nil) != tt.ok {
			t.Errorf("%q: %v", tt.lines, err)
			continue
		}
		if !tt.ok {
			continue
		}
		var got []string
		for _, s := range c.L2.Secrets {
			got = append(got, s.Reveal())
		}
		want := slices.DeleteFunc(tt.lines, func(s string) bool { return s == "" })
		must.Row(t, tt.lines, want, got)
	}
}

func TestSecretLengths(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		text        string
		least, most int
	}{
		{"[l2]\nsecret_file = \"s\"", 16, 80},
		{"[datapath]\ntunnel_key_file = \"s\"", 16, 4096},
		{fmt.Sprintf(withPeer, "password_file = \"s\""), 1, 80},
	} {
		for size, ok := range map[int]bool{c.least - 1: false, c.least: true, c.most: true, c.most + 1: false} {
			must.Do(t, os.WriteFile(filepath.Join(dir, "s"), []byte(strings.Repeat("x", size)), 0o600))
			_, err := Parse(filepath.Join(dir, "steelyard.toml"), []byte(c.text))
			must.True(t, (err == nil) == ok, "%d bytes in %q: %v, want accepted: %t", size, c.text, err, ok)
		}
	}
}

// An aggregate is compared only with pools announced over BGP, not with pools only for l2.
func TestAggregateIgnoresOtherPools(t *testing.T) {
	const text = "[bgp]\nasn = 64512\naggregate_v4 = 28\n[l2]\n[[pool]]\nname = \"p\"\n" +
		"addresses = [\"203.0.113.0/29\"]\nannounce = [%s]\n"
	for announce, ok := range map[string]bool{`"l2"`: true, `"bgp"`: false, `"l2", "bgp"`: false, "": false} {
		_, err := Parse("steelyard.toml", []byte(fmt.Sprintf(text, announce)))
		must.True(t, (err == nil) == ok, "announce = [%s]: %v, want accepted: %t", announce, err, ok)
	}
}

// For a pool with an error, only that error is reported: no address is reported as outside all pools, because the
// pool's addresses are unknown.
func TestBrokenPoolIsReportedAlone(t *testing.T) {
	const text = "[[pool]]\nname = \"p\"\naddresses = [\"198.51.100.0/28\", \"x\"]\n"
	_, err := Parse("steelyard.toml", []byte(text+fmt.Sprintf(withService, "")))
	var errs Errors
	must.True(t, errors.As(err, &errs) && len(errs) == 1 && errs[0].Key == "pool[0].addresses[1]",
		"errors %v, want one about the address", err)
}
