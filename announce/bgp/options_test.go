package bgp

import (
	"log/slog"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func validOptions() Options {
	return Options{ASN: 64512, RouterID: netip.MustParseAddr("192.0.2.11"), Log: slog.New(slog.DiscardHandler)}
}

func validPeer() Peer { return Peer{Address: netip.MustParseAddr("192.0.2.1"), ASN: 64500} }

func TestDefaults(t *testing.T) {
	o := validOptions()
	o.Peers = []Peer{validPeer()}
	got := must.Get(o.withDefaults())(t)
	if got.ListenPort != 179 || got.LocalPref != 0 || got.AggregateV4 != 32 || got.AggregateV6 != 128 {
		t.Errorf("defaults %+v", got)
	}
	p := got.Peers[0]
	if got.RestartTime != 30*time.Second || p.Port != 179 || p.HoldTime != 0 {
		t.Errorf("defaults %+v", got)
	}
	o.ListenPort, o.Peers[0].Port, o.Peers[0].HoldTime = -1, 1179, 9*time.Second
	got, err := o.withDefaults()
	if err != nil || got.ListenPort != -1 || !reflect.DeepEqual(got.Peers[0], o.Peers[0]) {
		t.Errorf("configured values were replaced: %+v, %v", got, err)
	}
}

// The first and last accepted value of each range, and the values next to them.
func TestOptionRanges(t *testing.T) {
	addr := netip.MustParseAddr
	for _, row := range []struct {
		name string
		set  func(o *Options, p *Peer)
		ok   bool
	}{
		{"device", func(_ *Options, p *Peer) { p.Device = "red" }, true},
		{"device, interface", func(_ *Options, p *Peer) {
			p.Device, p.Interface, p.Address = "red", "eth0", netip.Addr{}
		}, false},
		{"device, zone", func(_ *Options, p *Peer) { p.Device, p.Address = "red", addr("fe80::1%eth0") }, false},
		{"listen port -2", func(o *Options, _ *Peer) { o.ListenPort = -2 }, false},
		{"listen port 65535", func(o *Options, _ *Peer) { o.ListenPort = 65535 }, true},
		{"listen port 65536", func(o *Options, _ *Peer) { o.ListenPort = 65536 }, false},
		{"aggregate_v4 1", func(o *Options, _ *Peer) { o.AggregateV4 = 1 }, true},
		{"aggregate_v4 -1", func(o *Options, _ *Peer) { o.AggregateV4 = -1 }, false},
		{"aggregate_v4 33", func(o *Options, _ *Peer) { o.AggregateV4 = 33 }, false},
		{"aggregate_v6 1", func(o *Options, _ *Peer) { o.AggregateV6 = 1 }, true},
		{"aggregate_v6 129", func(o *Options, _ *Peer) { o.AggregateV6 = 129 }, false},
		{"restart time 1s", func(o *Options, _ *Peer) { o.RestartTime = time.Second }, true},
		{"restart time 1.5s", func(o *Options, _ *Peer) { o.RestartTime = 1500 * time.Millisecond }, false},
		{"restart time 4095s", func(o *Options, _ *Peer) { o.RestartTime = 4095 * time.Second }, true},
		{"restart time 4096s", func(o *Options, _ *Peer) { o.RestartTime = 4096 * time.Second }, false},
		{"router id 0.0.0.0", func(o *Options, _ *Peer) { o.RouterID = addr("0.0.0.0") }, false},
		{"IPv4 next hop", func(o *Options, _ *Peer) { o.NextHopV4 = addr("192.0.2.11") }, true},
		{"IPv6 next hop", func(o *Options, _ *Peer) { o.NextHopV6 = addr("2001:db8::11") }, true},
		{"IPv6 next hop is IPv4", func(o *Options, _ *Peer) { o.NextHopV6 = addr("192.0.2.11") }, false},
		{"IPv6 next hop is mapped", func(o *Options, _ *Peer) { o.NextHopV6 = addr("::ffff:192.0.2.11") }, false},
		{"no hold time", func(_ *Options, p *Peer) { p.HoldTime = 0 }, true},
		{"hold time 3s", func(_ *Options, p *Peer) { p.HoldTime = 3 * time.Second }, true},
		{"hold time 2s", func(_ *Options, p *Peer) { p.HoldTime = 2 * time.Second }, false},
		{"hold time 3.5s", func(_ *Options, p *Peer) { p.HoldTime = 3500 * time.Millisecond }, false},
		{"hold time 65535s", func(_ *Options, p *Peer) { p.HoldTime = 65535 * time.Second }, true},
		{"hold time 65536s", func(_ *Options, p *Peer) { p.HoldTime = 65536 * time.Second }, false},
		{"multihop -1", func(_ *Options, p *Peer) { p.Multihop = -1 }, false},
		{"multihop 255", func(_ *Options, p *Peer) { p.Multihop = 255 }, true},
		{"multihop 256", func(_ *Options, p *Peer) { p.Multihop = 256 }, false},
		{"password of 80 bytes", func(_ *Options, p *Peer) { p.Password = strings.Repeat("x", 80) }, true},
		{"password of 81 bytes", func(_ *Options, p *Peer) { p.Password = strings.Repeat("x", 81) }, false},
		{"unspecified peer", func(_ *Options, p *Peer) { p.Address = addr("0.0.0.0") }, false},
		{"multicast peer", func(_ *Options, p *Peer) { p.Address = addr("224.0.0.1") }, false},
		{"mapped peer", func(_ *Options, p *Peer) { p.Address = addr("::ffff:192.0.2.1") }, false},
		{"link-local peer with zone", func(_ *Options, p *Peer) { p.Address = addr("fe80::1%eth0") }, true},
		{"link-local peer without zone", func(_ *Options, p *Peer) { p.Address = addr("fe80::1") }, false},
		{"IPv4 link-local peer", func(_ *Options, p *Peer) { p.Address = addr("169.254.0.1") }, true},
		{"source of the family", func(_ *Options, p *Peer) { p.Source = addr("192.0.2.11") }, true},
		{"source of the other family", func(_ *Options, p *Peer) { p.Source = addr("2001:db8::11") }, false},
	} {
		o, p := validOptions(), validPeer()
		row.set(&o, &p)
		o.Peers = []Peer{p}
		if _, err := o.withDefaults(); (err == nil) != row.ok {
			t.Errorf("%s: error %v, want accepted: %t", row.name, err, row.ok)
		}
	}
}

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
