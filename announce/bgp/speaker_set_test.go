package bgp

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// withServer returns a speaker whose gobgp has no peer and does not listen.
func withServer(t *testing.T, log *strings.Builder) (*Speaker, *session, *bgpServer) {
	t.Helper()
	s, p := newTestSpeaker(t, log)
	srv := must.Get(s.startServer(t.Context(), false))(t)
	s.server = srv
	return s, p, srv
}

// Set waits until withdrawals are written to every session, but at most 2 s. Then it logs how many are left.
func TestSetWaitsForWithdrawals(t *testing.T) {
	written := &guard.Update{Withdrawn: []netip.Prefix{netip.MustParsePrefix("203.0.113.1/32")}}
	for _, row := range []struct {
		name    string
		set     []lb.Announcement
		written bool // after 1 s
		took    time.Duration
		log     string
	}{
		{"no withdrawal", announce("203.0.113.1", 1, "203.0.113.2", 1), false, 0, ""},
		{"written", announce("203.0.113.2", 1), true, time.Second, ""},
		{"not written", announce("203.0.113.2", 1), false, 2 * time.Second,
			`level=WARN msg="withdrawals not confirmed" routes=1 after=2s`},
		{"one of two written", nil, true, 2 * time.Second, "routes=1 after=2s"},
	} {
		synctest.Test(t, func(t *testing.T) {
			var out strings.Builder
			s, p, srv := withServer(t, &out)
			defer srv.stop()
			must.Do(t, s.Set(t.Context(), announce("203.0.113.1", 1, "203.0.113.2", 1)))
			peer := p.peer.Address
			s.withdrawals.peerUp(peer, isIPv4)
			if row.written {
				time.AfterFunc(time.Second, func() { s.withdrawals.sent(peer, written) })
			}
			out.Reset()
			began := time.Now()
			must.Do(t, s.Set(t.Context(), row.set))
			must.Row(t, row.name, row.took, time.Since(began))
			wantLogged(t, row.name, out.String(), row.log)
			must.Row(t, row.name, len(row.set), len(s.installed))
		})
	}
}

// endsAfter is a context whose Err is nil for the first n calls.
type endsAfter struct {
	context.Context
	n *int
}

func (c endsAfter) Err() error {
	if *c.n--; *c.n >= 0 {
		return nil
	}
	return context.Canceled
}

// Set stops when its context ends, and reports how many routes it has not changed. It checks after every 256 routes.
func TestSetStopsWhenItsContextEnds(t *testing.T) {
	all := make([]lb.Announcement, 600)
	for i := range all {
		all[i] = lb.Announcement{VIP: netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}), Weight: 1}
	}
	for checks, left := range []int{600, 344, 88, 0} {
		var out strings.Builder
		s, _, srv := withServer(t, &out)
		want := fmt.Sprintf("change routes: %d of 600 not changed: context canceled", left)
		if left == 0 {
			want = ""
		}
		must.Row(t, checks, want, errText(s.Set(endsAfter{t.Context(), &checks}, all)))
		must.Row(t, "routes installed", 600-left, len(s.installed))
		must.Do(t, s.Set(t.Context(), all))
		must.Row(t, "after the next Set", 600, len(s.installed))
		srv.stop()
	}
}

// post never blocks and keeps the wake-up until it is received, and take returns each event once.
func TestMailbox(t *testing.T) {
	s, _ := newTestSpeaker(t, new(strings.Builder))
	for _, state := range []guard.State{"a", "b"} {
		s.mail.post(guard.Event{New: state})
	}
	must.Row(t, "wake-ups", 1, len(s.mail.wake))
	got := s.mail.take()
	must.True(t, len(got) == 2 && got[0].New == "a" && got[1].New == "b", "events %+v", got)
	got = s.mail.take()
	must.True(t, len(got) == 0, "the same events again: %+v", got)
}

func TestPeersAreSorted(t *testing.T) {
	o := validOptions()
	for _, a := range []string{"192.0.2.3", "2001:db8::1", "192.0.2.1", "192.0.2.2"} {
		o.Peers = append(o.Peers, Peer{Address: netip.MustParseAddr(a), ASN: 64500})
	}
	s := must.Get(New(o))(t)
	var got []string
	for _, p := range s.Peers() {
		got = append(got, p.Peer.String())
	}
	must.Equal(t, []string{"192.0.2.1", "192.0.2.2", "192.0.2.3", "2001:db8::1"}, got)
}

func validOptions() Options {
	return Options{ASN: 64512, RouterID: netip.MustParseAddr("192.0.2.11"), Log: slog.New(slog.DiscardHandler)}
}

func validPeer() Peer { return Peer{Address: netip.MustParseAddr("192.0.2.1"), ASN: 64500} }

func TestDefaults(t *testing.T) {
	o := validOptions()
	o.Peers = []Peer{validPeer()}
	got := must.Get(o.withDefaults())(t)
	must.True(t, got.ListenPort == 179 && got.LocalPref == 0 && got.AggregateV4 == 32 && got.AggregateV6 == 128,
		"defaults %+v", got)
	p := got.Peers[0]
	must.True(t, got.RestartTime == 30*time.Second && p.Port == 179 && p.HoldTime == 0, "defaults %+v", got)
	o.ListenPort, o.Peers[0].Port, o.Peers[0].HoldTime = -1, 1179, 9*time.Second
	got, err := o.withDefaults()
	must.True(t, err == nil && got.ListenPort == -1 && reflect.DeepEqual(got.Peers[0], o.Peers[0]),
		"configured values were replaced: %+v, %v", got, err)
}

// Each range accepts its limits, but not the values beyond them.
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
		_, err := o.withDefaults()
		must.True(t, (err == nil) == row.ok, "%s: error %v, want accepted: %t", row.name, err, row.ok)
	}
}

// Peers in a range are removed some time after their session, and their number is limited.
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
		must.True(t, s.connected(a) && s.sessions[a] != nil && s.sessions[a].peer.ASN == asn,
			"%s is not a peer of AS %d: %+v", a, asn, s.sessions[a])
	}
	must.True(t, !s.connected(netip.MustParseAddr("192.0.2.1")), "an address of no range is a peer")
	a := netip.MustParseAddr("10.2.0.0")
	for len(s.dynamic) < maxDynamic {
		a = a.Next()
		must.Need(t, s.connected(a), "%v is refused with %d peers", a, len(s.dynamic))
	}
	must.True(t, !s.connected(a.Next()), "more than %d peers", maxDynamic)
	s.forgetDynamic()
	must.Row(t, "peers", maxDynamic, len(s.dynamic))
	for _, n := range s.sessions {
		n.disconnectedAt = time.Now().Add(-dynamicIdle - time.Second)
	}
	s.sessions[a].attached = true
	s.forgetDynamic()
	must.True(t, len(s.dynamic) == 1 && len(s.sessions) == 2 && s.sessions[netip.MustParseAddr("10.0.0.1")] != nil,
		"%d peers of ranges and %d sessions, want the connected one and the configured one",
		len(s.dynamic), len(s.sessions))
}
