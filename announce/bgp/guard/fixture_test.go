package guard

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/test/bufconn"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var loopback = netip.MustParseAddr("127.0.0.1")

// fixture is a guard with one peer. The test is the peer's router, and the backend records what it receives.
type fixture struct {
	t               testing.TB
	g               *Guard
	cfg             Config
	router, backend net.Listener
	stop            context.CancelCauseFunc
	done            chan struct{}
	outer           chan net.Conn // the guard's connections with the router
	inner           chan net.Conn // sessions with the backend

	mu       sync.Mutex
	received []byte // by the backend
	sent     []netip.Prefix
	faults   []string
	states   []State
}

// newFixture returns a guard with in-memory connections, for a synctest bubble.
func newFixture(t testing.TB, change func(*Options, *Config)) *fixture {
	t.Helper()
	router, backend := bufconn.Listen(1<<15), bufconn.Listen(1<<15)
	f := fixtureOf(t, router, backend, change)
	f.g.dial = func(ctx context.Context, _ *Config) (socket, error) {
		c, err := router.DialContext(ctx)
		return memory{c}, err
	}
	f.g.dialBackend = func(ctx context.Context, _ *Backend) (net.Conn, error) { return backend.DialContext(ctx) }
	f.run()
	return f
}

// newTCPFixture returns a guard with TCP connections, for passwords.
func newTCPFixture(t testing.TB, change func(*Options, *Config)) *fixture {
	t.Helper()
	listen := func() net.Listener {
		l := must.Get(net.Listen("tcp4", "127.0.0.1:0"))(t)
		return l
	}
	f := fixtureOf(t, listen(), listen(), change)
	f.run()
	return f
}

func fixtureOf(t testing.TB, router, backend net.Listener, change func(*Options, *Config)) *fixture {
	f := &fixture{
		t: t, router: router, backend: backend, done: make(chan struct{}),
		outer: make(chan net.Conn, 8), inner: make(chan net.Conn, 8),
	}
	f.cfg = Config{Address: loopback, Port: port(router), ASN: 64500, HoldTime: 9 * time.Second}
	o := Options{
		ASN: 64512, RouterID: netip.MustParseAddr("192.0.2.11"), ListenPort: -1, Log: slog.New(slog.DiscardHandler),
		Attach: func(context.Context, Session) (Backend, error) {
			return Backend{At: netip.AddrPortFrom(loopback, port(backend)), From: loopback}, nil
		},
		Detach: func(netip.Addr) {},
		Sent: func(_ netip.Addr, u *Update) {
			f.mu.Lock()
			f.sent = append(f.sent, u.Announced...)
			f.mu.Unlock()
		},
		Event: func(e Event) {
			f.mu.Lock()
			f.states = append(f.states, e.New)
			if e.Err != nil {
				f.faults = append(f.faults, e.Err.Error())
			}
			f.mu.Unlock()
		},
	}
	if change != nil {
		change(&o, &f.cfg)
	}
	f.g = New(o)
	f.g.SetPeers([]Config{f.cfg})
	return f
}

func (f *fixture) run() {
	go f.serveBackend()
	go func() {
		for c, err := f.router.Accept(); err == nil; c, err = f.router.Accept() {
			f.outer <- c
		}
	}()
	ctx, cancel := context.WithCancelCause(context.Background())
	f.stop = cancel
	go func() {
		f.g.Run(ctx)
		close(f.done)
	}()
	f.t.Cleanup(f.end)
}

func (f *fixture) end() {
	f.stop(Stopped("the test ends"))
	select {
	case <-f.done:
	case <-time.After(time.Minute):
		f.t.Error("the guard does not stop")
	}
	f.router.Close()
	f.backend.Close()
}

// port returns a TCP listener's port, or 0 for other listeners.
func port(l net.Listener) uint16 {
	a, _ := l.Addr().(*net.TCPAddr)
	return a.AddrPort().Port()
}

// memory is an in-memory socket.
type memory struct{ net.Conn }

func (m memory) Read(b []byte) (int, error)  { n, err := m.Conn.Read(b); return n, deadline(err) }
func (m memory) Write(b []byte) (int, error) { n, err := m.Conn.Write(b); return n, deadline(err) }
func (memory) CloseWrite() error             { return nil }

func (memory) SyscallConn() (syscall.RawConn, error) { return nil, errors.ErrUnsupported }

func deadline(err error) error {
	if timeout, ok := err.(net.Error); ok && timeout.Timeout() {
		return os.ErrDeadlineExceeded
	}
	return err
}

// serveBackend is a backend that accepts every session.
func (f *fixture) serveBackend() {
	for {
		c, err := f.backend.Accept()
		if err != nil {
			return
		}
		open := testOpen()
		_, _ = c.Write(slices.Concat(open.message(), keepalive))
		go func() {
			b := make([]byte, 65536)
			for {
				n, err := c.Read(b)
				f.mu.Lock()
				f.received = append(f.received, b[:n]...)
				f.mu.Unlock()
				if err != nil {
					return
				}
			}
		}()
		f.inner <- c
	}
}

// atBackend returns what the backend has received.
func (f *fixture) atBackend() []byte {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Clone(f.received)
}

// link is the router's end of a connection.
type link struct {
	net.Conn
	t testing.TB
	r *messageReader
}

func (f *fixture) accept() *link {
	f.t.Helper()
	select {
	case c := <-f.outer:
		return f.link(c)
	case <-time.After(time.Minute):
		f.t.Fatal("the guard does not connect")
		return nil
	}
}

// connect connects the router to the guard.
func (f *fixture) connect() *link {
	f.t.Helper()
	l := bufconn.Listen(1 << 15)
	go func() {
		c, _ := l.Accept()
		f.g.peerOf(loopback).accepted <- memory{c}
	}()
	c := must.Get(l.Dial())(f.t)
	return f.link(c)
}

func (f *fixture) link(c net.Conn) *link {
	f.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	return &link{c, f.t, newMessageReader(c)}
}

func (l *link) send(messages ...[]byte) {
	l.t.Helper()
	must.Get(l.Write(bytes.Join(messages, nil)))(l.t)
}

// next returns the next message other than KEEPALIVE, or nil at the end.
func (l *link) next() *message {
	for {
		m, err := l.r.next()
		if err != nil {
			return nil
		}
		if m.kind != typeKeepalive {
			return &m
		}
	}
}

func (l *link) want(kind messageType) []byte {
	l.t.Helper()
	m := l.next()
	if m == nil || m.kind != kind {
		l.t.Fatalf("received %+v, want %v", m, kind)
	}
	return m.body()
}

// theirs returns the router's OPEN.
func theirs() Open {
	o := testOpen()
	o.ASN, o.ID = 64500, netip.MustParseAddr("192.0.2.1")
	return o
}

// establish establishes a session on l, and returns the connection to the backend.
func (f *fixture) establish(l *link, o Open) net.Conn {
	f.t.Helper()
	l.want(typeOpen)
	l.send(o.message(), keepalive)
	select {
	case c := <-f.inner:
		return c
	case <-time.After(time.Minute):
		f.t.Fatal("no session with the backend")
		return nil
	}
}

func (f *fixture) until(what string, ok func() bool) {
	f.t.Helper()
	for end := time.Now().Add(time.Minute); ; time.Sleep(2 * time.Millisecond) {
		f.mu.Lock()
		done := ok()
		f.mu.Unlock()
		if done {
			return
		}
		if time.Now().After(end) {
			f.t.Fatalf("%s: not after a minute; faults %q, states %q", what, f.faults, f.states)
		}
	}
}

func open(change func(*Open)) []byte {
	o := theirs()
	change(&o)
	return o.message()
}

// bubble runs a subtest in a synctest bubble.
func bubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

// sourceInUse is the local address of in-memory connections.
var sourceInUse = netip.MustParseAddr("192.0.2.11")

// LocalAddr returns an address as if the kernel had chosen it.
func (memory) LocalAddr() net.Addr { return &net.TCPAddr{IP: sourceInUse.AsSlice()} }
