package admin

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// Access says who may use the API over TCP.
type Access struct {
	Token string         // that requests must bear, or ""
	Allow []netip.Prefix // sources; all if empty
}

// SetAccess replaces Options.Access for requests and connections from now on.
func (s *Server) SetAccess(a Access) { s.access.Store(&a) }

// authorize refuses requests without the token, except to /healthz. It answers / with the page, which asks for the
// token, because browsers do not send one by themselves.
func (s *Server) authorize(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token := s.access.Load().Token
		if token == "" || r.URL.Path == "/healthz" || bears(r, token) {
			h.ServeHTTP(w, r)
			return
		}
		w.Header().Set("WWW-Authenticate", "Bearer")
		if r.URL.Path == "/" {
			writePage(w, http.StatusUnauthorized)
			return
		}
		writeError(w, http.StatusUnauthorized,
			errors.New(`want "Authorization: Bearer" with the token of [admin] token_file`))
	})
}

// bears reports whether a request has the token. The time it takes reveals nothing about the token.
func bears(r *http.Request, token string) bool {
	scheme, got, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	a, b := sha256.Sum256([]byte(got)), sha256.Sum256([]byte(token))
	return strings.EqualFold(scheme, "Bearer") && subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

// filtered is a listener that closes connections from sources outside Access.Allow.
type filtered struct {
	net.Listener
	s *Server
}

func (l filtered) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil || l.s.allows(c.RemoteAddr()) {
			return c, err
		}
		c.Close()
	}
}

func (s *Server) allows(from net.Addr) bool {
	allow := s.access.Load().Allow
	at, err := netip.ParseAddrPort(from.String())
	source := at.Addr().Unmap().WithZone("")
	return len(allow) == 0 || err == nil && slices.ContainsFunc(allow, func(p netip.Prefix) bool {
		return p.Contains(source)
	})
}

// certificate is a certificate from two files, which are read again when they change. An invalid one changes nothing.
type certificate struct {
	cert, key string // paths
	read      [2]os.FileInfo
	now       atomic.Pointer[tls.Certificate]
}

// follow reads the files until ctx ends, and calls problem with each result.
func (c *certificate) follow(ctx context.Context, interval time.Duration, problem func(error)) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		problem(c.update())
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// update reads the files if they have changed since the last read.
func (c *certificate) update() error {
	cert, err := os.Stat(c.cert)
	if err != nil {
		return fmt.Errorf("certificate not read: %w", err)
	}
	key, err := os.Stat(c.key)
	if err != nil {
		return fmt.Errorf("key not read: %w", err)
	}
	if unchanged(cert, c.read[0]) && unchanged(key, c.read[1]) {
		return nil
	}
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		return fmt.Errorf("certificate not replaced: %w", err)
	}
	c.read = [2]os.FileInfo{cert, key}
	c.now.Store(&pair)
	return nil
}

func unchanged(a, b os.FileInfo) bool {
	return b != nil && os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	if pair := c.now.Load(); pair != nil {
		return pair, nil
	}
	return nil, errors.New("no certificate is loaded")
}
