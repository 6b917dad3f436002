package lab

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

// longConn is one of them. It is dead once err is set.
type longConn struct {
	number int
	sent   int
	server string
	conn   net.Conn
	lines  *bufio.Reader
	err    error
}

// Connect opens n connections to one address and exchanges a first message over each, so that it is known which server
// has it. It fails when one cannot be made.
func (h *Host) Connect(ctx context.Context, to netip.AddrPort, n int) (*Conns, error) {
	c := &Conns{}
	for i := range n {
		conn, err := h.Dial(ctx, "tcp", to.String())
		if err != nil {
			c.Close()
			return nil, fmt.Errorf("connection %d of %d: %w", i+1, n, err)
		}
		c.all = append(c.all, &longConn{number: i, conn: conn, lines: bufio.NewReader(conn)})
	}
	if dead := c.Exchange(ctx); len(dead) > 0 {
		c.Close()
		return nil, fmt.Errorf("%d of %d connections died at their first message, one of them: %w", len(dead), n, dead[0])
	}
	return c, nil
}

// Exchange sends the next message over every connection that lives, waits for its answer until ctx ends, and returns
// an error for each that died of it: reset, no answer, the wrong answer, or one from another server than before.
func (c *Conns) Exchange(ctx context.Context) []error {
	var wg sync.WaitGroup
	before := c.alive()
	for _, l := range before {
		wg.Go(func() { l.err = l.exchange(ctx) })
	}
	wg.Wait()
	var dead []error
	for _, l := range before {
		if l.err != nil {
			dead = append(dead, fmt.Errorf("connection %d (from %s, to %s): %w", l.number, l.conn.LocalAddr(), l.server, l.err))
			l.conn.Close()
		}
	}
	return dead
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

// Alive returns how many connections live.
func (c *Conns) Alive() int { return len(c.alive()) }

func (c *Conns) alive() []*longConn {
	var alive []*longConn
	for _, l := range c.all {
		if l.err == nil {
			alive = append(alive, l)
		}
	}
	return alive
}

// Servers returns how many live connections each server has.
func (c *Conns) Servers() map[string]int {
	n := map[string]int{}
	for _, l := range c.alive() {
		n[l.server]++
	}
	return n
}

// Close closes all connections.
func (c *Conns) Close() {
	for _, l := range c.all {
		l.conn.Close()
	}
}
