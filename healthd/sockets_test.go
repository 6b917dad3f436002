package healthd

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/grpclog"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The connection is reset, so that the server does not keep it.
func TestTCPResets(t *testing.T) {
	l := listen(t)
	c := lb.Check{Target: targetOf(l.Addr()), Spec: lb.CheckSpec{Type: lb.CheckTCP}}
	must.Equal(t, "ok: connected", probeFor(t, c, ""))
	conn := must.Get(l.Accept())(t)
	defer conn.Close()
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the server reads %v; want a reset", err)
	}
}

// The kernel answers on loopback as a node's datapath does at the VIP.
func TestEcho(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: raw sockets")
	}
	for _, vip := range []string{"127.0.0.1", "::1"} {
		own := netip.MustParseAddr(vip)
		c := lb.Check{VIP: own, Spec: lb.CheckSpec{Type: lb.CheckEcho}}
		way := func(lb.Check) (Way, error) { return Way{From: own}, nil }
		r, err := echoChecker{target{Check: c, way: way}}.Probe(t.Context())
		must.True(t, err == nil && r.Reason == "echo reply", "%s: %+v, %v", vip, r, err)
		ended, end := context.WithCancel(t.Context())
		end()
		_, err = echoChecker{target{Check: c, way: way}}.Probe(ended)
		must.True(t, err != nil, "%s: answered after the end", vip)
	}
}

// A UDP probe ends with its context, before its deadline.
func TestUDPEndsWithContext(t *testing.T) {
	at := udpServer(t, func([]byte) []byte { return nil })
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	time.AfterFunc(50*time.Millisecond, cancel)
	began := time.Now()
	r, err := udpChecker{target{Check: lb.Check{Target: at}}}.Probe(ctx)
	if took := time.Since(began); err == nil || took > 10*time.Second {
		t.Errorf("%+v, %v after %s; want an error", r, err, took)
	}
}

// The question is about an address of the target's family, and is asked again over TCP after a truncated response.
func TestDNSQuestion(t *testing.T) {
	answer := func(q *dns.Msg, truncated bool) *dns.Msg {
		m := new(dns.Msg)
		m.SetReply(q)
		m.Truncated = truncated
		rr, err := dns.NewRR("web.example. 60 IN TXT over-tcp-" + dns.TypeToString[q.Question[0].Qtype])
		if err == nil && !truncated {
			m.Answer = append(m.Answer, rr)
		}
		return m
	}
	for host, record := range map[string]string{"127.0.0.1": "A", "::1": "AAAA"} {
		u := must.Get(net.ListenPacket("udp", net.JoinHostPort(host, "0")))(t)
		l := must.Get(net.Listen("tcp", u.LocalAddr().String()))(t)
		for _, s := range []*dns.Server{{PacketConn: u}, {Listener: l}} {
			s.Handler = dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
				w.WriteMsg(answer(q, w.LocalAddr().Network() == "udp"))
			})
			started := make(chan struct{})
			s.NotifyStartedFunc = func() { close(started) }
			go s.ActivateAndServe()
			<-started
			t.Cleanup(func() { s.Shutdown() })
		}
		spec := lb.CheckSpec{Type: lb.CheckDNS, Host: "web.example", Body: "over-tcp-" + record + "\""}
		must.Row(t, host, "ok: DNS NOERROR", probeFor(t, lb.Check{Target: targetOf(u.LocalAddr()), Spec: spec}, ""))
	}
}

// Only the first 1,024 bytes that a program writes are kept, however they arrive.
func TestFirstKiB(t *testing.T) {
	text := strings.Repeat("0123456789", 200)
	for _, r := range []io.Reader{strings.NewReader(text), iotest.OneByteReader(strings.NewReader(text))} {
		var k firstKiB
		must.Equal(t, 2000, must.Get(io.Copy(&k, r))(t))
		if got := k.kept.String(); got != text[:1024] {
			t.Errorf("%d bytes kept; want the first 1024", len(got))
		}
	}
}

// What gRPC logs of a server's frames does not get to stderr.
func TestGRPCIsSilent(t *testing.T) {
	file := must.Get(os.Create(t.TempDir() + "/stderr"))(t)
	defer file.Close()
	stderr := must.Get(unix.Dup(2))(t)
	defer unix.Close(stderr)
	must.Do(t, unix.Dup2(int(file.Fd()), 2))
	grpclog.Error("too_many_pings")
	must.Do(t, unix.Dup2(stderr, 2))
	if text := must.Get(os.ReadFile(file.Name()))(t); strings.Contains(string(text), "too_many_pings") {
		t.Errorf("stderr: %s", text)
	}
}

// A server name makes the gRPC probe use TLS.
func TestGRPCUsesTLS(t *testing.T) {
	l := listen(t)
	first := make(chan byte, 1)
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		b := make([]byte, 1)
		conn.Read(b)
		first <- b[0]
	}()
	spec := lb.CheckSpec{Type: lb.CheckGRPC, TLSServerName: "web.example"}
	probeFor(t, lb.Check{Target: targetOf(l.Addr()), Spec: spec}, "no response")
	if b := <-first; b != 22 { // handshake (RFC 8446 §5.1)
		t.Errorf("the first byte is %d; want that of a TLS handshake", b)
	}
}

// listenAs returns a listener of a user.
func listenAs(t *testing.T, uid int, address string) net.Listener {
	t.Helper()
	var l net.Listener
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and the thread ends with this goroutine: only it has the user
		if _, _, no := syscall.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); no != 0 {
			err = no
			return
		}
		l, err = net.Listen("tcp", address)
	}()
	<-done
	must.Do(t, err)
	t.Cleanup(func() { l.Close() })
	return l
}

// A check that believes only root ignores the answer of another user, because every user can listen at the port of
// kube-proxy's health endpoint. An answer is believed if no socket is found for it.
func TestAnswersOfRootOnly(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: sockets have owners")
	}
	for _, tt := range []struct {
		uid             int
		listens, target string
		refused         bool
	}{
		{0, "127.0.0.1:0", "127.0.0.1", false}, {65534, "127.0.0.1:0", "127.0.0.1", true},
		{65534, "0.0.0.0:0", "127.0.0.1", true}, {65534, "[::]:0", "127.0.0.1", true},
		{0, "[::]:0", "127.0.0.1", false}, {65534, "[::1]:0", "::1", true},
		{0, "[::1]:0", "::1", false}, {65534, "[::]:0", "::1", true},
	} {
		l := listenAs(t, tt.uid, tt.listens)
		s := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}
		go s.Serve(l)
		to := netip.AddrPortFrom(netip.MustParseAddr(tt.target), targetOf(l.Addr()).Port())
		c := lb.Check{ByRoot: true, Target: to, Spec: lb.CheckSpec{Type: lb.CheckHTTP, Path: "/"}}
		got := probeFor(t, c, "")
		_, err := newHTTPChecker(target{Check: c}).Probe(t.Context())
		if strings.Contains(got, "user 65534") != tt.refused || errors.Is(err, syscall.ECONNREFUSED) != tt.refused {
			t.Errorf("user %d at %s, probed at %s: %s", tt.uid, tt.listens, tt.target, got)
		}
		c.ByRoot = false
		must.Equal(t, "ok: HTTP 200", probeFor(t, c, ""))
		s.Close()
	}
	closed := closedPort(t)
	must.Do(t, byRoot(closed))
}
