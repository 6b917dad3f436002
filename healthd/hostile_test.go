package healthd

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
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

const escape = "\x1b[2J\u009b1A"

// answering returns the address of a server that does this with each connection.
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

// saying returns the address of a server that answers a request with this text, and then sends another again and again.
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

// named returns the address of a server whose certificate has this name.
func named(t *testing.T, name string) netip.AddrPort {
	public, private, err := ed25519.GenerateKey(rand.Reader)
	must.Do(t, err)
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{name},
	}
	der := must.Get(x509.CreateCertificate(rand.Reader, c, c, public, private))(t)
	s := httptest.NewUnstartedServer(http.NotFoundHandler())
	s.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: private}}}
	s.StartTLS()
	t.Cleanup(s.Close)
	return targetOf(s.Listener.Addr())
}

// unavailable is a gRPC health service that is not available for this reason.
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

// flooding returns the address of a server that answers a datagram with many.
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

// Of an answer only what is needed is read, and the reason of a failure is a short printable line.
func TestHostileAnswers(t *testing.T) {
	web := func(body string) lb.CheckSpec { return lb.CheckSpec{Type: lb.CheckHTTP, Path: "/", Body: body} }
	const head = "HTTP/1.1 200 OK\r\n"
	for name, tt := range map[string]struct {
		at   netip.AddrPort
		spec lb.CheckSpec
		want string // the beginning
	}{
		"not HTTP": {saying(t, "\x00\xff"+escape+"\r\n\r\n", ""), web(""),
			`not HTTP: malformed response "\x00\xff`},
		"endless headers": {saying(t, head, "X: y\r\n"), web(""),
			"server response headers exceeded 65536 bytes; aborted"},
		"endless body":        {saying(t, head+"\r\n", "."), web(""), "ok: HTTP 200"},
		"endless body, other": {saying(t, head+"\r\n", "."), web("x"), `HTTP 200, body does not contain "x"`},
		"another protocol, then silence": {answering(t, func(c net.Conn) {
			c.Read(make([]byte, 4096)) // an answer before the request is "sent before the request"
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
			if !strings.HasPrefix(got, tt.want) || utf8.RuneCountInString(got) > 201 {
				t.Errorf("%q (%d runes); want %q", got, utf8.RuneCountInString(got), tt.want)
			}
			must.True(t, !strings.ContainsFunc(got, func(r rune) bool { return !unicode.IsPrint(r) }),
				"%q is not printable", got)
		})
	}
}
