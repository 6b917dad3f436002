package preflight

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// lan is a machine with one address.
type lan struct{}

func (lan) Taken(a netip.Addr) string {
	if a == netip.MustParseAddr("192.0.2.11") {
		return "the address of eth0"
	}
	return ""
}

func (lan) OnLink(a netip.Addr) string {
	if netip.MustParsePrefix("192.0.2.0/24").Contains(a) {
		return "eth0"
	}
	return ""
}

func (n lan) NoHost(a netip.Addr) string { return n.Taken(a) }

func (n lan) Own(a netip.Addr) bool { return n.Taken(a) != "" }

func (n lan) TakenIn(r lb.AddrRange) (netip.Addr, string) {
	a := netip.MustParseAddr("192.0.2.11")
	if r.Contains(a) {
		return a, n.Taken(a)
	}
	return netip.Addr{}, ""
}

// Addresses of the machine are found in services and in pools, with the line.
func TestTaken(t *testing.T) {
	const text = `[bgp]
asn = 64512
[[pool]]
name = "p"
addresses = ["203.0.113.0/28", "192.0.2.0/24"]
[[service]]
name = "web"
address = "192.0.2.11"
ports = ["80"]
backends = ["10.0.0.1"]
[[service]]
name = "mail"
address = ["192.0.2.12",
  "192.0.2.11"]
ports = ["25"]
backends = ["10.0.0.1"]
`
	_, err := config.Parse("f", []byte(text), Taken(lan{}, (*config.Report).Errorf))
	want := []string{
		"f:5: pool[0].addresses[1] (pool \"p\"): has 192.0.2.11, which is the address of eth0; leave it out",
		"f:8: service[0].address (service \"web\"): 192.0.2.11 is the address of eth0; use another address",
		"f:14: service[1].address[1] (service \"mail\"): 192.0.2.11 is the address of eth0; use another address",
	}
	must.Need(t, err != nil && len(strings.Split(err.Error(), "\n")) == len(want), "%v", err)
	for i, line := range strings.Split(err.Error(), "\n") {
		must.True(t, strings.HasPrefix(line, want[i]), "%s; want %s", line, want[i])
	}
	cfg, err := config.Parse("f", []byte(text), Taken(lan{}, (*config.Report).Warnf))
	if err != nil || len(cfg.Warnings) != len(want)+1 { // and [bgp] without peers
		t.Errorf("as warnings: %v, %q", err, cfg.Warnings)
	}
}

// A peer cannot have an address of the machine, unless it is another daemon there.
func TestNoPeers(t *testing.T) {
	const text = `[bgp]
asn = 64512
%s[[bgp.peers]]
address = "192.0.2.1"
asn = 64500
[[bgp.peers]]
asn = 64500
address = "192.0.2.11"
`
	const want = "f:8: bgp.peers[1].address: 192.0.2.11 is the address of eth0; write the router's address"
	_, err := config.Parse("f", []byte(fmt.Sprintf(text, "")), NoPeers(lan{}, (*config.Report).Errorf))
	must.True(t, err != nil && strings.HasPrefix(err.Error(), want) && !strings.Contains(err.Error(), "\n"),
		"%v; want %s", err, want)
	for _, daemon := range []string{"listen_port = -1\n", "listen_port = 1179\n"} {
		text := []byte(fmt.Sprintf(text, daemon))
		_, err := config.Parse("f", text, NoPeers(lan{}, (*config.Report).Errorf))
		must.True(t, err == nil, "%s: %v", daemon, err)
	}
}
