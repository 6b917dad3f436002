package bgp

import (
	"cmp"
	"context"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"golang.org/x/sys/unix"
)

func TestListenAddresses(t *testing.T) {
	addr := netip.MustParseAddr
	v4, other4, v6 := addr("192.0.2.1"), addr("192.0.2.5"), addr("2001:db8::1")
	for _, row := range []struct {
		name  string
		port  int
		on    []netip.Addr
		peers []netip.Addr
		want  []string
	}{
		{"no peers", 179, nil, nil, nil},
		{"IPv4 peers", 179, nil, []netip.Addr{v4, other4}, []string{"0.0.0.0"}},
		{"IPv6 peer", 179, nil, []netip.Addr{v6}, []string{"::"}},
		{"both", 179, nil, []netip.Addr{v6, v4, other4}, []string{"::", "0.0.0.0"}},
		{"only connect", -1, nil, []netip.Addr{v4}, nil},
		{"configured", 179, []netip.Addr{other4}, []netip.Addr{v4, v6}, []string{"192.0.2.5"}},
	} {
		s := &Speaker{o: Options{ListenPort: row.port, ListenAddresses: row.on}}
		for _, p := range row.peers {
			s.o.Peers = append(s.o.Peers, Peer{Address: p})
		}
		if got := s.listenAddresses(); !slices.Equal(got, row.want) {
			t.Errorf("%s: %q, want %q", row.name, got, row.want)
		}
	}
}

// While the port is in use, gobgp only connects, and the status says so. It listens once the port is free.
func TestRunOnPortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	o := validOptions()
	o.ListenPort, o.ListenAddresses = l.Addr().(*net.TCPAddr).Port, []netip.Addr{netip.MustParseAddr("127.0.0.1")}
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	s.relisten = 20 * time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- s.Run(ctx) }()
	if err := s.Set(ctx, nil); err != nil {
		t.Fatal(err)
	}
	eventually := func(what string, f func() bool) {
		t.Helper()
		for end := time.Now().Add(10 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: not after 10 s; problems %q", what, s.Problems())
			}
		}
	}
	eventually("a problem", func() bool {
		p := s.Problems()
		return len(p) == 1 && strings.Contains(p[0], "address already in use")
	})
	l.Close()
	eventually("listening", func() bool {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			return false
		}
		c.Close()
		return len(s.Problems()) == 0
	})
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// running returns a speaker with a gobgp that only connects, to a port on which nothing listens.
func running(t *testing.T) (*Speaker, *bgpServer, *session) {
	t.Helper()
	o := validOptions()
	o.ListenPort = -1
	o.Peers = []Peer{{Address: netip.MustParseAddr("127.0.0.9"), ASN: 64500, Port: 1, GracefulRestart: true}}
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	srv, err := s.startServer(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.stop)
	return s, srv, s.sessions[o.Peers[0].Address]
}

func peerCount(t *testing.T, srv *bgpServer) (n int) {
	t.Helper()
	if err := srv.ListPeer(context.Background(), &api.ListPeerRequest{}, func(*api.Peer) { n++ }); err != nil {
		t.Fatal(err)
	}
	return n
}

// A peer is added when addAt has passed. One that gobgp rejects has a fault, and is added again after 10 s.
func TestAddDue(t *testing.T) {
	s, srv, p := running(t)
	for _, row := range []struct {
		name  string
		addAt time.Time
		peers int
		fault string
	}{
		{"gobgp has it", time.Time{}, 0, ""},
		{"later", time.Now().Add(time.Hour), 0, ""},
		{"now", time.Now(), 1, ""},
		{"rejected", time.Now(), 1, "add the peer: "},
	} {
		p.addAt = row.addAt
		before := time.Now()
		s.addDue(t.Context(), srv)
		n, fault := peerCount(t, srv), strings.HasPrefix(p.fault, row.fault) && (p.fault == "") == (row.fault == "")
		if n != row.peers || !fault {
			t.Errorf("%s: %d peers, fault %q, want %d, %q", row.name, n, p.fault, row.peers, row.fault)
		}
		if row.fault != "" && (p.addAt.Before(before.Add(10*time.Second)) || p.faultAt.Before(before)) {
			t.Errorf("%s: added again after %s", row.name, p.addAt.Sub(before))
		}
	}
}

// A lost session is removed from gobgp. The next one begins at once, or after 2 s when it lasted less than 5 s.
func TestLostSessionIsReadded(t *testing.T) {
	s, srv, p := running(t)
	for lasted, delay := range map[time.Duration]time.Duration{time.Second: 2 * time.Second, 6 * time.Second: 0} {
		p.addAt = time.Now()
		s.addDue(t.Context(), srv)
		if n := peerCount(t, srv); n != 1 {
			t.Fatalf("%d peers in gobgp, want 1", n)
		}
		now := time.Now()
		p.state, p.since = stateEstablished, now.Add(-lasted)
		s.withdrawals.peerUp(p.peer.Address, p.carries)
		ended := peerEvent{peer: p.peer.Address, kind: eventState, old: stateEstablished, new: "idle"}
		s.handle(t.Context(), srv, ended)
		got := p.addAt.Sub(now)
		if got < delay || got > delay+time.Second || p.state != "idle" || peerCount(t, srv) != 0 {
			t.Errorf("after a session of %s: added again after %s, want %s; %+v", lasted, got, delay, p)
		}
		if s.withdrawals.pending[p.peer.Address] != nil {
			t.Errorf("after a session of %s: withdrawals are still expected", lasted)
		}
	}
}

func TestDialProblem(t *testing.T) {
	refused := os.NewSyscallError("connect", syscall.ECONNREFUSED)
	for _, row := range []struct {
		err               error
		password, dropped bool
		want              string
	}{
		{refused, true, true, "connection refused"},
		{refused, false, false, "connection refused"},
		{os.ErrDeadlineExceeded, false, true, "the peer has a password, this node has none"},
		{os.ErrDeadlineExceeded, true, true, "a wrong or missing MD5 signature: check"},
		{os.ErrDeadlineExceeded, true, false, "no response; if the peer is up"},
		{os.ErrDeadlineExceeded, false, false, "no response; if the peer is up"},
		{syscall.ETIMEDOUT, false, false, "no response; if the peer is up"},
	} {
		if got := dialProblem(row.err, row.password, row.dropped); !strings.Contains(got, row.want) {
			t.Errorf("%v, password %t, dropped %t: %q, want %q", row.err, row.password, row.dropped, got, row.want)
		}
	}
	n := session{dialErr: os.ErrDeadlineExceeded, md5Dropped: 1 << 60}
	if got := n.logReason(); !strings.HasPrefix(got, "no TCP connection: no response; if the peer is up") {
		t.Errorf("reason in the log: %q", got)
	}
}

// Only a refusal without a reason is probed, while there is no session, and every 2 s at most.
func TestToProbe(t *testing.T) {
	now := time.Now()
	for _, row := range []struct {
		name, fault, state string
		age                time.Duration
		want               bool
	}{
		{"refused", refusalUnknown, "idle", time.Hour, true},
		{"refused, active", refusalUnknown, "active", time.Hour, true},
		{"connecting", refusalUnknown, "opensent", time.Hour, false},
		{"established", refusalUnknown, stateEstablished, time.Hour, false},
		{"known reason", "cease", "idle", time.Hour, false},
		{"known reason, outdated", "outdated", "idle", time.Hour, true},
		{"no fault", "", "idle", time.Hour, false},
		{"probed 2 s ago", refusalUnknown, "idle", 2 * time.Second, false},
		{"probed earlier", refusalUnknown, "idle", 2*time.Second + 1, true},
	} {
		s, p := newTestSpeaker(t, new(strings.Builder))
		p.fault, p.state, p.probedAt = row.fault, row.state, now.Add(-row.age)
		p.reprobe = row.fault == "outdated"
		if got := len(s.toProbe(now)) == 1; got != row.want || p.probedAt.Equal(now) != row.want {
			t.Errorf("%s: probed: %t, want %t", row.name, got, row.want)
		}
	}
}

// Peers with graceful restart that gobgp has and that have no session are readded, every 10 s at most.
func TestToReadd(t *testing.T) {
	now := time.Now()
	other := netip.MustParseAddr("192.0.2.99")
	for _, row := range []struct {
		name   string
		change func(p *session)
		up     netip.Addr
		want   bool
	}{
		{"waits", func(*session) {}, other, true},
		{"the peer that is up", func(*session) {}, validPeer().Address, false},
		{"has a session", func(p *session) { p.state = stateEstablished }, other, false},
		{"to be added", func(p *session) { p.addAt = now }, other, false},
		{"without graceful restart", func(p *session) { p.peer.GracefulRestart = false }, other, false},
		{"readded 10 s ago", func(p *session) { p.readdedAt = now.Add(-10 * time.Second) }, other, false},
		{"readded earlier", func(p *session) { p.readdedAt = now.Add(-10*time.Second - 1) }, other, true},
	} {
		s, p := newTestSpeaker(t, new(strings.Builder))
		p.peer.GracefulRestart = true
		row.change(p)
		if got := len(s.toReadd(row.up, now)) == 1; got != row.want || p.readdedAt.Equal(now) != row.want {
			t.Errorf("%s: readded: %t, want %t", row.name, got, row.want)
		}
	}
}

func TestLostNextHop(t *testing.T) {
	none, only4, only6 := nextHops{}, nextHops{session4: true}, nextHops{session6: true}
	both := nextHops{session4: true, session6: true}
	moved := nextHops{addr4: netip.MustParseAddr("192.0.2.1")}
	for _, row := range []struct {
		before, after nextHops
		want          bool
	}{
		{none, none, false}, {none, both, false}, {both, both, false}, {only4, both, false}, {only4, moved, false},
		{both, only4, true}, {both, only6, true}, {both, none, true}, {only4, only6, true}, {only6, only4, true},
	} {
		if got := lostNextHop(row.before, row.after); got != row.want {
			t.Errorf("%+v to %+v: %t, want %t", row.before, row.after, got, row.want)
		}
	}
}

// The TTL of the probe is that of the session.
func TestSocketTTL(t *testing.T) {
	o := validOptions()
	for _, row := range []struct {
		peer        Peer
		network     string
		level, name int
		want        int // 0: unchanged
	}{
		{Peer{Address: netip.MustParseAddr("192.0.2.1"), ASN: 64500, Multihop: 3}, "udp4",
			unix.IPPROTO_IP, unix.IP_TTL, 3},
		{Peer{Address: netip.MustParseAddr("2001:db8::1"), ASN: 64500, TTLSecurity: true}, "udp6",
			unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, 255},
		{Peer{Address: netip.MustParseAddr("2001:db8::1"), ASN: o.ASN}, "udp6",
			unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, 0},
	} {
		c, err := net.ListenPacket(row.network, ":0")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		raw, err := c.(*net.UDPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		read := func() (got int) {
			failed := raw.Control(func(fd uintptr) { got, err = unix.GetsockoptInt(int(fd), row.level, row.name) })
			if failed != nil || err != nil {
				t.Fatal(failed, err)
			}
			return got
		}
		want := cmp.Or(row.want, read())
		if err := o.setSocketOptions(raw, row.peer); err != nil {
			t.Fatal(err)
		}
		if got := read(); got != want {
			t.Errorf("%s: TTL %d, want %d", row.network, got, want)
		}
		c.Close()
		if err := o.setSocketOptions(raw, row.peer); err == nil {
			t.Errorf("%s: no error for a closed socket", row.network)
		}
	}
}
