package bgp

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
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
				"no response; if the peer is up, check filters for that port, and the MD5 password on both sides"},
		{"no response, and another password",
			session{disconnectedAt: since, dialErr: syscall.ETIMEDOUT, signature: signatureMismatch},
			"no TCP connection to 192.0.2.1:179 for 10s: no response; the peer sends TCP segments " +
				"with a wrong MD5 signature; check the MD5 password on both sides"},
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
			"the peer sends TCP segments without an MD5 signature: it has no MD5 password, this node has one; " +
				"before that: " + fault},
		{"many announcements", session{state: "established", peer: Peer{MaxReceived: 5}, received: 6},
			"the peer has announced more than max_received = 5 routes in this session, " +
				"counting repetitions; they are discarded: do not export routes to this node"},
		{"up", session{state: "established", fault: "old", dialErr: errors.New("old"), has6: true}, ""},
		{"up without IPv6 next hop", session{
			state: "established", has6: true, wants6: true, nextHops: nextHops{reason6: "r6", reason4: "r4"}}, "r6"},
		{"up without IPv6 next hop or routes",
			session{state: "established", has6: true, nextHops: nextHops{reason6: "r6"}}, ""},
		{"up without IPv4 next hop", session{
			state: "established", has4: true, wants4: true, nextHops: nextHops{reason6: "r6", reason4: "r4"}}, "r4"},
	} {
		row.e.peer.Address, row.e.peer.Port = peer.Address, peer.Port
		must.Row(t, row.name, row.want, row.e.reason(now))
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
		{"both over IPv6", session{has4: true, has6: true, nextHops: nextHops{addr6: v6, addr4: v4}}, true, true},
		{"IPv4 negotiated", session{has4: true, nextHops: nextHops{addr4: v4, addr6: v6}}, true, false},
		{"IPv6 negotiated", session{has6: true, nextHops: nextHops{addr4: v4, addr6: v6}}, false, true},
		{"no IPv6 next hop", session{has4: true, has6: true, nextHops: nextHops{addr4: v4}}, true, false},
		{"no IPv4 next hop", session{has4: true, has6: true, nextHops: nextHops{addr6: v6}}, false, true},
	} {
		route := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
		must.Row(t, row.name, [2]bool{row.c4, row.c6}, [2]bool{row.n.carries(route(v4)), row.n.carries(route(v6))})
	}
}

// TTL security sets the lowest accepted TTL, and multihop the TTL of sent packets.
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
		must.Row(t, row.name, w, p.config(&o))
	}
}

// The notice reports BFD that is not up, but not while it may still come up.
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
		must.Row(t, row.name, row.want, n.bfdNotice(bfdState{"down: why", row.notUpAt}, now))
	}
}

// The loopback interface has no global address, so the other family's next hop comes from the options, if set there.
func TestNextHopsFrom(t *testing.T) {
	addr := netip.MustParseAddr
	v4, v6, loopback4, unknown := addr("192.0.2.1"), addr("2001:db8::1"), addr("127.0.0.1"), addr("2001:db8:ffff::1")
	with, without := Options{NextHopV4: v4, NextHopV6: v6}, Options{}
	for _, row := range []struct {
		o     Options
		local netip.Addr
		want  nextHops
	}{
		{with, loopback4, nextHops{addr4: loopback4, addr6: v6}},
		{without, loopback4, nextHops{addr4: loopback4,
			reason6: "IPv6 routes are not sent: no IPv6 next hop, because lo has no global IPv6 address"}},
		{without, unknown, nextHops{addr6: unknown,
			reason4: "IPv4 routes are not sent: no interface has 2001:db8:ffff::1"}},
		{with, addr("fe80::1%none0"), nextHops{addr4: v4, addr6: v6}}, // a link-local address is not used as next hop
	} {
		must.Row(t, row.local, row.want, row.o.nextHopsFrom(row.local))
	}
}

func TestMissing(t *testing.T) {
	failed := errors.New("no route")
	must.Row(t, "with an address", "", missing(netip.MustParseAddr("192.0.2.1"), "IPv4", "eth0", failed))
	must.Row(t, "without", "IPv4 routes are not sent: no route", missing(netip.Addr{}, "IPv4", "eth0", failed))
}

// interfaceOf finds an address on its interface, with the interface's global addresses; with a zone, only on that
// interface.
func TestInterfaceOf(t *testing.T) {
	tested := []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	all := must.Get(net.InterfaceAddrs())(t)
	for _, a := range all { // the first global address, if this node has one
		if addr := netip.MustParsePrefix(a.String()).Addr(); addr.IsGlobalUnicast() {
			tested = append(tested, addr)
			break
		}
	}
	for _, addr := range tested {
		name, global, err := interfaceOf(addr)
		must.True(t, err == nil && (name == "lo") == addr.IsLoopback(), "%v: interface %q, %v", addr, name, err)
		must.True(t, slices.Contains(global, addr) == addr.IsGlobalUnicast(), "%v: global addresses %v", addr, global)
	}
	_, _, err := interfaceOf(netip.MustParseAddr("::1%none0"))
	must.True(t, err != nil, "an address was found on an interface that does not exist")
}

// open resets the sessions and adds the routes. If it fails, Set does not use gobgp.
func TestOpen(t *testing.T) {
	s, p, srv := withServer(t, new(strings.Builder))
	defer srv.stop()
	s.server = nil
	must.Do(t, s.Set(t.Context(), announce("203.0.113.1", 1, "2001:db8::1", 1)))
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	err := s.open(ended, srv)
	must.True(t, err != nil && s.server == nil, "with an ended context: error %v, server %p", err, s.server)
	p.fault, p.dialErr = "old", context.Canceled
	must.Do(t, s.open(t.Context(), srv))
	must.True(t, s.server == srv && len(s.installed) == 2 && p.fault == "" && p.dialErr == nil,
		"%d routes installed, session %+v", len(s.installed), p)
}

// gobgp has a peer only while its session is attached.
func TestAttach(t *testing.T) {
	s, p, srv := withServer(t, new(strings.Builder))
	defer srv.stop()
	peer, local := p.peer.Address, netip.MustParseAddr("127.0.0.1")
	session := guard.Session{Peer: peer, Local: local, ASN: 64500, V4: true}
	_, err := s.attach(t.Context(), session)
	must.True(t, errors.Is(err, errNoTable), "before gobgp runs: error %v", err)
	must.Do(t, s.open(t.Context(), srv))
	unknown := session
	unknown.Peer = netip.MustParseAddr("192.0.2.99")
	_, err = s.attach(t.Context(), unknown)
	must.True(t, err != nil, "an unknown peer was attached")
	for range 2 {
		b := must.Get(s.attach(t.Context(), session))(t)
		must.True(t, b.From == p.from && b.Key == srv.key && peerCount(t, srv) == 1 && s.withdrawals.peers[peer] != nil,
			"backend %+v, %d peers", b, peerCount(t, srv))
		must.True(t, p.attached && p.has4 && !p.has6 && p.nextHops.addr4 == local, "session %+v", p)
		s.detach(peer)
		must.True(t, peerCount(t, srv) == 0 && !p.attached && !p.has4 && !p.local.IsValid() &&
			s.withdrawals.peers[peer] == nil, "after the session: %d peers, %+v", peerCount(t, srv), p)
	}
	s.detach(unknown.Peer)
}

// Every peer has its own address towards gobgp.
func TestBackendAddresses(t *testing.T) {
	seen := map[netip.Addr]bool{backendAt: true}
	for n := range maxPeers {
		a := backendFrom(n)
		must.Need(t, !seen[a] && a.IsLoopback(), "peer %d has %v", n, a)
		seen[a] = true
	}
}

// While the port is in use, the guard only connects, and the status shows this. It listens once the port is free.
func TestRunOnPortInUse(t *testing.T) {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer l.Close()
	o := validOptions()
	o.ListenPort, o.ListenAddresses = l.Addr().(*net.TCPAddr).Port, []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	s := must.Get(New(o))(t)
	must.Run(t, s.Run)
	must.Do(t, s.Set(t.Context(), nil))
	eventually := func(what string, f func() bool) {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
			must.Need(t, time.Now().Before(end), "%s: not after 10 s; problems %q", what, lbtest.Texts(s.Findings()))
		}
	}
	eventually("a problem", func() bool {
		p := lbtest.Texts(s.Findings())
		return len(p) == 1 && strings.Contains(p[0], "address already in use")
	})
	l.Close()
	eventually("listening", func() bool {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			return false
		}
		c.Close()
		return len(lbtest.Texts(s.Findings())) == 0
	})
}

func TestDialProblem(t *testing.T) {
	refused := os.NewSyscallError("connect", syscall.ECONNREFUSED)
	for _, row := range []struct {
		err  error
		seen signature
		want string
	}{
		{refused, signatureMismatch, "connection refused"},
		{refused, signatureUnknown, "connection refused"},
		{os.ErrDeadlineExceeded, signatureSurplus, "it has a password, this node has none"},
		{os.ErrDeadlineExceeded, signatureMissing, "it has no MD5 password, this node has one"},
		{os.ErrDeadlineExceeded, signatureMismatch, "a wrong MD5 signature; check"},
		{os.ErrDeadlineExceeded, signatureRight, "with the right MD5 password; check the filters"},
		{os.ErrDeadlineExceeded, signatureNone, "no response, but the peer connects; check the filters"},
		{os.ErrDeadlineExceeded, signatureUnknown, "no response; if the peer is up"},
		{syscall.ETIMEDOUT, signatureUnknown, "no response; if the peer is up"},
	} {
		got := dialProblem(row.err, row.seen)
		must.True(t, strings.Contains(got, row.want), "%v, signature %d: %q, want %q", row.err, row.seen, got, row.want)
	}
	syn := make([]byte, tcpHeaderLen)
	syn[3], syn[12], syn[13] = 179, tcpHeaderLen/4<<4, tcpSYN
	for password, want := range map[string]signature{"": signatureNone, "secret": signatureMissing} {
		must.Row(t, "password "+password, want, signatureOf(syn, netip.Addr{}, netip.Addr{}, 179, 179, password))
	}
	n := session{dialErr: os.ErrDeadlineExceeded}
	got := n.logReason(time.Now())
	must.True(t, strings.HasPrefix(got, "no TCP connection: no response; if the peer is up"), "in the log: %q", got)
}

func TestLostNextHop(t *testing.T) {
	v4, v6 := netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8::7")
	none, only4, only6 := nextHops{}, nextHops{addr4: v4}, nextHops{addr6: v6}
	both := nextHops{addr4: v4, addr6: v6}
	moved := nextHops{addr4: netip.MustParseAddr("192.0.2.1")}
	for _, row := range []struct {
		before, after nextHops
		want          bool
	}{
		{none, none, false}, {none, both, false}, {both, both, false}, {only4, both, false}, {only4, moved, false},
		{both, only4, true}, {both, only6, true}, {both, none, true}, {only4, only6, true}, {only6, only4, true},
	} {
		got := lostNextHop(row.before, row.after)
		must.True(t, got == row.want, "%+v to %+v: %t, want %t", row.before, row.after, got, row.want)
	}
}

// gobgp's Fatal and Panic must neither end the process nor unwind the goroutine.
func TestLoggerNeverEndsTheProcess(t *testing.T) {
	var out strings.Builder
	l := &logger{slog.New(slog.NewTextHandler(&out, nil))}
	l.Fatal("cannot go on", map[string]any{"Key": "192.0.2.1"})
	l.Panic("code logic bug", nil)
	l.Debug("not shown", nil)
	for _, want := range []string{`level=ERROR msg=gobgp text="cannot go on" Key=192.0.2.1`, `text="code logic bug"`} {
		must.True(t, strings.Contains(out.String(), want), "the log lacks %s:\n%s", want, out.String())
	}
}

func peerCount(t *testing.T, srv *bgpServer) (n int) {
	t.Helper()
	must.Do(t, srv.ListPeer(context.Background(), &api.ListPeerRequest{}, func(*api.Peer) { n++ }))
	return n
}
