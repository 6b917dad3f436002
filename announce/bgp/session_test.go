package bgp

import (
	"errors"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
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
		{"no response", session{disconnectedAt: since, dialErr: os.ErrDeadlineExceeded},
			"no TCP connection to 192.0.2.1:179 for 10s: " +
				"no response; if the peer is up, check filters of that port, and the password (MD5) on both sides"},
		{"no response, and another password",
			session{disconnectedAt: since, dialErr: syscall.ETIMEDOUT, signature: signatureMismatch},
			"no TCP connection to 192.0.2.1:179 for 10s: no response; the peer sends TCP segments " +
				"with a wrong MD5 signature: check the password (MD5) on both sides"},
		{"refused after a fault", session{disconnectedAt: now, dialErr: refused, fault: fault, faultAt: since},
			"no TCP connection to 192.0.2.1:179 for 0s: connection refused; before that: " + fault},
		{"refused a minute after a fault",
			session{disconnectedAt: now, dialErr: refused, fault: fault, faultAt: now.Add(-time.Minute)},
			"no TCP connection to 192.0.2.1:179 for 0s: connection refused; before that: " + fault},
		{"fault", session{state: "idle", fault: fault}, fault},
		{"connected", session{state: "opensent", moved: now.Add(-time.Second)}, ""},
		{"no OPEN", session{state: "opensent", moved: since}, "connected, but the peer has sent no OPEN for 10s"},
		{"no OPEN after a fault", session{state: "opensent", moved: since, fault: fault},
			"connected, but the peer has sent no OPEN for 10s; before that: " + fault},
		{"no password of a peer that connects", session{state: "active", signature: signatureMissing, fault: fault},
			"the peer sends TCP segments without an MD5 signature: it has no password (MD5), this node has one; " +
				"before that: " + fault},
		{"many announcements", session{state: "established", peer: Peer{MaxReceived: 5}, received: 6},
			"the peer has announced more routes than max_received = 5 in this session, " +
				"each counted every time; they are discarded: export none to this node"},
		{"up", session{state: "established", fault: "old", dialErr: errors.New("old"), has6: true}, ""},
		{"up without IPv6 next hop",
			session{
				state: "established", has6: true, wants6: true, nextHops: nextHops{reason6: "r6", reason4: "r4"},
			}, "r6"},
		{"up without IPv6 next hop or routes",
			session{state: "established", has6: true, nextHops: nextHops{reason6: "r6"}}, ""},
		{"up without IPv4 next hop",
			session{
				state: "established", has4: true, wants4: true, nextHops: nextHops{reason6: "r6", reason4: "r4"},
			}, "r4"},
	} {
		row.e.peer.Address, row.e.peer.Port = peer.Address, peer.Port
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
	}{
		{"both", session{has4: true, has6: true, nextHops: nextHops{addr4: v4, addr6: v6}}, true, true},
		{"both over IPv6", session{has4: true, has6: true, nextHops: nextHops{addr6: v6, addr4: v4}},
			true, true},
		{"IPv4 negotiated", session{has4: true, nextHops: nextHops{addr4: v4, addr6: v6}}, true, false},
		{"IPv6 negotiated", session{has6: true, nextHops: nextHops{addr4: v4, addr6: v6}}, false, true},
		{"no IPv6 next hop", session{has4: true, has6: true, nextHops: nextHops{addr4: v4}}, true, false},
		{"no IPv4 next hop", session{has4: true, has6: true, nextHops: nextHops{addr6: v6}}, false, true},
	} {
		route := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
		if c4, c6 := row.n.carries(route(v4)), row.n.carries(route(v6)); c4 != row.c4 || c6 != row.c6 {
			t.Errorf("%s: carries IPv4 %t, IPv6 %t, want %t, %t", row.name, c4, c6, row.c4, row.c6)
		}
	}
}

// TTL security gives the lowest TTL that is accepted, multihop the TTL of packets that are sent.
func TestConfig(t *testing.T) {
	o := Options{ASN: 64512, RestartTime: 30 * time.Second}
	base := Peer{
		Address: netip.MustParseAddr("192.0.2.1"), ASN: 64500, Port: 1179, HoldTime: 9 * time.Second,
		Password: "secret", Source: netip.MustParseAddr("192.0.2.2"),
	}
	want := guard.Config{
		Address: base.Address, ASN: 64500, Port: 1179, HoldTime: 9 * time.Second, Password: "secret",
		Source: base.Source, TTL: 1,
	}
	for _, row := range []struct {
		name   string
		change func(*Peer)
		want   func(*guard.Config)
	}{
		{"external", func(*Peer) {}, func(*guard.Config) {}},
		{"internal", func(p *Peer) { p.ASN = 64512 }, func(c *guard.Config) { c.ASN, c.TTL = 64512, 0 }},
		{"internal, multihop", func(p *Peer) { p.ASN, p.Multihop = 64512, 3 },
			func(c *guard.Config) { c.ASN, c.TTL = 64512, 0 }},
		{"multihop", func(p *Peer) { p.Multihop = 3 }, func(c *guard.Config) { c.TTL = 3 }},
		{"TTL security", func(p *Peer) { p.TTLSecurity = true }, func(c *guard.Config) { c.TTL, c.MinTTL = 255, 255 }},
		{"TTL security over 2 hops", func(p *Peer) { p.TTLSecurity, p.Multihop = true, 2 },
			func(c *guard.Config) { c.TTL, c.MinTTL = 255, 254 }},
		{"graceful restart", func(p *Peer) { p.GracefulRestart = true },
			func(c *guard.Config) { c.RestartTime = 30 * time.Second }},
		{"other times", func(p *Peer) { p.Keepalive, p.Retry = time.Second, time.Minute },
			func(c *guard.Config) { c.Keepalive, c.Retry = time.Second, time.Minute }},
		{"passive", func(p *Peer) { p.Passive = true }, func(c *guard.Config) { c.Passive = true }},
		{"internal by another local AS", func(p *Peer) { p.LocalASN, p.Multihop = 64500, 3 },
			func(c *guard.Config) { c.LocalASN, c.TTL = 64500, 0 }},
		{"the own AS as local one", func(p *Peer) { p.LocalASN = 64512 }, func(*guard.Config) {}},
		{"no hold time", func(p *Peer) { p.HoldTime = 0 }, func(c *guard.Config) { c.HoldTime = 0 }},
	} {
		p, w := base, want
		row.change(&p)
		row.want(&w)
		if got := p.config(&o); got != w {
			t.Errorf("%s: %+v, want %+v", row.name, got, w)
		}
	}
}

// BFD that is not up is told of, but not while it may still come up.
func TestBFDNotice(t *testing.T) {
	now := time.Now()
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	for _, row := range []struct {
		name           string
		state          string
		since, notUpAt time.Time
		want           string
	}{
		{"both are new", "established", ago(time.Second), ago(time.Second), ""},
		{"BGP is new", "established", ago(time.Second), ago(time.Hour), ""},
		{"BFD is new", "established", ago(time.Hour), ago(time.Second), ""},
		{"up, or none", "established", ago(time.Hour), time.Time{}, ""},
		{"BGP is down", "idle", ago(time.Hour), ago(time.Hour), ""},
		{"not up", "established", ago(10 * time.Second), ago(10 * time.Second), "bfd is down: why"},
	} {
		n := session{state: row.state, since: row.since}
		if got := n.bfdNotice(bfdState{"down: why", row.notUpAt}, now); got != row.want {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}
