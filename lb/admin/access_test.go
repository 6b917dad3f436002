package admin

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// If a token is set, requests over TCP need it, except to /healthz. A refused request for / receives the page, which
// asks for it.
func TestToken(t *testing.T) {
	o := options(t)
	o.Access.Token = "a token of a test"
	s := New(o)
	h := s.public()
	get := func(path, authorization string) *httptest.ResponseRecorder {
		r := request(path)
		if authorization != "" {
			r.Header.Set("Authorization", authorization)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	for _, tt := range []struct {
		path, authorization string
		want                int
	}{
		{"/v1/status", "", 401}, {"/metrics", "", 401}, {"/", "", 401}, {"/healthz/", "", 401}, {"/healthz", "", 200},
		{"/v1/status", "Bearer a token of a test", 200}, {"/", "bearer a token of a test", 200},
		{"/v1/status", "Bearer a token of a tes", 401}, {"/v1/status", "Basic a token of a test", 401},
	} {
		w := get(tt.path, tt.authorization)
		if w.Code != tt.want || tt.want == 401 && w.Header().Get("WWW-Authenticate") != "Bearer" {
			t.Errorf("%s with %q: %d, %v; want %d", tt.path, tt.authorization, w.Code, w.Header(), tt.want)
		}
		isPage := strings.Contains(w.Body.String(), `<form id="login"`)
		must.True(t, isPage == (tt.path == "/"), "%s with %q: %s", tt.path, tt.authorization, w.Body)
	}
	s.SetAccess(Access{Token: "another"})
	must.Row(t, "the token of a reload", 200, get("/v1/status", "Bearer another").Code)
}

// A browser runs only the script and the style of the page, and shows it in no other page.
func TestContentSecurityPolicy(t *testing.T) {
	h := New(options(t)).public()
	for _, path := range []string{"/", "/v1/status", "/none"} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, request(path))
		policy := w.Header().Get("Content-Security-Policy")
		for _, want := range []string{
			"default-src 'none'", "script-src 'sha256-", "style-src 'sha256-", "frame-ancestors 'none'",
		} {
			must.True(t, strings.Contains(policy, want), "%s: policy %q lacks %s", path, policy, want)
		}
		must.True(t, !strings.Contains(policy, "unsafe") && w.Header().Get("X-Content-Type-Options") == "nosniff",
			"%s: headers %v", path, w.Header())
	}
	for _, tag := range []string{"<script", "<style", "</script", "</style"} {
		n := strings.Count(page, tag)
		must.True(t, n == 1, "the page has %d of %s; the policy has a hash of one", n, tag)
	}
	must.True(t, !strings.Contains(page, " style=") && !strings.Contains(page, " onclick="),
		"the page has attributes that the policy does not allow")
}

// pairs writes certificates and keys to two files.
type pairs struct{ cert, key string }

func (p pairs) write(t *testing.T, serial int64) {
	t.Helper()
	key := must.Get(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	template := &x509.Certificate{SerialNumber: big.NewInt(serial), NotAfter: time.Now().Add(time.Hour)}
	cert := must.Get(x509.CreateCertificate(rand.Reader, template, template, key.Public(), key))(t)
	private := must.Get(x509.MarshalPKCS8PrivateKey(key))(t)
	for name, block := range map[string]*pem.Block{
		p.cert: {Type: "CERTIFICATE", Bytes: cert}, p.key: {Type: "PRIVATE KEY", Bytes: private},
	} {
		must.Do(t, os.WriteFile(name, pem.EncodeToMemory(block), 0o600))
	}
}

// The TLS files are read again when they change. A bad certificate is a problem, and the old one stays active. Sources
// that are not allowed get no handshake.
func TestTLSAndSources(t *testing.T) {
	free := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	o := options(t)
	o.Listen = free.Addr().String()
	free.Close()
	files := pairs{filepath.Join(t.TempDir(), "tls.crt"), filepath.Join(t.TempDir(), "tls.key")}
	o.TLSCert, o.TLSKey = files.cert, files.key
	files.write(t, 1)
	var mu sync.Mutex
	problems := map[string]error{}
	o.Problem = func(part string, err error) { mu.Lock(); defer mu.Unlock(); problems[part] = err }
	problem := func() error { mu.Lock(); defer mu.Unlock(); return problems["TLS of the admin API on "+o.Listen] }
	s := New(o)
	s.retry, s.watchInterval = 5*time.Millisecond, 5*time.Millisecond
	must.Run(t, s.Run)

	client := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true},
	}}
	served := func() (serial string, err error) {
		resp, err := client.Get("https://" + o.Listen + "/v1/status")
		if err != nil {
			return "", err
		}
		defer resp.Body.Close()
		return resp.TLS.PeerCertificates[0].SerialNumber.String(), nil
	}
	wait := func(what string, f func() bool) {
		t.Helper()
		for deadline := time.Now().Add(10 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				now, err := served()
				t.Fatalf("not within 10s: %s; certificate %s, %v, problem %v", what, now, err, problem())
			}
		}
	}
	serves := func(want int64) func() bool {
		return func() bool { got, err := served(); return err == nil && got == fmt.Sprint(want) && problem() == nil }
	}
	wait("the first certificate", serves(1))
	files.write(t, 2)
	wait("the second certificate", serves(2))
	must.Do(t, os.WriteFile(files.cert, []byte("no certificate"), 0o600))
	wait("the problem", func() bool { return problem() != nil })
	must.Equal(t, "2", must.Get(served())(t))
	files.write(t, 3)
	wait("the third certificate", serves(3))

	s.SetAccess(Access{Allow: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}})
	_, err := served()
	must.True(t, err != nil, "a source that is not allowed is served")
	s.SetAccess(Access{Allow: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}})
	must.Get(served())(t)
}
