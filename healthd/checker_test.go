package healthd

import (
	"context"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestEveryTypeHasAChecker(t *testing.T) {
	for _, typ := range lb.CheckTypes {
		_, ok := checkers[typ]
		must.True(t, ok != (typ == lb.CheckNone), "%s: has a checker: %v", typ, ok)
	}
}

// probeFor calls probeOnce with a timeout that suits the wanted result: a short one if the test is about the timeout.
func probeFor(t *testing.T, c lb.Check, want string) string {
	t.Helper()
	c.Spec.Timeout = 20 * time.Second
	if strings.HasPrefix(want, "no response") || want == "ok: no error received" {
		c.Spec.Timeout = 300 * time.Millisecond
	}
	return probeOnce(t, c)
}

// wantProbe fails the test unless a probe has this result.
func wantProbe(t *testing.T, c lb.Check, want string) {
	t.Helper()
	must.Equal(t, want, probeFor(t, c, want))
}

// probeOnce probes like the Prober. It returns "ok: reason", or the reason for the failure.
func probeOnce(t *testing.T, c lb.Check) string {
	t.Helper()
	if c.Spec.Status == nil {
		c.Spec.Status = []lb.StatusRange{{From: 200, To: 399}}
	}
	ctx, cancel := context.WithTimeout(t.Context(), c.Spec.Timeout)
	defer cancel()
	start := time.Now()
	r, err := checkers[c.Spec.Type](target{Check: c}).Probe(ctx)
	took := time.Since(start)
	must.True(t, took <= c.Spec.Timeout+2*time.Second, "took %s; the timeout is %s", took, c.Spec.Timeout)
	if err != nil {
		return reason(err, c.Spec.Timeout)
	}
	if c.Spec.Type != lb.CheckNodePort && r.Weight != -1 {
		t.Errorf("weight %d; want none", r.Weight)
	}
	return "ok: " + r.Reason
}

func targetOf(a net.Addr) netip.AddrPort { return netip.MustParseAddrPort(a.String()) }

func listen(t testing.TB) net.Listener {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	t.Cleanup(func() { l.Close() })
	return l
}

// closedPort returns an address without a listener.
func closedPort(t *testing.T) netip.AddrPort {
	l := listen(t)
	defer l.Close()
	return targetOf(l.Addr())
}

// silent returns an address that accepts connections but sends nothing.
func silent(t *testing.T) netip.AddrPort { return targetOf(listen(t).Addr()) }

func TestHTTP(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/503":
			w.WriteHeader(503)
		case "/weight":
			w.Header().Set("X-Load-Balancing-Endpoint-Weight", "3")
		case "/badweight":
			w.Header().Set("X-Load-Balancing-Endpoint-Weight", "many")
		case "/redirect":
			http.Redirect(w, r, "/503", http.StatusFound)
		case "/at/65533", "/at/65534":
			n, _ := strconv.ParseInt(strings.TrimPrefix(r.URL.Path, "/at/"), 10, 64)
			io.CopyN(w, zeros{}, n)
			io.WriteString(w, "end")
		case "/service":
			io.WriteString(w, `{"service": {"namespace": "default", "name": "web"}, "localEndpoints": 1}`)
		case "/negative":
			w.Header().Set("X-Load-Balancing-Endpoint-Weight", "-1")
		case "/huge":
			w.Header().Set("X-Load-Balancing-Endpoint-Weight", "9223372036854775807")
		case "/zero":
			w.Header().Set("X-Load-Balancing-Endpoint-Weight", "0")
		case "/big":
			io.CopyN(w, zeros{}, 1<<20)
		default:
			fmt.Fprintf(w, "host=%s agent=%s q=%s", r.Host, r.UserAgent(), r.URL.RawQuery)
		}
	})
	plain, tls := httptest.NewServer(h), httptest.NewTLSServer(h)
	t.Cleanup(plain.Close)
	t.Cleanup(tls.Close)
	at, tlsAt := targetOf(plain.Listener.Addr()), targetOf(tls.Listener.Addr())
	for _, tt := range []struct {
		name string
		at   netip.AddrPort
		spec lb.CheckSpec
		want string
	}{
		{"good", at, lb.CheckSpec{Type: lb.CheckHTTP, Path: "/?x=1", Host: "web.example",
			Body: "host=web.example agent=steelyard-health q=x=1"}, "ok: HTTP 200"},
		{"bad status", at, lb.CheckSpec{Type: lb.CheckHTTP, Path: "/503"}, "HTTP 503, want 200-399"},
		{"expected status", at, lb.CheckSpec{Type: lb.CheckHTTP, Path: "/503",
			Status: []lb.StatusRange{{From: 503, To: 503}}}, "ok: HTTP 503"},
		{"status in no range", at, lb.CheckSpec{Type: lb.CheckHTTP, Path: "/503",
			Status: []lb.StatusRange{{From: 200, To: 200}, {From: 301, To: 308}}}, "HTTP 503, want 200,301-308"},
		{"redirect is not followed", at, lb.CheckSpec{Type: lb.CheckHTTP, Path: "/redirect"}, "ok: HTTP 302"},
		{"bad body", at, lb.CheckSpec{Type: lb.CheckHTTP, Path: "/", Body: "xyz"},
			`HTTP 200, body does not contain "xyz"`},
		{"big body", at, lb.CheckSpec{Type: lb.CheckHTTP, Path: "/big"}, "ok: HTTP 200"},
		{"body within 64 KiB", at, lb.CheckSpec{Type: lb.CheckHTTP, Path: "/at/65533", Body: "end"}, "ok: HTTP 200"},
		{"body after 64 KiB", at, lb.CheckSpec{Type: lb.CheckHTTP, Path: "/at/65534", Body: "end"},
			`HTTP 200, body does not contain "end"`},
		{"bad path", at, lb.CheckSpec{Type: lb.CheckHTTP, Path: "%zz"},
			`path "%zz": parse "%zz": invalid URL escape "%zz"`},
		{"refused", closedPort(t), lb.CheckSpec{Type: lb.CheckHTTP, Path: "/"}, "connection refused"},
		{"silent", silent(t), lb.CheckSpec{Type: lb.CheckHTTP, Path: "/"}, "no response within 300ms"},
		{"https", tlsAt, lb.CheckSpec{Type: lb.CheckHTTPS, Path: "/"}, "ok: HTTP 200"},
		{"https to plain", at, lb.CheckSpec{Type: lb.CheckHTTPS, Path: "/"},
			"tls: first record does not look like a TLS handshake"},
		{"https, unknown authority", tlsAt, lb.CheckSpec{Type: lb.CheckHTTPS, Path: "/", TLSServerName: "example.com"},
			"tls: failed to verify certificate: x509: certificate signed by unknown authority"},
		{"https, silent", silent(t), lb.CheckSpec{Type: lb.CheckHTTPS, Path: "/"}, "no response within 300ms"},
		{"node port", at, lb.CheckSpec{Type: lb.CheckNodePort, Path: "/weight"}, "ok: HTTP 200, 3 endpoints"},
		{"node port, no endpoint", at, lb.CheckSpec{Type: lb.CheckNodePort, Path: "/503"},
			"HTTP 503: the node has no endpoint, or its proxy is not healthy"},
		{"node port, something else", at, lb.CheckSpec{Type: lb.CheckNodePort, Path: "/redirect"},
			"HTTP 302: not a health check node port"},
		{"node port, bad weight", at, lb.CheckSpec{Type: lb.CheckNodePort, Path: "/badweight"},
			`X-Load-Balancing-Endpoint-Weight is "many", want a number from 0 to 1000`},
		{"node port, negative weight", at, lb.CheckSpec{Type: lb.CheckNodePort, Path: "/negative"},
			`X-Load-Balancing-Endpoint-Weight is "-1", want a number from 0 to 1000`},
		{"node port, weight too large", at, lb.CheckSpec{Type: lb.CheckNodePort, Path: "/huge"},
			`X-Load-Balancing-Endpoint-Weight is "9223372036854775807", want a number from 0 to 1000`},
		{"node port, weight 0", at, lb.CheckSpec{Type: lb.CheckNodePort, Path: "/zero"}, "ok: HTTP 200, 0 endpoints"},
		{"node port, no weight", at, lb.CheckSpec{Type: lb.CheckNodePort, Path: "/service"}, "ok: HTTP 200"},
		{"node port, right service", at, lb.CheckSpec{Type: lb.CheckNodePort, Path: "/service", Body: "default/web"},
			"ok: HTTP 200"},
		{"node port, other service", at, lb.CheckSpec{Type: lb.CheckNodePort, Path: "/service", Body: "default/api"},
			`HTTP 200, the response is about a different service: "default/web"`},
		{"node port, no JSON", at, lb.CheckSpec{Type: lb.CheckNodePort, Path: "/?x", Body: "default/api"},
			fmt.Sprintf(`HTTP 200, the response is about a different service: "host=%s agent=steelyard-health q=x"`,
				at)},
	} {
		t.Run(tt.name, func(t *testing.T) { wantProbe(t, lb.Check{Target: tt.at, Spec: tt.spec}, tt.want) })
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

// udpServer replies to each datagram with the result of reply; a nil result means no reply.
func udpServer(t testing.TB, reply func([]byte) []byte) netip.AddrPort {
	c := must.Get(net.ListenPacket("udp", "127.0.0.1:0"))(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 1500)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			if out := reply(b[:n]); out != nil {
				c.WriteTo(out, from)
			}
		}
	}()
	t.Cleanup(func() { c.Close(); <-done })
	return targetOf(c.LocalAddr())
}

func TestUDP(t *testing.T) {
	echo := udpServer(t, func(b []byte) []byte { return append([]byte("re: "), b...) })
	silent := udpServer(t, func([]byte) []byte { return nil })
	c := must.Get(net.ListenPacket("udp", "127.0.0.1:0"))(t)
	closed := targetOf(c.LocalAddr())
	c.Close()
	for _, tt := range []struct {
		name string
		at   netip.AddrPort
		spec lb.CheckSpec
		want string
	}{
		{"response", echo, lb.CheckSpec{Send: "ping", Body: "re: ping"}, "ok: response received"},
		{"wrong response", echo, lb.CheckSpec{Send: "ping", Body: "pong"}, "no response within 300ms"},
		{"any response", echo, lb.CheckSpec{Send: "ping"}, "ok: response received"},
		{"silence is success", silent, lb.CheckSpec{Send: "ping"}, "ok: no error received"},
		{"silence when a response is required", silent, lb.CheckSpec{Send: "ping", Body: "pong"},
			"no response within 300ms"},
		{"port unreachable", closed, lb.CheckSpec{Send: "ping"}, "connection refused"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.spec.Type = lb.CheckUDP
			wantProbe(t, lb.Check{Target: tt.at, Spec: tt.spec}, tt.want)
		})
	}
}

func TestDNS(t *testing.T) {
	reply := func(b []byte) []byte {
		q, m := new(dns.Msg), new(dns.Msg)
		if q.Unpack(b) != nil {
			return nil
		}
		m.SetReply(q)
		switch q.Question[0].Name {
		case "web.example.":
			rr, _ := dns.NewRR("web.example. 60 IN A 192.0.2.7")
			m.Answer = append(m.Answer, rr)
		case ".":
		default:
			m.Rcode = dns.RcodeNameError
		}
		out, _ := m.Pack()
		return out
	}
	at, silent := udpServer(t, reply), udpServer(t, func([]byte) []byte { return nil })
	for _, tt := range []struct {
		at               netip.AddrPort
		host, body, want string
	}{
		{at, "", "", "ok: DNS NOERROR"},
		{at, "web.example", "192.0.2.7", "ok: DNS NOERROR"},
		{at, "web.example", "192.0.2.8", `DNS answer does not contain "192.0.2.8"`},
		{at, "nowhere.example", "", "DNS NXDOMAIN"},
		{silent, "", "", "no response within 300ms"},
	} {
		t.Run(tt.host+" "+tt.want, func(t *testing.T) {
			spec := lb.CheckSpec{Type: lb.CheckDNS, Host: tt.host, Body: tt.body}
			wantProbe(t, lb.Check{Target: tt.at, Spec: spec}, tt.want)
		})
	}
}

func TestGRPC(t *testing.T) {
	l, h, s := listen(t), health.NewServer(), grpc.NewServer()
	healthpb.RegisterHealthServer(s, h)
	h.SetServingStatus("down", healthpb.HealthCheckResponse_NOT_SERVING)
	done := make(chan error)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() { s.Stop(); <-done })
	for _, tt := range []struct {
		at         netip.AddrPort
		path, want string
	}{
		{targetOf(l.Addr()), "", "ok: SERVING"},
		{targetOf(l.Addr()), "down", "NOT_SERVING"},
		{targetOf(l.Addr()), "other", "gRPC NotFound: unknown service"},
		{silent(t), "", "no response within 300ms"},
		{closedPort(t), "", "connection refused"},
	} {
		t.Run(tt.want, func(t *testing.T) {
			spec := lb.CheckSpec{Type: lb.CheckGRPC, Path: tt.path}
			got := probeFor(t, lb.Check{Target: tt.at, Spec: spec}, tt.want)
			got, _, _ = strings.Cut(got, ": connection error")
			must.Equal(t, tt.want, got)
		})
	}
}

func TestNodePortWithoutWeight(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	t.Cleanup(s.Close)
	c := lb.Check{Target: targetOf(s.Listener.Addr()), Spec: lb.CheckSpec{Type: lb.CheckNodePort, Path: "/"}}
	r, err := checkers[lb.CheckNodePort](target{Check: c}).Probe(t.Context())
	must.True(t, err == nil && r == (Result{Reason: "HTTP 200", Weight: -1}), "%+v, %v; want no weight", r, err)
}

// The servers respond with the protocol and the server name from the TLS handshake. Their certificate is for
// example.com.
func TestHTTPOverTLSAndHTTP2(t *testing.T) {
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := ""
		if r.TLS != nil {
			name = r.TLS.ServerName
		}
		fmt.Fprintf(w, "%s name=%s host=%s", r.Proto, name, r.Host)
	})
	serve := func(tls bool, protocols ...func(*http.Protocols, bool)) *httptest.Server {
		s := httptest.NewUnstartedServer(h)
		s.Config.Protocols = new(http.Protocols)
		for _, set := range protocols {
			set(s.Config.Protocols, true)
		}
		if s.EnableHTTP2 = s.Config.Protocols.HTTP2(); tls {
			s.StartTLS()
		} else {
			s.Start()
		}
		t.Cleanup(s.Close)
		return s
	}
	http1 := serve(true, (*http.Protocols).SetHTTP1)
	http2 := serve(true, (*http.Protocols).SetHTTP2)
	plain := serve(false, (*http.Protocols).SetHTTP1)
	h2c := serve(false, (*http.Protocols).SetUnencryptedHTTP2)
	ca := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: http1.Certificate().Raw}))
	for _, tt := range []struct {
		name   string
		server *httptest.Server
		spec   lb.CheckSpec
		want   string
	}{
		{"the host is the name of the handshake", http1, lb.CheckSpec{Type: lb.CheckHTTPS, Host: "www.example.com:443",
			Body: "HTTP/1.1 name=www.example.com host=www.example.com:443"}, "ok: HTTP 200"},
		{"without a host no name is sent", http1, lb.CheckSpec{Type: lb.CheckHTTPS, Body: "HTTP/1.1 name= host"},
			"ok: HTTP 200"},
		{"a server of HTTP/2 only", http2, lb.CheckSpec{Type: lb.CheckHTTPS, Body: "HTTP/2.0"}, "ok: HTTP 200"},
		{"own authority", http1, lb.CheckSpec{Type: lb.CheckHTTPS, TLSServerName: "example.com", TLSCA: ca},
			"ok: HTTP 200"},
		{"own authority, name of the host", http1, lb.CheckSpec{Type: lb.CheckHTTPS, Host: "example.com", TLSCA: ca,
			Body: "host=example.com"}, "ok: HTTP 200"},
		{"own authority, other name", http1, lb.CheckSpec{Type: lb.CheckHTTPS, Host: "example.net", TLSCA: ca},
			"tls: failed to verify certificate: x509: " +
				"certificate is valid for example.com, *.example.com, not example.net"},
		{"HTTP/2 without TLS", h2c, lb.CheckSpec{Type: lb.CheckHTTP2, Body: "HTTP/2.0"}, "ok: HTTP 200"},
		{"http2 to a server of HTTP/1", plain, lb.CheckSpec{Type: lb.CheckHTTP2}, "not HTTP/2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.spec.Path = "/"
			c := lb.Check{Target: targetOf(tt.server.Listener.Addr()), Spec: tt.spec}
			wantProbe(t, c, tt.want)
		})
	}
}
