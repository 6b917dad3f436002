package guard

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

const (
	// refreshInterval is the minimum time between ROUTE-REFRESHs of a family, because each makes the backend resend
	// every route.
	refreshInterval = 10 * time.Second
	// readRate and readBurst, in bytes per second and bytes, limit how fast a peer's messages, which are all discarded,
	// are read.
	readRate, readBurst = 8 << 20, 16 << 20
)

// fromPeer reads the peer's messages. Only requests to resend the routes reach the backend.
func (c *conn) fromPeer(ctx context.Context, hold time.Duration) error {
	var u Update
	var refreshed [3]time.Time // by AFI
	budget := readBurst
	last := time.Now()
	for {
		deadline := time.Time{}
		if hold > 0 {
			deadline = time.Now().Add(hold)
		}
		_ = c.c.SetReadDeadline(deadline)
		if ctx.Err() != nil { // its deadline was just overwritten
			return ctx.Err()
		}
		m, err := c.r.next()
		if err != nil {
			return readError(err, hold)
		}
		c.p.g.o.Boundary.Do(lb.PartPeer, c.cfg.Address.String(), func() { err = c.handle(ctx, m, &u, &refreshed) })
		if err != nil {
			return err
		}
		now := time.Now()
		budget = min(readBurst, budget+int(now.Sub(last).Seconds()*readRate)) - len(m.raw)
		last = now
		if budget < 0 {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
}

// handle processes one message of an established session. An error ends the session.
func (c *conn) handle(ctx context.Context, m message, u *Update, refreshed *[3]time.Time) (err error) {
	if m.kind == typeUpdate {
		err = parseUpdate(m.body(), u)
	}
	c.count(m.kind, err, u)
	switch m.kind {
	case typeKeepalive, typeUpdate:
		return nil
	case typeRouteRefresh:
		c.refresh(ctx, m.body(), refreshed)
		return nil
	case typeNotification:
		return parseNotification(m.body())
	}
	return protocolError(codeFSM, 3, nil, "%v in an established session", m.kind)
}

// count counts a received message. For an UPDATE, u is its content, or err is the parse error.
func (c *conn) count(kind messageType, err error, u *Update) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.received.count(kind)
	switch {
	case kind != typeUpdate:
	case err != nil:
		c.routes.Malformed++
	default:
		c.routes.Announced += uint64(len(u.Announced))
		c.routes.Withdrawn += uint64(len(u.Withdrawn))
	}
}

// refresh sends a rebuilt ROUTE-REFRESH (RFC 2918) to the backend, delayed if the last one was recent. While one is
// delayed, others can be dropped, because its response will be the state at that later time.
func (c *conn) refresh(ctx context.Context, body []byte, at *[3]time.Time) {
	afi := binary.BigEndian.Uint16(body)
	negotiated := afi == afiIPv4 && c.theirs.V4 || afi == afiIPv6 && c.theirs.V6
	if len(body) != 4 || body[2] != 0 || body[3] != safiUnicast || !negotiated {
		return
	}
	now := time.Now()
	if now.Before(at[afi]) {
		return // one is delayed
	}
	due := now
	if next := at[afi].Add(refreshInterval); next.After(now) && !at[afi].IsZero() {
		due = next
	}
	at[afi] = due
	request := encode(typeRouteRefresh, []byte{0, byte(afi), 0, safiUnicast})
	if due.Equal(now) {
		c.toBackend(request)
		return
	}
	time.AfterFunc(due.Sub(now), func() {
		if ctx.Err() == nil {
			c.toBackend(request)
		}
	})
}

// fromBackend connects to the backend and passes its UPDATEs to the peer.
func (c *conn) fromBackend(ctx context.Context, hold time.Duration) error {
	target, err := c.p.g.o.Attach(ctx, c.described())
	if err != nil {
		return cease(ceaseResources, err.Error())
	}
	backend, r, err := target.connect(ctx, c.p.g.dialBackend, c.theirs)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return cease(ceaseResources, err.Error())
	}
	defer backend.Close()
	c.mu.Lock()
	c.backend = backend
	c.mu.Unlock()
	stop := context.AfterFunc(ctx, func() { backend.Close() })
	defer stop()
	var u Update
	for {
		m, err := r.next()
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			return cease(ceaseResources, fmt.Sprintf("the routing table closed the session: %v", err))
		}
		switch m.kind {
		case typeUpdate:
			if err := parseUpdate(m.body(), &u); err != nil {
				return cease(ceaseResources, fmt.Sprintf("the routing table sent an invalid UPDATE: %v", err))
			}
			if !c.passes(&u) {
				c.p.g.o.Sent(c.cfg.Address, &u)
				continue
			}
			if err := c.write(ctx, m.raw, hold); err != nil {
				return err
			}
			c.p.g.o.Sent(c.cfg.Address, &u)
		case typeNotification:
			n := parseNotification(m.body())
			n.Received, n.Text = false, n.communication()
			return n
		}
	}
}

// passes reports whether to send an UPDATE from the backend. It must not have routes of families that the session does
// not carry, or a default route. An End-of-RIB needs a peer with graceful restart (RFC 4724, section 2).
func (c *conn) passes(u *Update) bool {
	if u.other || u.families[afiIPv4] && !c.theirs.V4 || u.families[afiIPv6] && !c.theirs.V6 {
		return false
	}
	for _, p := range u.Announced {
		if p.Bits() == 0 {
			return false
		}
	}
	return c.theirs.GracefulRestart || !u.EndOfRIB4 && !u.EndOfRIB6
}
