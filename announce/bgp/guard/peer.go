package guard

import (
	"cmp"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// dialRetry is the default of Config.Retry.
	dialRetry = 2 * time.Second
	// After a session that was refused or lasted less than flapThreshold, the next attempt follows after idleTime.
	flapThreshold = 5 * time.Second
	idleTime      = 3 * time.Second
)

// State is the state of a peer's most advanced connection (RFC 4271, section 8.2.2).
type State string

// The states, from the lowest to the highest.
const (
	Idle        State = "idle"    // waits after a failure
	Connect     State = "connect" // connecting
	Active      State = "active"  // waits for the peer to connect, or for the next attempt
	OpenSent    State = "opensent"
	OpenConfirm State = "openconfirm"
	Established State = "established"
)

// peer is one neighbour. Its goroutine decides which connections to use.
type peer struct {
	g        *Guard
	cfg      atomic.Pointer[Config] // only the goroutine changes it
	wanted   Config                 // from the last SetPeers; guarded by Guard.mu
	updates  chan Config
	accepted chan socket
	events   chan any
	probe    chan struct{} // requests a KEEPALIVE from the session
	stop     context.CancelCauseFunc
	done     chan struct{}
	// lingering counts connections that are sending their last NOTIFICATION.
	lingering sync.WaitGroup

	// Only the goroutine uses the following fields.
	conns   map[*conn]State // OpenSent: connected; OpenConfirm: the OPEN is accepted
	waiting *conn           // becomes the session once the current one has ended
	dialing bool
	redial  context.CancelFunc // cancels an attempt to connect; the next begins immediately
	state   State
	wasUp   bool      // there has been a session
	idle    time.Time // end of the idle state
}

type (
	opened      struct{ c *conn }
	established struct{ c *conn }
	ended       struct {
		c   *conn
		err error
	}
	dialed struct {
		c   socket
		err error
	}
)

func newPeer(g *Guard, cfg Config) *peer {
	p := &peer{
		g: g, wanted: cfg, updates: make(chan Config), accepted: make(chan socket), events: make(chan any),
		probe: make(chan struct{}, 1), done: make(chan struct{}), conns: map[*conn]State{}, state: Idle,
		redial: func() {},
	}
	p.cfg.Store(&cfg)
	return p
}

// run maintains a session with the peer until ctx ends. If the cause of ctx is an *Error, the peer receives it.
func (p *peer) run(ctx context.Context) {
	defer close(p.done)
	defer p.lingering.Wait()
	retry := time.NewTimer(0)
	defer retry.Stop()
	stopping := ctx.Done()
	for stopping != nil || len(p.conns) > 0 || p.dialing {
		select {
		case <-stopping:
			stopping = nil
			p.endAll(context.Cause(ctx))
		case cfg := <-p.updates:
			before := p.cfg.Load()
			p.update(&cfg)
			if before.Passive && !cfg.Passive || before.Password != cfg.Password {
				p.redial()
				retry.Reset(0)
			}
		case c := <-p.accepted:
			p.begin(ctx, c, false)
		case e := <-p.events:
			p.handle(ctx, e, retry)
		case <-retry.C:
			p.dial(ctx)
		}
		p.publish(nil)
	}
}

func (p *peer) update(cfg *Config) {
	before := p.cfg.Load()
	p.cfg.Store(cfg)
	for c := range p.conns {
		raw, err := c.c.SyscallConn()
		if err == nil {
			err = control(raw, func(fd int) error {
				if cfg.Password != before.Password {
					return errors.Join(setKey(fd, cfg), setOptions(fd, cfg))
				}
				return setOptions(fd, cfg)
			})
		}
		if err != nil {
			p.g.o.Log.Error("options of an open connection not changed", "peer", cfg.Address, "err", err)
		}
	}
}

func (p *peer) endAll(cause error) {
	for c := range p.conns {
		c.end(cause)
	}
}

// dial connects, unless there is already a connection that may become the session.
func (p *peer) dial(ctx context.Context) {
	cfg := p.cfg.Load()
	if p.dialing || cfg.Passive || ctx.Err() != nil {
		return
	}
	for c, s := range p.conns {
		if c.outgoing || s != OpenSent {
			return
		}
	}
	p.dialing, p.idle = true, time.Time{}
	ctx, p.redial = context.WithCancel(ctx)
	go func() {
		c, err := p.g.dial(ctx, cfg)
		p.events <- dialed{c, err}
	}()
}

// begin starts the handshake on a new connection. It replaces a connection in the same direction that is still in
// OpenSent.
func (p *peer) begin(ctx context.Context, tcp socket, outgoing bool) {
	if ctx.Err() != nil {
		tcp.Close()
		return
	}
	for c, s := range p.conns {
		if s == Established { // a peer that has lost the session responds to a KEEPALIVE with RST
			select {
			case p.probe <- struct{}{}:
			default:
			}
		}
		if s == OpenSent && c.outgoing == outgoing {
			c.end(cease(ceaseCollision, errRefused.Error()))
		}
	}
	// Only end or cancel may end it, because endAll chooses the NOTIFICATION.
	cfg := p.cfg.Load()
	connCtx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	c := &conn{
		p: p, c: tcp, r: newMessageReader(tcp), outgoing: outgoing, cfg: *cfg, ours: p.g.open(cfg, !p.wasUp),
		local: addrOf(tcp.LocalAddr()), cancel: cancel, granted: make(chan bool, 1),
	}
	p.conns[c] = OpenSent
	go c.run(connCtx)
}

func (p *peer) handle(ctx context.Context, event any, retry *time.Timer) {
	switch e := event.(type) {
	case dialed:
		p.dialing = false
		p.redial()
		if errors.Is(e.err, context.Canceled) {
			retry.Reset(0)
			return
		}
		if e.err != nil {
			if ctx.Err() == nil {
				p.g.o.Event(Event{Peer: p.cfg.Load().Address, Old: p.state, New: Active, Err: e.err, Dial: true})
				p.state = Active
			}
			retry.Reset(p.retry())
			return
		}
		p.begin(ctx, e.c, true)
	case opened:
		e.c.granted <- p.admit(e.c)
	case established:
		if p.waiting != nil {
			p.waiting.granted <- false
		}
		p.waiting = e.c
		for c, s := range p.conns {
			switch {
			case s == Established: // no NOTIFICATION, because with graceful restart the peer then keeps the routes
				c.end(errReplaced)
			case c != e.c:
				c.end(cease(ceaseCollision, errRefused.Error()))
			}
		}
		p.establish()
	case ended:
		p.ended(e, retry)
		p.establish()
	}
}

// establish makes the waiting connection the session once the previous session has ended, because the backend has one
// session per peer.
func (p *peer) establish() {
	c := p.waiting
	if c == nil {
		return
	}
	for _, s := range p.conns {
		if s == Established {
			return
		}
	}
	p.waiting = nil
	p.conns[c] = Established
	c.since, p.wasUp = time.Now(), true
	p.g.setSession(p.cfg.Load().Address, c)
	c.granted <- true
}

var errReplaced = errors.New("the peer has opened a new connection with its password")

// replaces reports whether a new connection may replace a session. If the password changes first here and then on the
// router, nothing more arrives on the old connection. (RFC 4724, section 5, requires the same after a restart.) The
// password proves the peer's identity. A young session stays, because connections in both directions may have collided.
func (c *conn) replaces(session *conn) bool {
	return !c.outgoing && c.cfg.Password != "" && time.Since(session.since) >= flapThreshold
}

// admit decides whether a connection with a valid OPEN may continue (RFC 4271, section 6.8).
func (p *peer) admit(c *conn) bool {
	for other, s := range p.conns {
		if other == c || s == OpenSent || s == Established && c.replaces(other) {
			continue
		}
		if s == Established || other.outgoing != c.outgoing && !c.wins() {
			return false
		}
		other.end(cease(ceaseCollision, errRefused.Error()))
	}
	p.conns[c] = OpenConfirm
	return true
}

// wins reports whether this connection wins against one in the other direction. The side with the higher BGP identifier
// keeps its connection or, if they are equal, the side with the higher AS number (RFC 6286, section 2.3).
func (c *conn) wins() bool {
	ours := c.ours.ID.Compare(c.theirs.ID)
	if ours == 0 && c.ours.ASN > c.theirs.ASN {
		ours = 1
	}
	return c.outgoing == (ours > 0)
}

// ended removes a connection and schedules the next attempt.
func (p *peer) ended(e ended, retry *time.Timer) {
	was := p.conns[e.c]
	delete(p.conns, e.c)
	e.c.cancel(nil)
	var n *Error
	if errors.As(e.err, &n) && n.Code == codeCease && n.Subcode == ceaseCollision && was != Established {
		if len(p.conns) == 0 {
			retry.Reset(p.retry())
		}
		return
	}
	now, wait := time.Now(), jitter(idleTime)
	if was == Established {
		p.g.setSession(p.cfg.Load().Address, nil)
		if now.Sub(e.c.since) >= flapThreshold {
			wait = 0
		}
	}
	p.idle = now.Add(wait)
	retry.Reset(wait)
	p.publish(e.err)
}

func (p *peer) retry() time.Duration { return jitter(cmp.Or(p.cfg.Load().Retry, dialRetry)) }

// publish reports a state change, or why a connection ended.
func (p *peer) publish(err error) {
	state := Active
	if time.Now().Before(p.idle) {
		state = Idle
	}
	if p.dialing {
		state = Connect
	}
	for _, s := range p.conns {
		if s == Established || s == OpenConfirm && state != Established || s == OpenSent && rank(state) < rank(s) {
			state = s
		}
	}
	if state != p.state || err != nil {
		p.g.o.Event(Event{Peer: p.cfg.Load().Address, Old: p.state, New: state, Err: err})
		p.state = state
	}
}

func rank(s State) int {
	for i, x := range []State{Idle, Connect, Active, OpenSent, OpenConfirm, Established} {
		if s == x {
			return i
		}
	}
	return -1
}

// jitter returns 75 % to 125 % of d, so that two peers do not keep connecting simultaneously (RFC 4271, section 10).
func jitter(d time.Duration) time.Duration { return d*3/4 + rand.N(d/2) }
