package healthd

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
)

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
			if got := probeFor(t, c, tt.want); got != tt.want {
				t.Errorf("secondary port: %q; want %q", got, tt.want)
			}
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
