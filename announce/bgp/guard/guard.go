package guard

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
)

// Options configures a Guard. The functions are called from any goroutine, but never concurrently for one peer. Except
// Unknown, they must not call the Guard.
type Options struct {
	ASN      uint32
	RouterID netip.Addr
	Hostname string // sent to the peers; may be empty
	// ListenPort and ListenAddresses are where peers may connect. Port -1 disables listening. Without addresses, the
	// guard listens on all addresses of the peers' families.
	ListenPort      int
	ListenAddresses []netip.Addr
	// Attach is called when a session is established, and returns the source of its routes. Detach is called when the
	// session has ended.
	Attach func(ctx context.Context, s Session) (Backend, error)
	Detach func(peer netip.Addr)
	// Sent is called after an UPDATE was written to the peer or withheld from it. u is valid until Sent returns.
	Sent func(peer netip.Addr, u *Update)
	// Unknown is called when an address in a Range that is not a peer connects. It may call SetPeers, and reports
	// whether the address is now a peer. If Unknown is nil, such connections are closed.
	Unknown func(from netip.Addr) bool
	// Event is called when a peer's state changes and when a connection fails.
	Event func(Event)
	// Boundary wraps the handling of each peer message. It may be nil.
	Boundary *lb.Boundary
	Log      *slog.Logger
}

type Config struct {
	Address  netip.Addr // with a zone if it is link-local
	Port     uint16
	ASN      uint32
	Password string
	LocalASN uint32        // as the peer sees it; 0 for Options.ASN
	HoldTime time.Duration // in whole seconds; 0 for no KEEPALIVEs
	// Keepalive is the time between KEEPALIVEs, from the next session on. The maximum, a third of the negotiated hold
	// time, is also the default.
	Keepalive time.Duration
	// Retry is the mean time between attempts to connect. 0 means 2 s.
	Retry  time.Duration
	TTL    int        // of sent packets; 0 for the kernel's default
	MinTTL int        // of accepted packets; 0 for any
	Source netip.Addr // if zero, the kernel chooses
	// Device is the interface or VRF of the session. Empty means any interface outside VRFs.
	Device  string
	Passive bool // do not connect
	// ExtendedNextHop offers IPv6 next hops for IPv4 routes (RFC 8950).
	ExtendedNextHop bool
	// RestartTime is the graceful restart time (RFC 4724). 0 turns graceful restart off.
	RestartTime time.Duration
	// LongLived is the long-lived graceful restart time (RFC 9494) and needs RestartTime. 0 turns it off.
	LongLived time.Duration
	// Routes identifies the routes that the backend sends to the peer. If it changes, a new session replaces the
	// current one.
	Routes string
}

// Session is an established session.
type Session struct {
	Peer   netip.Addr
	Local  netip.Addr // with a zone if it is link-local
	ASN    uint32
	V4, V6 bool // families that both sides support
	// ExtendedNextHop is true if both sides offer it (RFC 8950).
	ExtendedNextHop bool
}

// Event is a peer's state change or a failure.
type Event struct {
	Peer     netip.Addr
	Old, New State
	Err      error // what failed, or nil
	Dial     bool  // Err is from an attempt to connect
}

// Guard maintains sessions with peers.
type Guard struct {
	o           Options
	dial        func(context.Context, *Config) (socket, error) // tests use in-memory sockets
	dialBackend func(context.Context, *Backend) (net.Conn, error)

	mu       sync.Mutex // guards the following fields
	running  context.Context
	peers    map[netip.Addr]*peer
	sessions map[netip.Addr]*conn
	listen   map[Endpoint]*listener
	ranges   []Range
	own      map[string]int // see ownSockets
	wg       sync.WaitGroup
}

// New returns a Guard without peers. It opens no socket.
func New(o Options) *Guard {
	return &Guard{
		o: o, dial: dial, dialBackend: dialBackend,
		peers: map[netip.Addr]*peer{}, sessions: map[netip.Addr]*conn{}, listen: map[Endpoint]*listener{},
	}
}

// Run listens and maintains a session with every peer until ctx ends. If the cause of ctx is an *Error, the peers
// receive it.
func (g *Guard) Run(ctx context.Context) {
	g.mu.Lock()
	g.running = ctx
	for _, p := range g.peers {
		g.start(p)
	}
	g.mu.Unlock()
	g.relisten(ctx)
	tick := time.NewTicker(listenRetry)
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
			g.relisten(ctx)
		}
	}
	g.mu.Lock()
	for _, l := range g.listen {
		l.close()
	}
	clear(g.listen)
	g.mu.Unlock()
	g.wg.Wait()
	g.mu.Lock()
	g.running = nil
	for at, p := range g.peers { // for the next Run
		g.peers[at] = newPeer(g, p.wanted)
	}
	g.mu.Unlock()
}

func (g *Guard) start(p *peer) {
	ctx, cancel := context.WithCancelCause(g.running)
	p.stop = cancel
	g.wg.Go(func() {
		p.run(ctx)
		cancel(nil)
	})
}

// SetPeers replaces the peers. Sessions continue if their peer is unchanged or the change needs no new connection. For
// example, a password that changes on both sides within the hold time does not end the session, nor does a Source equal
// to the connection's local address. Other sessions end with a NOTIFICATION, or without one if graceful restart lets
// the peer keep the routes until the next session.
func (g *Guard) SetPeers(list []Config) {
	g.mu.Lock()
	wanted := map[netip.Addr]Config{}
	for _, c := range list {
		wanted[c.Address] = c
	}
	var gone []*peer
	updates := map[*peer]Config{}
	for at, p := range g.peers {
		before := p.wanted
		after, stays := wanted[at]
		if s := g.sessions[at]; s != nil && !before.Source.IsValid() && after.Source == s.local.WithZone("") {
			before.Source = after.Source // the kernel already chose this address
		}
		switch {
		case stays && before == after:
		case stays && before.sameConnection(&after) && p.stop != nil:
			p.wanted, updates[p] = after, after
			g.setKeys(&after)
		default:
			g.forget(p, before.endFor(&after, stays))
			gone = append(gone, p)
		}
	}
	g.mu.Unlock()
	for p, after := range updates {
		select {
		case p.updates <- after:
		case <-p.done:
		}
	}
	for _, p := range gone {
		if p.stop != nil {
			<-p.done
		}
	}
	g.mu.Lock()
	for at, c := range wanted {
		if g.peers[at] == nil {
			p := newPeer(g, c)
			g.peers[at] = p
			g.setKeys(&c)
			if g.running != nil {
				g.start(p)
			}
		}
	}
	running := g.running
	g.mu.Unlock()
	if running != nil {
		g.relisten(running)
	}
}

// sameConnection reports whether a connection for c also suits other. The next OPEN has the new RestartTime and
// LongLived.
func (c Config) sameConnection(other *Config) bool {
	if (c.Password == "") != (other.Password == "") || (c.RestartTime == 0) != (other.RestartTime == 0) {
		return false
	}
	if c.MinTTL > 0 && other.MinTTL == 0 || c.TTL > 0 && other.TTL == 0 {
		return false // cannot restore the kernel's default
	}
	c.Password, c.RestartTime, c.TTL, c.MinTTL = other.Password, other.RestartTime, other.TTL, other.MinTTL
	c.Passive, c.LongLived = other.Passive, other.LongLived
	c.Keepalive, c.Retry = other.Keepalive, other.Retry
	return c == *other
}

// endFor returns how a session ends when its peer changes from c to other, or is removed.
func (c *Config) endFor(other *Config, stays bool) error {
	switch {
	case !stays:
		return cease(ceaseDeconfigured, "the peer was removed")
	case c.RestartTime > 0 && other.RestartTime > 0 && c.ASN == other.ASN && c.LocalASN == other.LocalASN:
		return errReconnect
	}
	return cease(ceaseChanged, "the peer's configuration changed")
}

// errReconnect ends a connection without a NOTIFICATION.
var errReconnect = errors.New("the peer's configuration changed")

// forget stops a peer and removes its key from the listening sockets. g.mu is held.
func (g *Guard) forget(p *peer, reason error) {
	cfg := p.wanted
	delete(g.peers, cfg.Address)
	if p.stop != nil {
		p.stop(reason)
	}
	if cfg.Password != "" {
		g.eachSocket(cfg.Address, func(fd int) error { return clearKey(fd, cfg.Address) })
	}
}

// Configure changes the local side. Port and addresses take effect immediately, the rest with the next OPEN.
func (g *Guard) Configure(asn uint32, routerID netip.Addr, port int, addresses []netip.Addr) {
	g.mu.Lock()
	g.o.ASN, g.o.RouterID, g.o.ListenPort, g.o.ListenAddresses = asn, routerID, port, addresses
	running := g.running
	g.mu.Unlock()
	if running != nil {
		g.relisten(running)
	}
}

func (g *Guard) setKeys(c *Config) {
	g.eachSocket(c.Address, func(fd int) error { return setKey(fd, c) })
}

// eachSocket calls f with the listening sockets of peer's family. g.mu is held.
func (g *Guard) eachSocket(peer netip.Addr, f func(fd int) error) {
	for at, l := range g.listen {
		if l.socket == nil || at.Addr().Is4() != peer.Is4() {
			continue
		}
		raw, err := l.socket.SyscallConn()
		if err == nil {
			err = control(raw, f)
		}
		if err != nil {
			g.o.Log.Error("password not changed", "peer", peer, "err", err)
		}
	}
}

// open returns the OPEN for a peer. It always sets the Forwarding State bits, because the datapath works without this
// process, and the Restart State bit until there has been a session (RFC 4724, section 3).
func (g *Guard) open(c *Config, restarted bool) Open {
	g.mu.Lock()
	defer g.mu.Unlock()
	return Open{
		ASN: cmp.Or(c.LocalASN, g.o.ASN), HoldTime: uint16(c.HoldTime / time.Second), ID: g.o.RouterID,
		V4: true, V6: true, FourOctetAS: true, RouteRefresh: true, Hostname: g.o.Hostname,
		GracefulRestart: c.RestartTime > 0, RestartTime: uint16(c.RestartTime / time.Second),
		LongLived: uint32(c.LongLived / time.Second), Restarted: restarted, Forwarded: true,
		ExtendedNextHop: c.ExtendedNextHop,
	}
}

func (g *Guard) setSession(peer netip.Addr, c *conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c == nil {
		delete(g.sessions, peer)
		return
	}
	g.sessions[peer] = c
}

// Failed ends a peer's session because BFD, last up at lastUp, reports a failed path (RFC 9384). A session established
// after lastUp stays, because the failure belongs to the previous one.
func (g *Guard) Failed(peer netip.Addr, lastUp time.Time, text string) {
	g.endSession(peer, lastUp, cease(ceaseBFD, text))
}

// Reset ends a peer's session, which is then established again.
func (g *Guard) Reset(peer netip.Addr, text string) { g.endSession(peer, time.Now(), cease(4, text)) }

// endSession ends a peer's session if it was established before at. It does not block.
func (g *Guard) endSession(peer netip.Addr, at time.Time, e *Error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if c := g.sessions[peer]; c != nil && !c.since.After(at) {
		c.end(e)
	}
}

// Stopped returns the cause that tells peers that this node stops, so they remove its routes immediately (RFC 9003).
func Stopped(text string) error { return cease(ceaseShutdown, text) }
