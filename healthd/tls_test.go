package healthd

import (
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
)

// The servers respond with the protocol and the name of the TLS handshake. Their certificate is for example.com.
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
