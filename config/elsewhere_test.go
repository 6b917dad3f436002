package config

import (
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A configuration of another machine, with all keys that name secrets, is valid without these files.
func TestElsewhere(t *testing.T) {
	text := `[datapath]
tunnel_key_file = "/nowhere/tunnel.key"
[bgp]
asn = 64512
peers = [{ address = "192.0.2.1", asn = 64500, password_file = "/nowhere/peer.key" }]
[l2]
members = ["192.0.2.12"]
secret_file = "/nowhere/gossip.key"
[admin]
listen = "192.0.2.11:9911"
token_file = "/nowhere/token"
tls_cert_file = "/nowhere/tls.crt"
tls_key_file = "/nowhere/tls.key"
[[service]]
name = "web"
address = "203.0.113.10"
ports = ["443/tcp"]
backends = ["10.0.0.1"]
forward = "tunnel"
check = { type = "https", host = "www.example.com", tls_ca_file = "/nowhere/ca.pem" }
`
	c := must.Get(ParseElsewhere("steelyard.toml", []byte(text)))(t)
	said := strings.Join(c.Warnings, "\n")
	for _, name := range []string{"tunnel.key", "peer.key", "gossip.key", "token", "tls.key", "ca.pem"} {
		if !strings.Contains(said, "/nowhere/"+name+" is not on this machine: its content is not checked") {
			t.Errorf("%s is not named in the warnings:\n%s", name, said)
		}
	}
	_, err := Parse("steelyard.toml", []byte(text))
	if err == nil || strings.Count(err.Error(), "cannot be read") != 6 {
		t.Errorf("here: %v; want an error about each of 6 files", err)
	}
}
