package healthd

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

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
		if err != nil || to.String() != tt.to {
			t.Fatalf("%s: to %v, %v; want %s", tt.name, to, err, tt.to)
		}
		local := "<nil>"
		if d.LocalAddr != nil {
			local = d.LocalAddr.String()
			must.Row(t, tt.name, tt.network, d.LocalAddr.Network())
		}
		must.True(t, local == tt.local && (d.Control != nil) == tt.vip.IsValid(),
			"%s: from %s, sets a mark: %t", tt.name, local, d.Control != nil)
	}
}

// Without a path to the server no probe of a VIP is sent.
func TestDialerWithoutPath(t *testing.T) {
	broken := errors.New("no such server")
	c := lb.Check{Target: netip.MustParseAddrPort("10.0.0.1:80"), VIP: netip.MustParseAddr("203.0.113.10")}
	for typ, checker := range checkers {
		if typ == lb.CheckExec || typ == lb.CheckNodePort {
			continue // they use the server's own address
		}
		way := func(lb.Check) (Way, error) { return Way{}, broken }
		_, err := checker(target{Check: c, way: way}).Probe(t.Context())
		must.True(t, errors.Is(err, broken), "%s: error %v; want %v", typ, err, broken)
	}
}

// SO_MARK needs CAP_NET_ADMIN: without it the dial fails, and is not sent unmarked.
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
	if err := raw.Control(func(fd uintptr) {
		mark, failed = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_MARK)
	}); err != nil || failed != nil || mark != 7 {
		t.Errorf("mark %d, %v, %v; want 7", mark, err, failed)
	}
	if got := conn.LocalAddr().(*net.TCPAddr).IP.String(); got != from.String() {
		t.Errorf("from %s; want %s", got, from)
	}
}

// An HTTP check of a service with several ports probes each of them, and accepts other protocols where they respond.
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
		first string // at the first port; "": the same
	}{
		{"HTTP", lb.CheckHTTP, serve((*httptest.Server).Start, 200), "ok: HTTP 200", ""},
		{"HTTP with an error", lb.CheckHTTP, serve((*httptest.Server).Start, 500), "HTTP 500, want 200-399", ""},
		{"HTTPS", lb.CheckHTTP, serve((*httptest.Server).StartTLS, 204), "ok: HTTP 204", "HTTP 400, want 200-399"},
		{"HTTPS with an error", lb.CheckHTTP, serve((*httptest.Server).StartTLS, 503), "HTTP 503, want 200-399",
			"HTTP 400, want 200-399"},
		{"HTTP, with an https check", lb.CheckHTTPS, serve((*httptest.Server).Start, 200), "ok: HTTP 200",
			"tls: first record does not look like a TLS handshake"},
		{"another protocol", lb.CheckHTTP, echo, "ok: connected, not HTTP",
			"not HTTP: malformed status code"},
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
			if got := probeFor(t, c, want); !strings.HasPrefix(got, want) {
				t.Errorf("first port: %q; want %q", got, want)
			}
		})
	}
}
