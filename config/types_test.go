package config

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// For every key that needs text, a number is one error at that key.
func TestTextIsRequired(t *testing.T) {
	const pool = "[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.0/28\"]\n"
	service := fmt.Sprintf(withService, "")
	for _, c := range []struct{ text, key string }{
		{"[node]\nname = 7", "node.name"},
		{"[node]\nrouter_id = 7", "node.router_id"},
		{"[node]\naddress = 7", "node.address"},
		{"[datapath]\nsnat_ports = 7", "datapath.snat_ports"},
		{"[datapath]\nmode = 7", "datapath.mode"},
		{"[datapath]\ninterfaces = [7]", "datapath.interfaces[0]"},
		{"[bgp]\nasn = 64512\ncommunities = [7]", "bgp.communities[0]"},
		{"[bgp]\nasn = 64512\npeers = [{ asn = 1, address = 7 }]", "bgp.peers[0].address"},
		{fmt.Sprintf(withPeer, "node_selector = 7"), "bgp.peers[0].node_selector"},
		{fmt.Sprintf(withPeer, "source = 7"), "bgp.peers[0].source"},
		{"[l2]\nsecret_file = 7", "l2.secret_file"},
		{"[kubernetes]\nload_balancer_class = 7", "kubernetes.load_balancer_class"},
		{"[[pool]]\nname = 7\naddresses = [\"203.0.113.0/28\"]", "pool[0].name"},
		{"[[pool]]\nname = \"p\"\naddresses = [7]", "pool[0].addresses[0]"},
		{"[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.1-x\"]", "pool[0].addresses[0]"},
		{"[[pool]]\nname = \"p\"\naddresses = [\"x-203.0.113.1\"]", "pool[0].addresses[0]"},
		{pool + "namespaces = [7]", "pool[0].namespaces[0]"},
		{service + "pool = 7", "service[0].pool"},
		{service + "allow = [7]", "service[0].allow[0]"},
		{service + "affinity = 7", "service[0].affinity"},
		{service + "algorithm = 7", "service[0].algorithm"},
	} {
		_, err := Parse("steelyard.toml", []byte(c.text))
		errs, _ := err.(Errors)
		must.True(t, len(errs) == 1 && errs[0].Key == c.key, "%s: %v, want one error at %s", c.text, err, c.key)
	}
}

// A service with a pool and no address has the pool's announcers.
func TestServiceOfAPool(t *testing.T) {
	const text = "[bgp]\nasn = 64512\n[l2]\n" +
		"[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.0/28\"]\nannounce = [\"l2\"]\n" +
		"[[service]]\nname = \"s\"\npool = \"p\"\nports = [\"80\"]\nbackends = [%s]\n"
	s := mustParseText(t, fmt.Sprintf(text, `"10.0.0.1"`)).Services[0]
	must.True(t, s.Pool == "p" && len(s.Addresses) == 0 && slices.Equal(s.Announce, []lb.AnnouncerKind{lb.AnnounceL2}),
		"%+v", s)
	// The pool's addresses determine which families the backends may have.
	_, err := Parse("steelyard.toml", []byte(fmt.Sprintf(text, `"2001:db8::1"`)))
	must.True(t, err != nil, "an IPv6 backend of an IPv4 pool is accepted")
}

func TestCommunityText(t *testing.T) {
	for _, text := range []string{"64512:100", "0:0", "65535:65535", "64512:1:4294967295", "no-export", "blackhole"} {
		var c Community
		must.Row(t, text, nil, c.UnmarshalText([]byte(text)))
		must.Equal(t, text, string(must.Get(c.MarshalText())(t)))
	}
	for _, text := range []string{"", "1", "65536:1", "1:65536", "1:2:4294967296", "1:2:3:4", "-1:1", "no-exports"} {
		c, err := ParseCommunity(text)
		must.True(t, err != nil && c == (Community{}), "%s: %v, %v, want an error", text, c, err)
	}
}

func TestNodeSelectorNeedsKubernetes(t *testing.T) {
	text := fmt.Sprintf(withPeer, `node_selector = "rack=a"`) + "\n" + fmt.Sprintf(withService, "")
	got := mustParseText(t, text).Warnings
	must.True(t, len(got) == 1 &&
		strings.Contains(got[0], "6: bgp.peers[0].node_selector: has no effect without Kubernetes"), "warnings %q", got)
}

func TestCheckKeys(t *testing.T) {
	for keys, want := range map[string]bool{
		`type = "http", path = "/a"`: true, `type = "http", path = "a"`: false, `type = "http", path = "/a b"`: false,
		`type = "exec", path = "/a"`: true, `type = "exec", path = "a"`: false, `type = "exec"`: false,
		`type = "tcp", path = ""`: true, `type = "tcp", path = "/a"`: false, `type = "none", path = "/a"`: true,
		`type = "dns"`: false, `type = "dns", host = "a.example"`: true, `type = "http", host = "a_b:80"`: true,
		`type = "http", host = "192.0.2.1"`: true, `type = "http", host = "2001:db8::1"`: true,
		`type = "http", host = "[::1]:80"`: true, `type = "http", host = "a b"`: false,
		`type = "http", host = "-a"`: false, `type = "none", host = "a b"`: true,
		`type = "https", tls_server_name = "a"`: true, `type = "https", tls_server_name = "192.0.2.1"`: true,
		`type = "https", tls_server_name = "a b"`: false, `type = "http", tls_server_name = "a"`: false,
		`port = 0`: true, `port = 65535`: true, `port = -1`: false, `port = 65536`: false,
		`rise = 1`: true, `rise = 100`: true, `rise = 0`: false, `rise = 101`: false,
		`fall = 1`: true, `fall = 100`: true, `fall = 0`: false, `fall = 101`: false,
		`expect_status = "200-399"`: true, `expect_status = "200"`: false,
		`type = "http", expect_status = "200"`: true, `type = "none", expect_status = "200"`: true,
	} {
		text := fmt.Sprintf(withService, "check = { "+keys+" }")
		_, err := Parse("steelyard.toml", []byte(text))
		must.True(t, (err == nil) == want, "%s: %v, want accepted: %t", keys, err, want)
	}
}

// The contract: a literal copy of every key in DESIGN §9.
func TestSecondEdition(t *testing.T) {
	const text = `
[datapath]
snat_ports      = "1024-32767,61000-65535"
tunnel_key_file = ""

[bgp]
asn          = 64512
restart_time = "30s"
long_lived   = "10s"
max_routes   = 7

[[bgp.peers]]
address       = "192.0.2.1"
asn           = "external"
pools         = ["public"]
communities   = []
med           = 10
prepend       = 2
passive       = true
connect_retry = "5s"
keepalive     = "3s"
local_asn     = 64999
interface     = ""
bfd           = { interval = "100ms", multiplier = 3, multihop = false }

[[bgp.peers]]
address   = "192.0.2.2"
asn       = "internal"
local_asn = 64999

[l2]
probe_own = "15s"
spread_local = true

[[pool]]
name         = "public"
addresses    = ["203.0.113.0/28"]
communities  = []
local_pref   = 100
med          = 0
prepend      = 1
aggregate_v4 = 32
aggregate_v6 = 128
external_ips = false

[[service]]
name        = "s"
pool        = "public"
ports       = ["80"]
backends    = ["10.0.0.1"]
snat        = true
on_all_down = "withdraw"

[probe]
on_all_down = "keep"
hold        = "0s"
`
	c := mustParseText(t, text)
	must.True(t, c.BGP.LongLivedRestartTime == 10*time.Second && c.BGP.MaxRoutes == 7 && c.Pools[0].Prepend == 1,
		"%+v, %+v", c.BGP, c.Pools[0])
	p := c.BGP.Peers[0]
	must.True(t, p.External && p.ASN == 0 && p.Passive && p.ConnectRetry == 5*time.Second &&
		p.Keepalive == 3*time.Second && p.LocalASN == 64999, "%+v", p)
	p = c.BGP.Peers[1]
	must.True(t, !p.External && p.ASN == 64999, "an internal peer of another local AS: %+v", p)
}

// address_per_node causes a warning unless [l2] has several members and the service several addresses.
func TestAddressPerNode(t *testing.T) {
	const (
		head  = "[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.0/24\"]\n"
		tail  = "[[service]]\nname = \"s\"\nports = [\"80\"]\nbackends = [\"10.0.0.1\"]\naddress_per_node = true\n"
		on    = "[l2]\nmembers = [\"192.0.2.12\"]\nunencrypted = true\n"
		alone = "[l2]\n"
		pool  = "pool = \"p\"\n"
		two   = "address = [\"203.0.113.1\", \"203.0.113.2\"]\n"
		one   = "address = \"203.0.113.1\"\n"
	)
	for _, x := range []struct{ text, warning string }{
		{on + head + tail + pool, ""},
		{on + head + tail + two, ""},
		{alone + "[kubernetes]\n" + head + tail + two, ""},
		{"[bgp]\nasn = 1\n" + head + tail + pool, "[l2] does not announce"},
		{on + "[bgp]\nasn = 1\n" + head + "announce = [\"bgp\"]\n" + tail + pool, "[l2] does not announce"},
		{alone + head + tail + two, "without other members"},
		{alone + "[kubernetes]\n" + head + tail + pool, "without other members"},
		{on + head + tail + one, "with one address"},
	} {
		c := mustParseText(t, x.text)
		got := strings.Join(slices.DeleteFunc(slices.Clone(c.Warnings), func(w string) bool {
			return !strings.Contains(w, "address_per_node")
		}), "")
		must.True(t, c.Services[0].AddressPerNode && (got == "") == (x.warning == "") &&
			strings.Contains(got, x.warning), "%q: warnings %q; want %q", x.text, got, x.warning)
	}
}

// A subnet-router anycast address causes a warning if [l2] announces it.
func TestSubnetRouterAnycast(t *testing.T) {
	const service = "[[service]]\nname = \"s\"\nports = [\"80\"]\nbackends = [\"fd00::1\"]\naddress = \"%s\"\n"
	const both = "[bgp]\nasn = 1\n[l2]\n[[pool]]\nname = \"p\"\naddresses = [\"2001:db8::/48\"]\nannounce = [\"%s\"]\n"
	for _, x := range []struct {
		head, address string
		want          bool
	}{
		{"[l2]\n", "2001:db8::", true}, {"[l2]\n", "2001:db8:0:7::", true}, {"[l2]\n", "2001:db8::1", false},
		{"[l2]\n", "2001:db8::1:0:0:0", false}, {"[bgp]\nasn = 1\n", "2001:db8::", false},
		{fmt.Sprintf(both, "bgp"), "2001:db8::", false}, {fmt.Sprintf(both, "l2"), "2001:db8::", true},
	} {
		c := mustParseText(t, x.head+fmt.Sprintf(service, x.address))
		got := strings.Contains(strings.Join(c.Warnings, ""), "subnet-router anycast")
		must.True(t, got == x.want, "%s%s: warnings %q", x.head, x.address, c.Warnings)
	}
}

func TestTunnelKeyFile(t *testing.T) {
	const a, b, c, d = "aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", "cccccccccccccccc", "dddddddddddddddd"
	for _, tt := range []struct{ text, keys, seed, err string }{
		{a, a, "", ""},
		{a + "\n", a, "", ""},
		{"  " + a + " \r\n\r\n# the next one\n" + b, a + " " + b, "", ""},
		{a + "\n" + b + "\n" + c + "\n", a + " " + b + " " + c, "", ""},
		{a + "\nseed: " + d + "\n" + b, a + " " + b, d, ""},
		{"seed:" + d + "\n" + a, a, d, ""},
		{a + "\n" + b + "\n" + c + "\n" + d, "", "", "k, line 4: is one key too many; at most 3"},
		{a + "\nshort", "", "", "k, line 2: has only 5 bytes; write at least 16"},
		{a + "\nseed: short", "", "", "k, line 2: has only 5 bytes"},
		{a + "\nseed: " + d + "\nseed: " + c, "", "", "k, line 3: is a second seed"},
		{"seed: " + d + "\n", "", "", "k has no key"},
		{a + "\nSeed: " + d, "", "", `k, line 2: begins with a word and a colon, but not with "seed:"; write "seed:"`},
		{a + "\nsed:\t" + d, "", "", "k, line 2: begins with a word"},
		{"correct-horse:battery: staple\n" + a, "correct-horse:battery: staple " + a, "", ""}, // a passphrase
		{"# " + a + "\n\n", "", "", "k has no key"},
		{"", "", "", "k has no key"},
		{a + "\xff", "", "", "k is not text"},
		{a + "\x00", "", "", "k is not text"},
	} {
		dir := t.TempDir()
		must.Do(t, os.WriteFile(filepath.Join(dir, "k"), []byte(tt.text), 0o600))
		cfg, err := Parse(filepath.Join(dir, "steelyard.toml"), []byte("[datapath]\ntunnel_key_file = \"k\"\n"))
		if tt.err != "" {
			must.True(t, err != nil && strings.Contains(err.Error(), tt.err) && !strings.Contains(err.Error(), a),
				"%q: error %v; want %q and no key", tt.text, err, tt.err)
			continue
		}
		if err != nil {
			t.Errorf("%q: %v", tt.text, err)
			continue
		}
		var keys []string
		for _, k := range cfg.Datapath.TunnelKeys {
			keys = append(keys, k.Reveal())
		}
		got := strings.Join(keys, " ")
		must.True(t, got == tt.keys && cfg.Datapath.HashSeed.Reveal() == tt.seed,
			"%q: keys %q, seed %q; want %q and %q", tt.text, got, cfg.Datapath.HashSeed.Reveal(), tt.keys, tt.seed)
	}
}

// A key that GUE sends to none of a service's servers causes a warning.
func TestKeysWithoutTunnelSources(t *testing.T) {
	file := filepath.Join(t.TempDir(), "k")
	must.Do(t, os.WriteFile(file, []byte("aaaaaaaaaaaaaaaa\n"), 0o600))
	const warning = `service[0].tunnel (service "s"): this machine sends no token to any of ` +
		`the service's backends, although it has keys; add the backends that run Steelyard to ` +
		`datapath.tunnel_sources here as well`
	const gue = "forward = \"tunnel\"\ntunnel = \"gue\""
	keys := fmt.Sprintf("tunnel_key_file = %q\n", file)
	for _, tt := range []struct{ datapath, service, want string }{
		{keys, gue, warning},
		{keys + `tunnel_sources = ["192.0.2.11"]`, gue, warning},
		{keys + `tunnel_sources = ["10.0.0.2"]`, gue, ""},
		{keys, `forward = "tunnel"`, "has no effect without tunnels"},
		{"", gue, ""},
	} {
		got := mustParseText(t, "[datapath]\n"+tt.datapath+"\n"+fmt.Sprintf(withPeer, "")+
			fmt.Sprintf(withService, tt.service)).Warnings
		if len(got) > 1 || (len(got) == 0) != (tt.want == "") || !strings.Contains(strings.Join(got, ""), tt.want) {
			t.Errorf("%s, %s: warnings %q; want %q", tt.datapath, tt.service, got, tt.want)
		}
	}
}
