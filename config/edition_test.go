package config

import (
	"testing"
	"time"
)

// The contract: every key of DESIGN §9, as it stands there.
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
	if c.BGP.LongLivedRestartTime != 10*time.Second || c.BGP.MaxRoutes != 7 || c.Pools[0].Prepend != 1 {
		t.Errorf("%+v, %+v", c.BGP, c.Pools[0])
	}
	p := c.BGP.Peers[0]
	if !p.External || p.ASN != 0 || !p.Passive || p.ConnectRetry != 5*time.Second || p.Keepalive != 3*time.Second ||
		p.LocalASN != 64999 {
		t.Errorf("%+v", p)
	}
	if p := c.BGP.Peers[1]; p.External || p.ASN != 64999 {
		t.Errorf("an internal peer of another local AS: %+v", p)
	}
}
