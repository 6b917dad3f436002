package bgp

import (
	"errors"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	api "github.com/osrg/gobgp/v3/api"
)

func TestReason(t *testing.T) {
	now := time.Now()
	peer := Peer{Address: netip.MustParseAddr("192.0.2.1"), Port: 179}
	const fault = "received NOTIFICATION: x"
	refused := os.NewSyscallError("connect", syscall.ECONNREFUSED)
	since := now.Add(-10 * time.Second)
	for _, row := range []struct {
		name string
		e    session
		want string
	}{
		{"new", session{state: "idle"}, ""},
		{"refused", session{disconnectedAt: since, dialErr: refused},
			"no TCP connection to 192.0.2.1:179 for 10s: connection refused"},
		{"no response", session{disconnectedAt: since, dialErr: os.ErrDeadlineExceeded, md5Dropped: 1 << 60},
			"no TCP connection to 192.0.2.1:179 for 10s: " +
				"no response; if the peer is up, check the password (MD5) on both sides"},
		{"no response, no new drops",
			session{disconnectedAt: since, dialErr: syscall.ETIMEDOUT, md5Dropped: md5Dropped()},
			"no TCP connection to 192.0.2.1:179 for 10s: " +
				"no response; if the peer is up, check the password (MD5) on both sides"},
		{"refused after a fault", session{disconnectedAt: now, dialErr: refused, fault: fault, faultAt: since},
			"no TCP connection to 192.0.2.1:179 for 0s: connection refused; before that: " + fault},
		{"refused a minute after a fault",
			session{disconnectedAt: now, dialErr: refused, fault: fault, faultAt: now.Add(-time.Minute)},
			"no TCP connection to 192.0.2.1:179 for 0s: connection refused; before that: " + fault},
		{"fault", session{state: "idle", fault: fault}, fault},
		{"up", session{state: "established", fault: "old", dialErr: errors.New("old"), has6: true}, ""},
		{"up without IPv6 next hop",
			session{state: "established", has6: true, nextHops: nextHops{reason6: "r6", reason4: "r4"}}, "r6"},
		{"up without IPv4 next hop",
			session{state: "established", has4: true, nextHops: nextHops{reason6: "r6", reason4: "r4"}}, "r4"},
	} {
		row.e.peer = peer
		if got := row.e.reason(now); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}

func TestCarries(t *testing.T) {
	v4, v6 := netip.IPv4Unspecified(), netip.IPv6Unspecified()
	for _, row := range []struct {
		name   string
		n      session
		c4, c6 bool
		routes int // of 10 IPv4 and 1 IPv6 route
	}{
		{"both", session{has4: true, has6: true, nextHops: nextHops{session4: true, addr6: v6}}, true, true, 11},
		{"both over IPv6", session{has4: true, has6: true, nextHops: nextHops{session6: true, addr4: v4}},
			true, true, 11},
		{"IPv4 negotiated", session{has4: true, nextHops: nextHops{session4: true, addr6: v6}}, true, false, 10},
		{"IPv6 negotiated", session{has6: true, nextHops: nextHops{session4: true, addr6: v6}}, false, true, 1},
		{"no IPv6 next hop", session{has4: true, has6: true, nextHops: nextHops{session4: true}}, true, false, 10},
		{"no IPv4 next hop", session{has4: true, has6: true, nextHops: nextHops{session6: true}}, false, true, 1},
	} {
		if c4, c6 := row.n.carries(v4), row.n.carries(v6); c4 != row.c4 || c6 != row.c6 {
			t.Errorf("%s: carries IPv4 %t, IPv6 %t, want %t, %t", row.name, c4, c6, row.c4, row.c6)
		}
		row.n.state = stateEstablished
		if got := row.n.routes(10, 1); got != row.routes {
			t.Errorf("%s: %d routes, want %d", row.name, got, row.routes)
		}
		row.n.state = "active"
		if got := row.n.routes(10, 1); got != 0 {
			t.Errorf("%s: %d routes without a session", row.name, got)
		}
	}
}

// gobgp counts hops in two ways: TTL security names the minimum TTL, multihop the TTL of packets that it sends.
func TestAPIPeer(t *testing.T) {
	o := Options{ASN: 64512, RestartTime: 30 * time.Second}
	base := Peer{
		Address: netip.MustParseAddr("192.0.2.1"), ASN: 64500, Port: 1179, HoldTime: 9 * time.Second,
		Password: "secret",
	}
	build := func(f func(*Peer)) *api.Peer {
		p := base
		f(&p)
		n := session{peer: p}
		return n.apiPeer(&o)
	}
	p := build(func(*Peer) {})
	if p.Conf.NeighborAddress != "192.0.2.1" || p.Conf.PeerAsn != 64500 || p.Conf.AuthPassword != "secret" {
		t.Errorf("conf %v", p.Conf)
	}
	timers := p.Timers.Config
	if timers.HoldTime != 9 || timers.KeepaliveInterval != 3 {
		t.Errorf("timers %v", timers)
	}
	if timers.ConnectRetry != 2 || timers.IdleHoldTimeAfterReset != 1 {
		t.Errorf("timers %v", timers)
	}
	if p.Transport.RemotePort != 1179 || p.Transport.LocalAddress != "" || len(p.AfiSafis) != 2 {
		t.Errorf("transport %v, families %v", p.Transport, p.AfiSafis)
	}
	if p.TtlSecurity != nil || p.EbgpMultihop != nil || p.GracefulRestart != nil {
		t.Errorf("options that were not set: %v", p)
	}
	if k := build(func(p *Peer) { p.HoldTime = 2 * time.Second }).Timers.Config.KeepaliveInterval; k != 1 {
		t.Errorf("keepalive %d s, want at least 1", k)
	}
	for hops, want := range map[int]uint32{0: 255, 1: 255, 2: 254, 255: 1} {
		p := build(func(p *Peer) { p.TTLSecurity, p.Multihop = true, hops })
		if !p.TtlSecurity.Enabled || p.TtlSecurity.TtlMin != want || p.EbgpMultihop != nil {
			t.Errorf("TTL security over %d hops: %v, want a TTL of at least %d", hops, p.TtlSecurity, want)
		}
	}
	for _, hops := range []int{1, 3} {
		p := build(func(p *Peer) { p.Multihop = hops })
		if !p.EbgpMultihop.GetEnabled() || p.EbgpMultihop.MultihopTtl != uint32(hops) {
			t.Errorf("multihop %d: %v", hops, p.EbgpMultihop)
		}
	}
	if p := build(func(p *Peer) { p.Multihop, p.ASN = 3, o.ASN }); p.EbgpMultihop != nil {
		t.Errorf("multihop for iBGP: %v", p.EbgpMultihop)
	}
	p = build(func(p *Peer) { p.Source = netip.MustParseAddr("192.0.2.2") })
	if p.Transport.LocalAddress != "192.0.2.2" {
		t.Errorf("source %q", p.Transport.LocalAddress)
	}
	for _, on := range []bool{false, true} {
		p := build(func(p *Peer) { p.GracefulRestart = on })
		for _, f := range p.AfiSafis {
			if f.MpGracefulRestart.Config.Enabled != on || !f.Config.Enabled {
				t.Errorf("graceful restart %t: family %v", on, f)
			}
		}
		g := p.GracefulRestart
		if on && (!g.Enabled || g.RestartTime != 30 || g.DeferralTime != 1 || !g.LocalRestarting) {
			t.Errorf("graceful restart %v", g)
		}
	}
}
