package bgp

import (
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Peers of a range are forgotten some time after their session, and there are not too many of them.
func TestDynamicPeers(t *testing.T) {
	o := validOptions()
	all := netip.MustParsePrefix("10.0.0.0/8")
	o.Peers = []Peer{
		{ListenRange: all, ASN: 64500}, {ListenRange: netip.MustParsePrefix("10.1.0.0/16"), ASN: 64501},
		{Address: netip.MustParseAddr("10.0.0.1"), ASN: 64502},
	}
	s := must.Get(New(o))(t)
	for addr, asn := range map[string]uint32{"10.0.0.2": 64500, "10.1.0.1": 64501} {
		a := netip.MustParseAddr(addr)
		if !s.connected(a) || s.sessions[a] == nil || s.sessions[a].peer.ASN != asn {
			t.Errorf("%s is not a peer of AS %d: %+v", a, asn, s.sessions[a])
		}
	}
	if s.connected(netip.MustParseAddr("192.0.2.1")) {
		t.Error("an address of no range is a peer")
	}
	a := netip.MustParseAddr("10.2.0.0")
	for len(s.dynamic) < maxDynamic {
		if a = a.Next(); !s.connected(a) {
			t.Fatalf("%v is refused with %d peers", a, len(s.dynamic))
		}
	}
	if s.connected(a.Next()) {
		t.Errorf("more than %d peers", maxDynamic)
	}
	s.forgetDynamic()
	if len(s.dynamic) != maxDynamic {
		t.Errorf("%d peers, want %d", len(s.dynamic), maxDynamic)
	}
	for _, n := range s.sessions {
		n.disconnectedAt = time.Now().Add(-dynamicIdle - time.Second)
	}
	s.sessions[a].attached = true
	s.forgetDynamic()
	if len(s.dynamic) != 1 || len(s.sessions) != 2 || s.sessions[netip.MustParseAddr("10.0.0.1")] == nil {
		t.Errorf("%d peers of ranges and %d sessions, want the connected one and the configured one", len(s.dynamic),
			len(s.sessions))
	}
}
