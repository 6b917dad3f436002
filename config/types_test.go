package config

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
)

// A number where a text is expected is one error at that key, whatever the key is.
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
		if len(errs) != 1 || errs[0].Key != c.key {
			t.Errorf("%s: %v, want one error at %s", c.text, err, c.key)
		}
	}
}

// A service with a pool and no address has the announcers of the pool.
func TestServiceOfAPool(t *testing.T) {
	const text = "[bgp]\nasn = 64512\n[l2]\n" +
		"[[pool]]\nname = \"p\"\naddresses = [\"203.0.113.0/28\"]\nannounce = [\"l2\"]\n" +
		"[[service]]\nname = \"s\"\npool = \"p\"\nports = [\"80\"]\nbackends = [%s]\n"
	s := mustParseText(t, fmt.Sprintf(text, `"10.0.0.1"`)).Services[0]
	if s.Pool != "p" || len(s.Addresses) > 0 || !slices.Equal(s.Announce, []lb.AnnouncerKind{lb.AnnounceL2}) {
		t.Errorf("%+v", s)
	}
	// The addresses of the pool decide which families the backends may have.
	if _, err := Parse("steelyard.toml", []byte(fmt.Sprintf(text, `"2001:db8::1"`))); err == nil {
		t.Error("an IPv6 backend of an IPv4 pool is accepted")
	}
}

func TestCommunityText(t *testing.T) {
	for _, text := range []string{"64512:100", "0:0", "65535:65535", "64512:1:4294967295", "no-export", "blackhole"} {
		var c Community
		if err := c.UnmarshalText([]byte(text)); err != nil {
			t.Errorf("%s: %v", text, err)
		}
		if got, err := c.MarshalText(); err != nil || string(got) != text {
			t.Errorf("%s becomes %s, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "1", "65536:1", "1:65536", "1:2:4294967296", "1:2:3:4", "-1:1", "no-exports"} {
		if c, err := ParseCommunity(text); err == nil || c != (Community{}) {
			t.Errorf("%s: %v, %v, want an error", text, c, err)
		}
	}
}

func TestNodeSelectorNeedsKubernetes(t *testing.T) {
	text := fmt.Sprintf(withPeer, `node_selector = "rack=a"`) + "\n" + fmt.Sprintf(withService, "")
	got := mustParseText(t, text).Warnings
	if len(got) != 1 || !strings.Contains(got[0], "6: bgp.peers[0].node_selector: has no effect without Kubernetes") {
		t.Errorf("warnings %q", got)
	}
}
