package healthd

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
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

func TestDialer(t *testing.T) {
	vip, from := netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("192.0.2.1")
	server := netip.MustParseAddrPort("10.0.0.1:80")
	way := func(lb.Check) (Way, error) { return Way{Mark: 7, From: from}, nil }
	for _, tt := range []struct {
		name, network string
		vip           netip.Addr
		to, local     string
	}{
		{"server", "tcp", netip.Addr{}, "10.0.0.1:80", "<nil>"},
		{"VIP, TCP", "tcp", vip, "203.0.113.10:80", "192.0.2.1:0"},
		{"VIP, UDP", "udp", vip, "203.0.113.10:80", "192.0.2.1:0"},
	} {
		d, to, err := target{Check: lb.Check{Target: server, VIP: tt.vip}, way: way}.dialer(tt.network)
		must.Need(t, err == nil && to.String() == tt.to, "%s: to %v, %v; want %s", tt.name, to, err, tt.to)
		local := "<nil>"
		if d.LocalAddr != nil {
			local = d.LocalAddr.String()
			must.Row(t, tt.name, tt.network, d.LocalAddr.Network())
		}
		must.True(t, local == tt.local && (d.Control != nil) == tt.vip.IsValid(),
			"%s: from %s, sets a mark: %t", tt.name, local, d.Control != nil)
	}
}

// Without a path to the server, no probe is sent to the VIP.
func TestDialerWithoutPath(t *testing.T) {
	broken := errors.New("no such server")
	c := lb.Check{Target: netip.MustParseAddrPort("10.0.0.1:80"), VIP: netip.MustParseAddr("203.0.113.10")}
	for typ, checker := range checkers {
		if typ == lb.CheckExec || typ == lb.CheckNodePort {
			continue // uses the server's own address
		}
		way := func(lb.Check) (Way, error) { return Way{}, broken }
		_, err := checker(target{Check: c, way: way}).Probe(t.Context())
		must.True(t, errors.Is(err, broken), "%s: error %v; want %v", typ, err, broken)
	}
}

// SO_MARK needs CAP_NET_ADMIN. Without it the dial fails, rather than send unmarked packets.
func TestMarkIsSet(t *testing.T) {
	l := listen(t)
	c := lb.Check{Target: targetOf(l.Addr()), VIP: netip.MustParseAddr("127.0.0.1")}
	from := netip.MustParseAddr("127.0.0.3")
	way := func(lb.Check) (Way, error) { return Way{Mark: 7, From: from}, nil }
	d, to, err := target{Check: c, way: way}.dialer("tcp")
	must.Do(t, err)
	conn, err := d.DialContext(t.Context(), "tcp", to.String())
	if os.Geteuid() != 0 {
		must.True(t, errors.Is(err, syscall.EPERM), "error %v; want EPERM", err)
		return
	}
	must.Do(t, err)
	defer conn.Close()
	raw := must.Get(conn.(*net.TCPConn).SyscallConn())(t)
	var mark int
	var failed error
	err = raw.Control(func(fd uintptr) {
		mark, failed = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_MARK)
	})
	must.True(t, err == nil && failed == nil && mark == 7, "mark %d, %v, %v; want 7", mark, err, failed)
	got := conn.LocalAddr().(*net.TCPAddr).IP.String()
	must.True(t, got == from.String(), "from %s; want %s", got, from)
}

// An HTTP check of a service with several ports probes each of them. Except on the first port, it accepts other
// protocols.
func TestSecondaryPorts(t *testing.T) {
	serve := func(start func(*httptest.Server), status int) netip.AddrPort {
		s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
		}))
		start(s)
		t.Cleanup(s.Close)
		return targetOf(s.Listener.Addr())
	}
	converse := func(talk func(net.Conn)) netip.AddrPort {
		l := listen(t)
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go talk(c)
			}
		}()
		return targetOf(l.Addr())
	}
	echo := converse(func(c net.Conn) { io.Copy(c, c); c.Close() })
	for _, tt := range []struct {
		name  string
		typ   lb.CheckType
		to    netip.AddrPort
		want  string // at a secondary port
		first string // at the first port; "" if the same
	}{
		{"HTTP", lb.CheckHTTP, serve((*httptest.Server).Start, 200), "ok: HTTP 200", ""},
		{"HTTP with an error", lb.CheckHTTP, serve((*httptest.Server).Start, 500), "HTTP 500, want 200-399", ""},
		{"HTTPS", lb.CheckHTTP, serve((*httptest.Server).StartTLS, 204), "ok: HTTP 204", "HTTP 400, want 200-399"},
		{"HTTPS with an error", lb.CheckHTTP, serve((*httptest.Server).StartTLS, 503), "HTTP 503, want 200-399",
			"HTTP 400, want 200-399"},
		{"HTTP, with an https check", lb.CheckHTTPS, serve((*httptest.Server).Start, 200), "ok: HTTP 200",
			"tls: first record does not look like a TLS handshake"},
		{"another protocol", lb.CheckHTTP, echo, "ok: connected, not HTTP", "not HTTP: malformed status code"},
		{"no response", lb.CheckHTTP, silent(t), "no response within 300ms", ""},
		{"closed", lb.CheckHTTP, closedPort(t), "connection refused", ""},
		{"another protocol, with a gRPC check", lb.CheckGRPC, echo, "ok: connected, no gRPC health service", "gRPC "},
		{"closed, with a gRPC check", lb.CheckGRPC, closedPort(t), "connection refused", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			first, other := lb.Port{Port: 80, Target: 80}, lb.Port{Port: 443, Target: tt.to.Port()}
			c := lb.Check{Key: lb.CheckKey{Port: other}, Target: tt.to}
			c.Spec = lb.CheckSpec{Type: tt.typ, Path: "/", ServicePort: first}
			if tt.typ == lb.CheckGRPC {
				c.Spec.Path = ""
			}
			must.Equal(t, tt.want, probeFor(t, c, tt.want))
			want := tt.first
			if want == "" {
				want = tt.want
			}
			c.Spec.ServicePort = other
			got := probeFor(t, c, want)
			must.True(t, strings.HasPrefix(got, want), "first port: %q; want %q", got, want)
		})
	}
}

// The connection is reset, so that the server does not keep it.
func TestTCPResets(t *testing.T) {
	l := listen(t)
	c := lb.Check{Target: targetOf(l.Addr()), Spec: lb.CheckSpec{Type: lb.CheckTCP}}
	must.Equal(t, "ok: connected", probeFor(t, c, ""))
	conn := must.Get(l.Accept())(t)
	defer conn.Close()
	conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	_, err := conn.Read(make([]byte, 1))
	must.True(t, errors.Is(err, syscall.ECONNRESET), "the server reads %v; want a reset", err)
}

// On loopback, the kernel replies as a node's datapath does for the VIP.
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

// A UDP probe ends with its context, even before its deadline.
func TestUDPEndsWithContext(t *testing.T) {
	at := udpServer(t, func([]byte) []byte { return nil })
	ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
	time.AfterFunc(50*time.Millisecond, cancel)
	began := time.Now()
	r, err := udpChecker{target{Check: lb.Check{Target: at}}}.Probe(ctx)
	took := time.Since(began)
	must.True(t, err != nil && took <= 10*time.Second, "%+v, %v after %s; want an error", r, err, took)
}

// The query is for an address of the target's family, and is repeated over TCP after a truncated response.
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

// Only a program's first 1,024 bytes of output are kept, however they arrive.
func TestFirstKiB(t *testing.T) {
	text := strings.Repeat("0123456789", 200)
	for _, r := range []io.Reader{strings.NewReader(text), iotest.OneByteReader(strings.NewReader(text))} {
		var k firstKiB
		must.Equal(t, 2000, must.Get(io.Copy(&k, r))(t))
		got := k.kept.String()
		must.True(t, got == text[:1024], "%d bytes kept; want the first 1024", len(got))
	}
}

// gRPC's log about a server's frames does not reach stderr.
func TestGRPCIsSilent(t *testing.T) {
	file := must.Get(os.Create(t.TempDir() + "/stderr"))(t)
	defer file.Close()
	stderr := must.Get(unix.Dup(2))(t)
	defer unix.Close(stderr)
	must.Do(t, unix.Dup2(int(file.Fd()), 2))
	grpclog.Error("too_many_pings")
	must.Do(t, unix.Dup2(stderr, 2))
	text := must.Get(os.ReadFile(file.Name()))(t)
	must.True(t, !strings.Contains(string(text), "too_many_pings"), "stderr: %s", text)
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
		t.Errorf("the first byte is %d; want a TLS handshake's", b)
	}
}

// listenAs returns a listener whose socket belongs to a user.
func listenAs(t *testing.T, uid int, address string) net.Listener {
	t.Helper()
	var l net.Listener
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // the thread, which alone has the user, ends with this goroutine
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

// A check that trusts only root ignores responses from another user, because any user can listen on the port of
// kube-proxy's health endpoint. If no socket is found, the response counts.
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
