package bgp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/steelyard-lb/steelyard/announce/bfd"
	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"github.com/steelyard-lb/steelyard/announce/bgp/routeradv"
	"github.com/steelyard-lb/steelyard/announce/loglimit"
	"github.com/steelyard-lb/steelyard/lb"
)

// withdrawTimeout limits how long Set waits until withdrawals are written to the peers.
const withdrawTimeout = 2 * time.Second

// Speaker announces VIPs to BGP peers. It implements lb.Announcer and prometheus.Collector; all methods may be called
// from any goroutine.
type Speaker struct {
	log         *slog.Logger
	withdrawals *withdrawalTracker
	mail        mailbox
	guard       *guard.Guard
	bfd         *bfd.Monitor
	bfdWanted   chan struct{} // closed when a peer uses BFD
	bfdOnce     sync.Once

	firstSet     chan struct{} // closed by the first Set
	firstSetOnce sync.Once

	finder *routeradv.Finder // for peers on interfaces

	restart chan struct{} // signals that a changed option needs new sessions

	kept atomic.Bool // Keep was called

	peersMu sync.Mutex // held while peers change

	setMu     sync.Mutex // guards the following fields; held during a whole Set
	wanted    routes
	vips      []lb.Announcement // of the last Set
	installed routes
	settling  settling
	server    *bgpServer // nil before Run starts it and after Run ends

	attachMu sync.Mutex // orders changes of peers and policies in gobgp
	backend  *bgpServer // of the last Run

	mu       sync.Mutex // guards the following fields; never held while gobgp is called
	o        Options
	bfdError string // why BFD does not run, or ""
	wants4   bool   // the last Set had IPv4 routes …
	wants6   bool   // … and IPv6 routes
	sessions map[netip.Addr]*session
	found    map[string]netip.Addr // routers by interface
	dynamic  map[netip.Addr]bool   // connected peers in a ListenRange
	refused  loglimit.Limit        // for connections from unknown hosts
}

// New returns a Speaker, or an error with every invalid option. It opens no socket.
func New(o Options) (*Speaker, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("bgp options: %w", err)
	}
	s := &Speaker{
		o: o, log: o.Log, withdrawals: newWithdrawalTracker(), settling: settling{},
		mail: mailbox{wake: make(chan struct{}, 1)}, firstSet: make(chan struct{}), installed: routes{},
		sessions: map[netip.Addr]*session{}, restart: make(chan struct{}, 1), bfdWanted: make(chan struct{}),
		found: map[string]netip.Addr{}, dynamic: map[netip.Addr]bool{},
	}
	s.finder = routeradv.New(routeradv.Options{
		Found: s.routerFound, InUse: s.isEstablished, Boundary: o.Boundary, Log: o.Log,
	})
	if s.bfd, err = bfd.New(bfd.Options{Changed: s.bfdChanged, Boundary: o.Boundary, Log: o.Log}); err != nil {
		return nil, fmt.Errorf("bfd: %w", err)
	}
	s.guard = s.newGuard()
	s.setPeers()
	return s, nil
}

func (s *Speaker) newGuard() *guard.Guard {
	hostname, _ := os.Hostname()
	return guard.New(guard.Options{
		ASN: s.o.ASN, RouterID: s.o.RouterID, Hostname: hostname, ListenPort: s.o.ListenPort,
		ListenAddresses: s.o.ListenAddresses, Attach: s.attach, Detach: s.detach, Sent: s.withdrawals.sent,
		Unknown: s.connected, Event: s.mail.post, Boundary: s.o.Boundary, Log: s.log,
	})
}

// options returns the active options. Their slices are never modified, so callers may read them without a lock.
func (s *Speaker) options() Options {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.o
}

// Set implements lb.Announcer: it announces exactly these VIPs and ignores By. When it returns, withdrawals are written
// to every session and new routes are queued. An announcement that cannot be made results in an error, but does not
// affect others.
func (s *Speaker) Set(ctx context.Context, announcements []lb.Announcement) error {
	s.setMu.Lock()
	defer s.setMu.Unlock()
	o := s.options()
	wanted, errs := o.routesFor(announcements)
	o.limit(wanted, s.wanted, announcements, errs)
	if s.kept.Load() {
		return errs.OrNil()
	}
	before := s.vips
	s.wanted, s.vips = wanted, announcements
	s.wants(wanted)
	s.firstSetOnce.Do(func() { close(s.firstSet) })
	if s.server == nil {
		return errs.OrNil()
	}
	failed, err := s.install(ctx)
	for _, a := range slices.Concat(before, announcements) {
		for p, err := range failed {
			if p.Contains(a.VIP.Unmap()) && errs[a.VIP] == nil {
				errs.Add(a.VIP, err)
			}
		}
	}
	if err != nil {
		return errors.Join(err, errs.OrNil())
	}
	return errs.OrNil()
}

// Keep makes peers keep the routes during a restart (RFC 4724, section 4.2): Set no longer changes anything, and Run
// ends without notifying peers, which keep the routes for Options.RestartTime. A peer without graceful restart removes
// them when the connection ends.
func (s *Speaker) Keep() { s.kept.Store(true) }

// end returns the reason that peers receive when Run ends.
func (s *Speaker) end() error {
	if s.kept.Load() {
		return errRestart // sends no NOTIFICATION
	}
	return guard.Stopped("steelyard is stopping")
}

var errRestart = errors.New("steelyard is restarting")

// install applies the wanted state to gobgp's routes, withdrawals first. It returns errors by prefix, and any error
// that stopped it early. s.setMu is held.
func (s *Speaker) install(ctx context.Context) (failed map[netip.Prefix]error, early error) {
	o := s.options()
	steps := changes(s.installed, s.target(&o))
	withdrawn := 0
	for withdrawn < len(steps) && steps[withdrawn].weight == 0 {
		withdrawn++
	}
	prefixes := make([]netip.Prefix, withdrawn)
	for i, c := range steps[:withdrawn] {
		prefixes[i] = c.prefix
	}
	s.withdrawals.expect(prefixes)
	failed = map[netip.Prefix]error{}
	for i, c := range steps {
		if i%256 == 0 && ctx.Err() != nil {
			early = fmt.Errorf("change routes: %d of %d not changed: %w", len(steps)-i, len(steps), ctx.Err())
			break
		}
		if err := s.applyChange(ctx, &o, c); err != nil {
			failed[c.prefix] = err
		}
	}
	if withdrawn > 0 {
		ctx, cancel := context.WithTimeout(ctx, withdrawTimeout)
		defer cancel()
		if n := s.withdrawals.wait(ctx); n > 0 && len(failed) == 0 && early == nil {
			s.log.Warn("withdrawals not confirmed", "routes", n, "after", withdrawTimeout)
		}
	}
	return failed, early
}

func (s *Speaker) applyChange(ctx context.Context, o *Options, c change) error {
	p, err := o.path(c)
	if err != nil {
		return err
	}
	if c.weight == 0 {
		if err := s.server.DeletePath(ctx, &api.DeletePathRequest{Path: p}); err != nil {
			return fmt.Errorf("withdraw %v: %w", c.prefix, err)
		}
		delete(s.installed, c.prefix)
		return nil
	}
	if _, err := s.server.AddPath(ctx, &api.AddPathRequest{Path: p}); err != nil {
		return fmt.Errorf("announce %v: %w", c.prefix, err)
	}
	s.installed[c.prefix] = c.weight
	return nil
}

// Peers returns the state of every peer, sorted by address.
func (s *Speaker) Peers() []lb.PeerStatus {
	details := s.details()
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	list := make([]lb.PeerStatus, 0, len(s.sessions))
	states, lacking := s.bfdStates(), s.lacking()
	for _, e := range s.sessions {
		p := e.status(now, s.withdrawals.routes(e.peer.Address))
		p.BFD = states[p.Peer].text
		if e.state == stateEstablished {
			p.Session = details[p.Peer]
		}
		p.LastError = cmp.Or(p.LastError, e.notAccepted(lacking...), e.bfdNotice(states[p.Peer], now))
		if !e.peer.known() {
			p.LastError = s.finder.Problem(e.peer.Interface)
		}
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b lb.PeerStatus) int { return a.Peer.Compare(b.Peer) })
	return list
}

// Carried reports whether a VIP's route was sent to at least one peer.
func (s *Speaker) Carried(vip netip.Addr) bool {
	o := s.options()
	return s.withdrawals.written(o.prefixOf(vip.Unmap().WithZone("")))
}

// Grace returns how long to announce a route with LowerPreference before its planned withdrawal, so that routers choose
// other routes, or 0 if no router has the route.
func (s *Speaker) Grace() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.sessions {
		if p.state == stateEstablished && !s.kept.Load() {
			return s.o.GracefulShutdown
		}
	}
	return 0
}

// mailbox passes events to the goroutine of Run. post never blocks.
type mailbox struct {
	mu     sync.Mutex
	events []guard.Event
	wake   chan struct{}
}

func (m *mailbox) post(ev guard.Event) {
	m.mu.Lock()
	m.events = append(m.events, ev)
	m.mu.Unlock()
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

func (m *mailbox) take() []guard.Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	events := m.events
	m.events = nil
	return events
}
