package traffic

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
)

// Conns is a set of long-lived connections to TCPEcho servers behind one address. Its methods may be called from one
// goroutine at a time.
type Conns struct{ all []*longConn }

// longConn is one connection. Once err is set, it has failed.
type longConn struct {
	number int
	sent   int
	server string
	conn   net.Conn
	lines  *bufio.Reader
	err    error
}

// Connect opens n connections to one address and exchanges a first message over each, which identifies its server. It
// fails if any connection fails.
func (c Client) Connect(ctx context.Context, to netip.AddrPort, n int) (*Conns, error) {
	all := &Conns{}
	for i := range n {
		conn, err := c.Dial(ctx, "tcp", to.String())
		if err != nil {
			all.Close()
			return nil, fmt.Errorf("connection %d of %d: %w", i+1, n, err)
		}
		all.all = append(all.all, &longConn{number: i, conn: conn, lines: bufio.NewReader(conn)})
	}
	if failed := all.Exchange(ctx); len(failed) > 0 {
		all.Close()
		return nil, fmt.Errorf("%d of %d connections failed at their first message, for example: %w", len(failed), n,
			failed[0])
	}
	return all, nil
}

// Exchange sends the next message over every open connection and waits for the responses until ctx ends. It returns an
// error for each connection that failed: a reset, no response, a wrong response, or a response from another server than
// before.
func (c *Conns) Exchange(ctx context.Context) []error {
	var wg sync.WaitGroup
	before := c.open()
	for _, l := range before {
		wg.Go(func() { l.err = l.exchange(ctx) })
	}
	wg.Wait()
	var failed []error
	for _, l := range before {
		if l.err != nil {
			err := fmt.Errorf("connection %d (from %s, to %s): %w", l.number, l.conn.LocalAddr(), l.server, l.err)
			failed = append(failed, err)
			l.conn.Close()
		}
	}
	return failed
}

func (l *longConn) exchange(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { l.conn.Close() })
	defer stop()
	l.sent++
	text := fmt.Sprintf("%d/%d", l.number, l.sent)
	if _, err := fmt.Fprintln(l.conn, text); err != nil {
		return errors.Join(err, ctx.Err())
	}
	line, err := l.lines.ReadString('\n')
	if err != nil {
		return errors.Join(err, ctx.Err())
	}
	server, echo, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
	if echo != text || (l.server != "" && server != l.server) {
		return fmt.Errorf("message %q was answered %q", text, line)
	}
	l.server = server
	return nil
}

// Alive returns the number of connections that have not failed.
func (c *Conns) Alive() int { return len(c.open()) }

func (c *Conns) open() []*longConn {
	var open []*longConn
	for _, l := range c.all {
		if l.err == nil {
			open = append(open, l)
		}
	}
	return open
}

// Servers returns the number of open connections by server.
func (c *Conns) Servers() map[string]int {
	n := map[string]int{}
	for _, l := range c.open() {
		n[l.server]++
	}
	return n
}

// Clients returns the client's address and port for each open connection.
func (c *Conns) Clients() (clients []netip.AddrPort) {
	for _, l := range c.open() {
		clients = append(clients, l.conn.LocalAddr().(*net.TCPAddr).AddrPort())
	}
	return clients
}

// Close closes all connections.
func (c *Conns) Close() {
	for _, l := range c.all {
		l.conn.Close()
	}
}
