package httplimit

import (
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// serve returns the address of a server with a limit.
func serve(t *testing.T, l *Limiter, h http.HandlerFunc) string {
	t.Helper()
	listener := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	s := l.Server(h, slog.New(slog.DiscardHandler))
	done := make(chan error)
	go func() { done <- s.Serve(listener) }()
	t.Cleanup(func() { s.Close(); <-done })
	return listener.Addr().String()
}

func get(t *testing.T, addr string) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	resp := must.Get(client.Get("http://" + addr))(t)
	resp.Body.Close()
}

// Idle connections neither keep out requests nor use more descriptors than the limit.
func TestIdleConnectionsGiveWay(t *testing.T) {
	const most = 20
	l := New(most)
	addr := serve(t, l, func(http.ResponseWriter, *http.Request) {})
	var idle []net.Conn
	for range 10 * most {
		c := must.Get(net.Dial("tcp", addr))(t)
		defer c.Close()
		idle = append(idle, c)
	}
	for range 5 {
		get(t, addr)
	}
	closed := 0
	for _, c := range idle[:9*most] {
		c.SetReadDeadline(time.Now().Add(10 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == io.EOF {
			closed++
		}
	}
	l.mu.Lock()
	open := len(l.open)
	l.mu.Unlock()
	must.True(t, closed == 9*most && open <= most,
		"%d of the %d oldest connections are closed, %d are open; want all, at most %d", closed, 9*most, open, most)
}

// A connection with a request is not closed for another one.
func TestRequestsStay(t *testing.T) {
	l := New(1)
	inside, release := make(chan struct{}), make(chan struct{})
	addr := serve(t, l, func(http.ResponseWriter, *http.Request) {
		close(inside)
		<-release
	})
	done := make(chan struct{})
	go func() { get(t, addr); close(done) }()
	<-inside
	c := must.Get(net.Dial("tcp", addr))(t)
	defer c.Close()
	c.SetReadDeadline(time.Now().Add(10 * time.Second))
	_, err := c.Read(make([]byte, 1))
	must.True(t, err == io.EOF, "the second connection: %v; want it closed", err)
	close(release)
	<-done
}

// A client that does not read delays no other client when its connection is replaced, although closing TLS would wait
// for it to read the alert.
func TestUnreadTLSConnectionsGiveWay(t *testing.T) {
	source := httptest.NewTLSServer(nil)
	defer source.Close()
	here, there := net.Pipe()
	stuck := tls.Server(here, &tls.Config{Certificates: source.TLS.Certificates, SessionTicketsDisabled: true})
	done := make(chan error)
	go func() { done <- stuck.Handshake() }()
	must.Do(t, tls.Client(there, &tls.Config{InsecureSkipVerify: true}).Handshake())
	must.Do(t, <-done)
	l := New(1)
	l.changed(stuck, http.StateNew)
	start := time.Now()
	l.changed(here, http.StateNew)
	must.True(t, time.Since(start) < 2*time.Second, "the next connection waited %v", time.Since(start))
}

// A request whose body does not arrive does not keep out others.
func TestMissingBodiesTakeNoPlace(t *testing.T) {
	const most = 20
	addr := serve(t, New(most), func(http.ResponseWriter, *http.Request) {})
	for range most {
		c := must.Get(net.Dial("tcp", addr))(t)
		defer c.Close()
		must.Get(io.WriteString(c, "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\n"))(t)
		if _, err := io.ReadAll(c); err != nil { // the server closes the connection
			t.Fatal(err)
		}
	}
	get(t, addr)
}

// A request that panics receives status 500, is counted, and affects no other request.
func TestPanicOfARequest(t *testing.T) {
	b := &lb.Boundary{Log: slog.New(slog.DiscardHandler)}
	addr := serve(t, New(20), Bounded(b, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/bad" {
			panic("odd")
		}
	})).ServeHTTP)
	for path, want := range map[string]int{"/bad": 500, "/good": 200} {
		resp := must.Get(http.Get("http://" + addr + path))(t)
		resp.Body.Close()
		must.True(t, resp.StatusCode == want, "%s: status %d; want %d", path, resp.StatusCode, want)
	}
	must.Equal(t, 1, b.Panics()[lb.PartHTTP])
}
