// Package httplimit creates HTTP servers that no client can exhaust: requests and idle connections have timeouts, and a
// limit bounds the connections of several servers together. Otherwise idle clients could use up the file descriptors
// that health checks need.
package httplimit

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
)

// Limiter bounds the connections of its servers. At the limit, a new connection replaces the one that has waited
// longest for a request; if none is waiting, the new one is closed.
type Limiter struct {
	most int
	mu   sync.Mutex             // guards all below
	open map[net.Conn]time.Time // since when a connection has waited for a request; zero if it has one
}

// New returns a Limiter of this many connections, but at most an eighth of the file descriptors that the process may
// have.
func New(most int) *Limiter {
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err == nil {
		most = min(most, int(min(max(files.Cur/8, 8), 1<<20)))
	}
	return &Limiter{most: most, open: map[net.Conn]time.Time{}}
}

// Server returns a server that logs its errors at debug level.
func (l *Limiter) Server(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler: withoutRest(h), ConnState: l.changed, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, WriteTimeout: time.Minute,
		IdleTimeout: 30 * time.Second, MaxHeaderBytes: 16 << 10,
	}
}

// withoutRest does not wait for the rest of a body that h has not read. Such a connection would count as one with a
// request, which no other connection replaces.
func withoutRest(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.ServeHTTP(w, r)
		if r.ContentLength != 0 {
			// Without support, as in a recorder, there is nothing to wait for.
			_ = http.NewResponseController(w).SetReadDeadline(time.Now())
		}
	})
}

// Bounded runs each request inside a boundary. A request that panics receives status 500, unless it has a status
// already.
func Bounded(b *lb.Boundary, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !b.Do(lb.PartHTTP, fmt.Sprintf("%.60q", r.URL.Path), func() { h.ServeHTTP(w, r) }) {
			http.Error(w, "internal error; see the log", http.StatusInternalServerError)
		}
	})
}

func (l *Limiter) changed(c net.Conn, state http.ConnState) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch state {
	case http.StateNew:
		l.open[c] = time.Now()
		if len(l.open) > l.most {
			l.closeOldest()
		}
	case http.StateActive:
		l.open[c] = time.Time{}
	case http.StateIdle:
		l.open[c] = time.Now()
	case http.StateClosed, http.StateHijacked:
		delete(l.open, c)
	}
}

// closeOldest closes the connection that has waited longest. There always is one: the new one.
func (l *Limiter) closeOldest() {
	var oldest net.Conn
	for c, since := range l.open {
		if !since.IsZero() && (oldest == nil || since.Before(l.open[oldest])) {
			oldest = c
		}
	}
	delete(l.open, oldest)
	raw := oldest
	if c, ok := oldest.(*tls.Conn); ok { // its Close may wait five seconds for the client to take an alert
		raw = c.NetConn()
	}
	raw.Close() // the server removes it; the error does not matter
}
