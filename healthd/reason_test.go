package healthd

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestReason(t *testing.T) {
	dial := func(err error) error { return &net.OpError{Op: "dial", Net: "tcp", Err: err} }
	for _, tt := range []struct {
		err  error
		want string
	}{
		{context.DeadlineExceeded, "no response within 1s"},
		{fmt.Errorf("read: %w", os.ErrDeadlineExceeded), "no response within 1s"},
		{dial(syscall.ETIMEDOUT), "no response within 1s"},
		{dial(os.NewSyscallError("connect", syscall.ECONNREFUSED)), "connection refused"},
		{dial(syscall.ECONNRESET), "connection reset"},
		{dial(syscall.EHOSTUNREACH), "no route to host"},
		{dial(syscall.ENETUNREACH), "network unreachable"},
		{io.EOF, "connection closed without a response"},
		{fmt.Errorf("read: %w", io.ErrUnexpectedEOF), "connection closed without a response"},
		{fmt.Errorf("outer: %w", dial(errors.New("inner"))), "inner"},
		{errors.New("first line\nsecond line"), "first line"},
		{dial(errors.New("\x1b[2JOK")), "�[2JOK"},
		{errors.New("readLoopPeekFailLocked: %!w(<nil>)"), "sent before the request"}, // from net/http
		{errors.New(strings.Repeat("x", 1<<20)), strings.Repeat("x", 200) + "…"},
	} {
		must.Row(t, tt.err, tt.want, reason(tt.err, time.Second))
	}
}

// A report contains the probe's error, so that receivers need not parse the reason.
func TestReportCarriesTheError(t *testing.T) {
	open, closed := silent(t), closedPort(t)
	reports := make(chan lb.Health, 2)
	p := New(Options{Report: func(h lb.Health) { reports <- h }, Log: slog.New(slog.DiscardHandler)})
	must.Run(t, p.Run)
	spec := lb.CheckSpec{Type: lb.CheckTCP, Interval: time.Hour, Timeout: 10 * time.Second, Rise: 1, Fall: 1}
	for _, target := range []netip.AddrPort{open, closed} {
		key := lb.CheckKey{Service: target.String(), Backend: target}
		p.Put(key.Service, []lb.Check{{Key: key, Target: target, Spec: spec}})
	}
	for range 2 {
		h := <-reports
		refused := errors.Is(h.Err, syscall.ECONNREFUSED)
		if want := h.Key.Backend == closed; refused != want || (h.Err != nil) != want {
			t.Errorf("%v, %s: error %v; refused: want %t", h.Key.Backend, h.State, h.Err, want)
		}
	}
}

// hangs is a Checker for a server that does not respond.
type hangs struct{}

func (hangs) Probe(ctx context.Context) (Result, error) {
	<-ctx.Done()
	return Result{}, ctx.Err()
}

// A server that responds at its own address, but not at the VIP, probably lacks the VIP.
func TestServerWithoutTheVIP(t *testing.T) {
	vip := netip.MustParseAddr("203.0.113.10")
	const itself = ", but the server answers at its own address: is 203.0.113.10 on its interface lo?"
	spec := lb.CheckSpec{Type: lb.CheckTCP, Interval: time.Second, Timeout: time.Second, Rise: 1, Fall: 1}
	for _, row := range []struct {
		check lb.Check
		want  string
	}{
		{lb.Check{Target: targetOf(listen(t).Addr()), VIP: vip}, itself},
		{lb.Check{Target: netip.MustParseAddrPort("127.0.0.1:1"), VIP: vip}, itself}, // refused
		{lb.Check{Target: targetOf(listen(t).Addr())}, ""},
	} {
		reports := make(chan lb.Health, 100)
		p := New(Options{Report: func(h lb.Health) { reports <- h }, Log: slog.New(slog.DiscardHandler)})
		p.make = func(lb.Check) Checker { return hangs{} }
		row.check.Spec = spec
		p.Put("web", []lb.Check{row.check})
		stop := must.Run(t, p.Run)
		reason := (<-reports).Reason
		for strings.HasPrefix(reason, "this node lacks CPU") { // a probe was late, and says nothing
			reason = (<-reports).Reason
		}
		name := fmt.Sprintf("%s, VIP %s", row.check.Target, row.check.VIP)
		must.Row(t, name, "no response within 1s"+row.want, reason)
		stop()
	}
}

const escape = "\x1b[2J\u009b1A"

// answering returns the address of a server that calls do for each connection.
func answering(t testing.TB, do func(net.Conn)) netip.AddrPort {
	l := listen(t)
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				do(c)
			}()
		}
	}()
	return targetOf(l.Addr())
}

// saying returns the address of a server that responds to a request with once, and then sends again repeatedly.
func saying(t *testing.T, once, again string) netip.AddrPort {
	return answering(t, func(c net.Conn) {
		_, err := c.Read(make([]byte, 4096))
		if err == nil {
			_, err = io.WriteString(c, once)
		}
		for err == nil && again != "" {
			_, err = io.WriteString(c, again)
		}
	})
}

// named returns the address of a server whose certificate is for this name.
func named(t *testing.T, name string) netip.AddrPort {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	must.Do(t, err)
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{name}}
	der := must.Get(x509.CreateCertificate(rand.Reader, c, c, public, private))(t)
	s := httptest.NewUnstartedServer(http.NotFoundHandler())
	s.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: private}}}
	s.StartTLS()
	t.Cleanup(s.Close)
	return targetOf(s.Listener.Addr())
}

// unavailable is a gRPC health service that fails with this reason.
type unavailable struct {
	healthpb.UnimplementedHealthServer
	reason string
}

func (u unavailable) Check(context.Context, *healthpb.HealthCheckRequest) (*healthpb.HealthCheckResponse, error) {
	return nil, status.Error(codes.Unavailable, u.reason)
}

func sayingByGRPC(t *testing.T, reason string) netip.AddrPort {
	l, s := listen(t), grpc.NewServer()
	healthpb.RegisterHealthServer(s, unavailable{reason: reason})
	done := make(chan error)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	return targetOf(l.Addr())
}

// flooding returns the address of a server that responds to a datagram with many.
func flooding(t *testing.T) netip.AddrPort {
	c := must.Get(net.ListenPacket("udp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { c.Close() })
	go func() {
		b := make([]byte, 1500)
		for {
			_, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			for range 1000 {
				c.WriteTo([]byte("noise"), from)
			}
		}
	}()
	return targetOf(c.LocalAddr())
}

// A probe reads only the necessary part of a response, and the reason for a failure is a short printable line.
func TestHostileAnswers(t *testing.T) {
	web := func(body string) lb.CheckSpec { return lb.CheckSpec{Type: lb.CheckHTTP, Path: "/", Body: body} }
	const head = "HTTP/1.1 200 OK\r\n"
	for name, tt := range map[string]struct {
		at   netip.AddrPort
		spec lb.CheckSpec
		want string // the beginning of the reason
	}{
		"not HTTP": {saying(t, "\x00\xff"+escape+"\r\n\r\n", ""), web(""),
			`not HTTP: malformed response "\x00\xff`},
		"endless headers": {saying(t, head, "X: y\r\n"), web(""),
			"server response headers exceeded 65536 bytes; aborted"},
		"endless body":        {saying(t, head+"\r\n", "."), web(""), "ok: HTTP 200"},
		"endless body, other": {saying(t, head+"\r\n", "."), web("x"), `HTTP 200, body does not contain "x"`},
		"another protocol, then silence": {answering(t, func(c net.Conn) {
			c.Read(make([]byte, 4096)) // a response before the request would be "sent before the request"
			io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
			io.Copy(io.Discard, c)
		}), web("x"), "HTTP 101, want 200-399"},
		"name in certificate": {named(t, "\x1b[2J"+strings.Repeat("x", 50000)),
			lb.CheckSpec{Type: lb.CheckHTTPS, Path: "/", TLSServerName: "example.net"},
			"tls: failed to verify certificate: x509: certificate is valid for �[2Jxxx"},
		"gRPC message": {sayingByGRPC(t, escape+strings.Repeat("x", 1000)), lb.CheckSpec{Type: lb.CheckGRPC},
			"gRPC Unavailable: �[2J�1Axxx"},
		"gRPC, endless message": {sayingByGRPC(t, strings.Repeat("x", 1<<20)), lb.CheckSpec{Type: lb.CheckGRPC},
			"gRPC Internal: "},
		"flood of datagrams": {flooding(t), lb.CheckSpec{Type: lb.CheckUDP, Send: "ping", Body: "pong"},
			`16 datagrams without "pong"`},
	} {
		t.Run(name, func(t *testing.T) {
			got := probeFor(t, lb.Check{Target: tt.at, Spec: tt.spec}, tt.want)
			must.True(t, strings.HasPrefix(got, tt.want) && utf8.RuneCountInString(got) <= 201,
				"%q (%d runes); want %q", got, utf8.RuneCountInString(got), tt.want)
			must.True(t, !strings.ContainsFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }),
				"%q is not printable", got)
		})
	}
}
