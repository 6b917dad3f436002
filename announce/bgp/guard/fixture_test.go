package guard

import (
	"bytes"
	"context"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"
)

var loopback = netip.MustParseAddr("127.0.0.1")

// fixture is a guard with one peer, whose router is the test, and whose backend records what it receives.
type fixture struct {
	t       testing.TB
	g       *Guard
	cfg     Config
	router  *net.TCPListener // the guard connects to it
	backend *net.TCPListener
	stop    context.CancelCauseFunc
	done    chan struct{}
	inner   chan net.Conn // sessions with the backend

	mu       sync.Mutex
	received []byte // by the backend
	sent     []netip.Prefix
	faults   []string
	states   []State
}

func newFixture(t testing.TB, change func(*Options, *Config)) *fixture {
	t.Helper()
	f := &fixture{t: t, done: make(chan struct{}), inner: make(chan net.Conn, 8)}
	f.router, f.backend = f.listen(), f.listen()
	f.cfg = Config{Address: loopback, Port: port(f.router), ASN: 64500, HoldTime: 9 * time.Second}
	o := Options{
		ASN: 64512, RouterID: netip.MustParseAddr("192.0.2.11"), ListenPort: -1, Log: slog.New(slog.DiscardHandler),
		Attach: func(context.Context, Session) (Backend, error) {
			return Backend{At: netip.AddrPortFrom(loopback, port(f.backend)), From: loopback}, nil
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
	go f.serveBackend()
	ctx, cancel := context.WithCancelCause(context.Background())
	f.stop = cancel
	go func() {
		f.g.Run(ctx)
		close(f.done)
	}()
	t.Cleanup(f.end)
	return f
}

// end stops the guard.
func (f *fixture) end() {
	f.stop(Stopped("the test ends"))
	select {
	case <-f.done:
	case <-time.After(10 * time.Second):
		f.t.Error("the guard does not stop")
	}
}

func (f *fixture) listen() *net.TCPListener {
	f.t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

func port(l *net.TCPListener) uint16 { return l.Addr().(*net.TCPAddr).AddrPort().Port() }

// serveBackend is a BGP speaker that accepts every session.
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

// link is a connection of the router.
type link struct {
	net.Conn
	t testing.TB
	r *messageReader
}

func (f *fixture) accept() *link {
	f.t.Helper()
	_ = f.router.SetDeadline(time.Now().Add(10 * time.Second))
	c, err := f.router.Accept()
	if err != nil {
		f.t.Fatal(err)
	}
	return f.link(c)
}

// connect is a connection of the router to the guard, with the password of c.
func (f *fixture) connect(c *Config) *link {
	f.t.Helper()
	to := *c
	f.until("listening", func() bool {
		f.g.mu.Lock()
		defer f.g.mu.Unlock()
		for _, l := range f.g.listen {
			if l.socket != nil {
				to.Port = port(l.socket)
			}
		}
		return to.Port != c.Port
	})
	conn, err := dial(context.Background(), &to)
	if err != nil {
		f.t.Fatal(err)
	}
	return f.link(conn)
}

func (f *fixture) link(c net.Conn) *link {
	f.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	return &link{c, f.t, newMessageReader(c)}
}

func (l *link) send(messages ...[]byte) {
	l.t.Helper()
	if _, err := l.Write(bytes.Join(messages, nil)); err != nil {
		l.t.Fatal(err)
	}
}

// next returns the next message but KEEPALIVEs; nil at the end.
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

// theirs is the OPEN of the router.
func theirs() Open {
	o := testOpen()
	o.ASN, o.ID = 64500, netip.MustParseAddr("192.0.2.1")
	return o
}

// establish makes a session on l and returns the connection to the backend.
func (f *fixture) establish(l *link, o Open) net.Conn {
	f.t.Helper()
	l.want(typeOpen)
	l.send(o.message(), keepalive)
	select {
	case c := <-f.inner:
		return c
	case <-time.After(10 * time.Second):
		f.t.Fatal("no session with the backend")
		return nil
	}
}

func (f *fixture) until(what string, ok func() bool) {
	f.t.Helper()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(2 * time.Millisecond) {
		f.mu.Lock()
		done := ok()
		f.mu.Unlock()
		if done {
			return
		}
		if time.Now().After(end) {
			f.t.Fatalf("%s: not after 10 s; faults %q, states %q", what, f.faults, f.states)
		}
	}
}

func open(change func(*Open)) []byte {
	o := theirs()
	change(&o)
	return o.message()
}
