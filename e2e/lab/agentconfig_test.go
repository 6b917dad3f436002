package lab_test

import (
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Package config must read back every field of AgentConfig.
func TestAgentConfigIsWhatTheAgentReads(t *testing.T) {
	node := lab.Node{V4: netip.MustParseAddr("192.0.2.11"), Gateway4: netip.MustParseAddr("192.0.2.1")}
	text := lab.AgentConfig{
		Name: "lb1", Address: node.V4, Interfaces: []string{"eth0"}, Mode: "tc", ASN: 64512, ListenPort: 1790,
		Peers: []lab.AgentPeer{{Address: node.Gateway4, ASN: 64500, HoldTime: 3 * time.Second, Extra: "multihop = 2"}},
		L2:    []string{"eth0"},
		Services: []lab.AgentService{{
			Name: "web", Addresses: []netip.Addr{netip.MustParseAddr("203.0.113.1")}, Ports: []string{"80:8080"},
			MinHealthy: 2,
			Algorithm:  "round-robin", Forward: "nat", Extra: `affinity = "1m"`,
			Backends: []lab.AgentBackend{
				{Address: netip.MustParseAddr("192.0.2.21"), Port: 9000, Weight: 3, Drain: true},
				{Address: netip.MustParseAddr("192.0.2.22")},
			},
			Check: lab.AgentCheck{
				Type: "http", Path: "/healthz", Port: 81,
				Interval: 200 * time.Millisecond, Timeout: 150 * time.Millisecond, Rise: 1, Fall: 2,
			},
		}},
		LogLevel: "debug", Extra: "[admin]\nlisten = \"127.0.0.1:9911\"",
	}.TOML()
	c, err := config.Parse("lab.toml", []byte(text))
	must.Need(t, err == nil, "%v in\n%s", err, text)
	if c.Node.Name != "lb1" || c.Node.Address != node.V4 || len(c.Services) != 1 || c.BGP == nil ||
		len(c.BGP.Peers) != 1 || c.L2 == nil {
		t.Errorf("fields are missing in\n%s", text)
	}
	s := c.Services[0]
	if len(s.Backends) != 2 || !s.Backends[0].Drain || s.Backends[0].Weight != 3 ||
		s.Check.Interval != 200*time.Millisecond || s.Check.Port != 81 || s.MinHealthy != 2 ||
		s.Affinity != time.Minute {
		t.Errorf("fields of the service are missing: %+v", s)
	}
	p := c.BGP.Peers[0]
	must.True(t, p.HoldTime == 3*time.Second && p.Multihop == 2 && c.BGP.ListenPort == 1790, "%+v", c.BGP)
}
