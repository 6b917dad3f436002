package guard

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

const (
	// openTimeout limits the time until the peer's OPEN. RFC 4271, section 8.2.2, suggests four minutes, but a peer
	// that needs more than one is down.
	openTimeout = time.Minute
	// sendTimeout is how long a peer with a hold time of 0 may accept no data (RFC 9687).
	sendTimeout = 8 * time.Minute
	// lingerTime is how long the peer may take to read the last NOTIFICATION.
	lingerTime = time.Second
)

type socket interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
}

// conn is one TCP connection with a peer, from its OPEN to its end.
type conn struct {
	p        *peer
	c        socket
	r        *messageReader
	outgoing bool
	cfg      Config
	ours     Open
	theirs   *Open
	local    netip.Addr
	cancel   context.CancelCauseFunc
	granted  chan bool // decision of the peer's goroutine about an OPEN
	since    time.Time // start of the session; constant while Guard.sessions has it

	wmu sync.Mutex // orders writes to c

	mu             sync.Mutex // guards the following fields
	backend        net.Conn
	routes         Received
	received, sent Messages
}

// run handles the connection. It always ends with an event for the peer's goroutine.
func (c *conn) run(ctx context.Context) {
	stop := context.AfterFunc(ctx, func() { _ = c.c.SetDeadline(time.Unix(1, 0)) })
	err := c.handshake(ctx)
	if err == nil {
		err = c.session(ctx)
	}
	if ctx.Err() != nil { // end was called
		err = context.Cause(ctx)
	}
	stop()
	var e *Error
	tell := errors.As(err, &e) && !e.Received
	if tell {
		_ = c.c.SetDeadline(time.Now().Add(lingerTime))
		_, _ = c.c.Write(e.message())
		_ = c.c.CloseWrite()
	}
	c.p.lingering.Go(func() {
		if tell { // closing with unread data would send RST, and the NOTIFICATION would be lost
			_, _ = io.Copy(io.Discard, io.LimitReader(c.c, readBurst))
		}
		c.c.Close()
	})
	c.p.events <- ended{c, err} // does not wait for the lingering connection
}

// end ends the connection. e is the reason and, if it is an *Error, sent as a NOTIFICATION. Only the first reason
// counts. end does not block.
func (c *conn) end(e error) { c.cancel(e) }

// lastWords is how long to wait for the peer's NOTIFICATION after sending has failed.
const lastWords = 200 * time.Millisecond

var errSending = errors.New("the connection failed while sending")

var errRefused = errors.New("superseded by another connection to the peer")

// handshake exchanges OPEN and KEEPALIVE.
func (c *conn) handshake(ctx context.Context) error {
	_ = c.c.SetDeadline(time.Now().Add(openTimeout))
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if _, err := c.c.Write(c.ours.message()); err != nil {
		return readError(err, openTimeout)
	}
	m, err := c.r.next()
	if err != nil {
		return readError(err, openTimeout)
	}
	switch m.kind {
	case typeNotification:
		return parseNotification(m.body())
	case typeOpen:
	default:
		return protocolError(codeFSM, 1, nil, "received %v instead of OPEN", m.kind)
	}
	err = protocolError(codeOpen, 0, nil, "could not process the OPEN")
	c.p.g.o.Boundary.Do(lb.PartPeer, c.cfg.Address.String(), func() { c.theirs, err = parseOpen(m.body()) })
	if err != nil {
		return err
	}
	if err := c.theirs.check(&c.ours, c.cfg.ASN); err != nil {
		return err
	}
	c.p.events <- opened{c}
	if !<-c.granted {
		return cease(ceaseCollision, errRefused.Error())
	}
	hold := holdTime(&c.ours, c.theirs)
	if hold == 0 {
		hold = openTimeout
	}
	_ = c.c.SetDeadline(time.Now().Add(hold))
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if _, err := c.c.Write(keepalive); err != nil {
		return readError(err, hold)
	}
	if m, err = c.r.next(); err != nil {
		return readError(err, hold)
	}
	switch m.kind {
	case typeKeepalive:
		return nil
	case typeNotification:
		return parseNotification(m.body())
	}
	return protocolError(codeFSM, 2, nil, "received %v instead of KEEPALIVE", m.kind)
}

func (c *conn) session(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	hold := holdTime(&c.ours, c.theirs)
	_ = c.c.SetDeadline(time.Time{})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	for _, m := range []*Messages{&c.received, &c.sent} { // the handshake's messages
		m.count(typeOpen)
		m.count(typeKeepalive)
	}
	c.p.events <- established{c}
	if !<-c.granted {
		return cease(ceaseCollision, errRefused.Error())
	}
	failed := make(chan error, 3)
	var wg sync.WaitGroup
	begin := func(f func() error) {
		wg.Go(func() {
			err := f()
			failed <- err
			if errors.Is(err, errSending) { // the peer's NOTIFICATION may have arrived before
				select {
				case <-ctx.Done():
				case <-time.After(lastWords):
				}
			}
			cancel()
			_ = c.c.SetDeadline(time.Unix(1, 0))
		})
	}
	begin(func() error { return c.fromPeer(ctx, hold) })
	begin(func() error { return c.keepAlive(ctx, hold) })
	begin(func() error { return c.fromBackend(ctx, hold) })
	err := <-failed
	<-ctx.Done()
	wg.Wait()
	close(failed)
	var e *Error
	for later := range failed {
		if errors.Is(err, errSending) && errors.As(later, &e) && e.Received {
			err = later
		}
	}
	c.p.g.o.Detach(c.cfg.Address)
	return err
}

func (c *conn) write(ctx context.Context, b []byte, hold time.Duration) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	limit := sendTimeout
	if hold > 0 {
		limit = hold
	}
	_ = c.c.SetWriteDeadline(time.Now().Add(limit))
	if ctx.Err() != nil { // its deadline was just overwritten
		return ctx.Err()
	}
	if _, err := c.c.Write(b); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return fmt.Errorf("the peer has accepted no data for %v", limit)
		}
		return fmt.Errorf("%w: %w", errSending, err)
	}
	c.countSent(b)
	return nil
}

func (c *conn) countSent(b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sent.count(messageType(b[headerLen-1]))
}

// keepAlive sends KEEPALIVEs to the peer, at least three per hold time, and to the backend.
func (c *conn) keepAlive(ctx context.Context, hold time.Duration) error {
	var tick <-chan time.Time
	if hold > 0 {
		t := time.NewTicker(c.keepaliveInterval(hold))
		defer t.Stop()
		tick = t.C
	}
	hourly := time.NewTicker(backendKeepalive)
	defer hourly.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.p.probe: // to test the connection
		case <-tick:
		case <-hourly.C:
			c.toBackend(keepalive)
			continue
		}
		if err := c.write(ctx, keepalive, hold); err != nil {
			return err
		}
	}
}

func (c *conn) toBackend(b []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.backend != nil {
		_, _ = c.backend.Write(b)
	}
}

// readError translates a read error into the reason why the session ends.
func readError(err error, hold time.Duration) error {
	var e *Error
	switch {
	case errors.As(err, &e):
		return err
	case errors.Is(err, os.ErrDeadlineExceeded):
		return protocolError(codeHoldTimer, 0, nil, "no message from the peer for %v", hold)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET):
		return errClosed
	}
	return fmt.Errorf("the connection was lost: %w", err)
}

var errClosed = errors.New("the peer closed the connection")
