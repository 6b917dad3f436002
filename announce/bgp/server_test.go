package bgp

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	api "github.com/osrg/gobgp/v3/api"

	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// While the port is in use, gobgp only connects, and the status says so. It listens once the port is free.
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
			if time.Now().After(end) {
				t.Fatalf("%s: not after 10 s; problems %q", what, lbtest.Texts(s.Findings()))
			}
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
		{os.ErrDeadlineExceeded, signatureMissing, "it has no password (MD5), this node has one"},
		{os.ErrDeadlineExceeded, signatureMismatch, "a wrong MD5 signature: check"},
		{os.ErrDeadlineExceeded, signatureRight, "with the right password (MD5): check the filters"},
		{os.ErrDeadlineExceeded, signatureNone, "no response, but the peer connects: check the filters"},
		{os.ErrDeadlineExceeded, signatureUnknown, "no response; if the peer is up"},
		{syscall.ETIMEDOUT, signatureUnknown, "no response; if the peer is up"},
	} {
		if got := dialProblem(row.err, row.seen); !strings.Contains(got, row.want) {
			t.Errorf("%v, signature %d: %q, want %q", row.err, row.seen, got, row.want)
		}
	}
	syn := make([]byte, tcpHeaderLen)
	syn[3], syn[12], syn[13] = 179, tcpHeaderLen/4<<4, tcpSYN
	for password, want := range map[string]signature{"": signatureNone, "secret": signatureMissing} {
		if got := signatureOf(syn, netip.Addr{}, netip.Addr{}, 179, 179, password); got != want {
			t.Errorf("a SYN without a signature, password %q: %d, want %d", password, got, want)
		}
	}
	n := session{dialErr: os.ErrDeadlineExceeded}
	if got := n.logReason(time.Now()); !strings.HasPrefix(got, "no TCP connection: no response; if the peer is up") {
		t.Errorf("reason in the log: %q", got)
	}
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
		if got := lostNextHop(row.before, row.after); got != row.want {
			t.Errorf("%+v to %+v: %t, want %t", row.before, row.after, got, row.want)
		}
	}
}

// Fatal and Panic of gobgp must neither end the process nor unwind the goroutine.
func TestLoggerNeverEndsTheProcess(t *testing.T) {
	var out strings.Builder
	l := &logger{slog.New(slog.NewTextHandler(&out, nil))}
	l.Fatal("cannot go on", map[string]any{"Key": "192.0.2.1"})
	l.Panic("code logic bug", nil)
	l.Debug("not shown", nil)
	for _, want := range []string{`level=ERROR msg=gobgp text="cannot go on" Key=192.0.2.1`, `text="code logic bug"`} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the log lacks %s:\n%s", want, out.String())
		}
	}
}

func peerCount(t *testing.T, srv *bgpServer) (n int) {
	t.Helper()
	must.Do(t, srv.ListPeer(context.Background(), &api.ListPeerRequest{}, func(*api.Peer) { n++ }))
	return n
}
