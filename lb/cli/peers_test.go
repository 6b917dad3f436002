package cli

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Two commands have the flag --peer.
func TestPeerFlag(t *testing.T) {
	socket := serve(t, lb.Status{})
	for command, want := range map[string]string{
		"peers": "peer 192.0.2.1, AS 64500 state active for -, sessions that ended: 0 reason connection refused",
		"routes": "PREFIX NEXT HOP AS PATH MED LOCAL PREF COMMUNITIES BANDWIDTH SINCE " +
			"203.0.113.10/32 192.0.2.2 64512 64512 0 - no-export,64512:1:2 3 Gbit/s -",
	} {
		for _, tt := range []struct {
			peer, want, problem string
			code                int
		}{
			{"192.0.2.1", want, "", 0},
			{"192.0.2.9", "", "there is no BGP peer 192.0.2.9", 1},
			{"router", "", "--peer router: want an address", 2},
		} {
			code, out, errOut := steelyard(t, command, "--peer", tt.peer, "--socket", socket)
			words := strings.Join(strings.Fields(out), " ")
			if code != tt.code || words != tt.want || !strings.Contains(errOut, tt.problem) {
				t.Errorf("%s --peer %s: code %d, stderr %q, stdout:\n%s", command, tt.peer, code, errOut, out)
			}
		}
	}
}

// The details of an established session, and of one without all that is optional.
func TestDetailsOfASession(t *testing.T) {
	ago := func(d time.Duration) time.Time { return time.Now().Add(-d) }
	p := lb.PeerStatus{
		Peer: addr("fe80::1%eth0"), ASN: 64500, State: "established", Routes: 3, Since: ago(90 * time.Minute), Flaps: 1,
		Received: 2, BFD: "up", Errors: []lb.PeerError{{At: ago(91 * time.Minute), Text: "bfd session down"}},
		Session: &lb.PeerSession{
			Local: addr("fe80::2%eth0"), LocalASN: 64512, RouterID: addr("192.0.2.1"), Hold: 9, Keepalive: 3,
			Families: []string{"ipv4", "ipv6"}, ExtendedNextHop: true, Restart: 30, LongLived: 3600,
			Sent:     lb.PeerMessages{Messages: 40, Updates: 4, Last: ago(2 * time.Second)},
			Received: lb.PeerMessages{Messages: 39, Updates: 1, Last: ago(time.Second)},
		},
	}
	const full = `peer         fe80::1%eth0, AS 64500
state        established for 1h30m, sessions that ended: 1
router ID    192.0.2.1
this node    fe80::2%eth0, AS 64512
families     ipv4, ipv6; IPv6 next hops of IPv4 routes
hold time    9s, keepalive 3s
routes kept  30s by graceful restart, 1h0m0s by long-lived graceful restart
sent         40 messages, 4 updates, the last 2s ago; 3 routes
received     39 messages, 1 updates, the last 1s ago; 2 routes, discarded
bfd          up
error        1h31m ago: bfd session down
`
	s := *p.Session
	s.Families, s.ExtendedNextHop, s.Hold, s.Keepalive, s.Restart, s.LongLived = []string{"ipv4"}, false, 0, 0, 0, 0
	plain := p
	plain.Session, plain.BFD, plain.Errors = &s, "", nil
	for want, p := range map[string]lb.PeerStatus{
		full: p,
		strings.NewReplacer("ipv4, ipv6; IPv6 next hops of IPv4 routes", "ipv4",
			"9s, keepalive 3s", "none, keepalive none", "30s by", "not by", "1h0m0s by", "not by",
			"bfd          up\n", "", "error        1h31m ago: bfd session down\n", "").Replace(full): plain,
	} {
		answer := must.Get(json.Marshal([]lb.PeerStatus{p}))(t)
		var out strings.Builder
		if err := peerDetails(&out, answer); err != nil || out.String() != want {
			t.Errorf("%v:\n%s\nwant:\n%s", err, out.String(), want)
		}
	}
}
