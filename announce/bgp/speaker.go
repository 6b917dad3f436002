package bgp

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/steelyard-lb/steelyard/lb"
)

const (
	// connectRetry is the least time between two attempts to connect, in seconds; gobgp takes up to twice that, and gives
	// an attempt up after one second less.
	connectRetry = 2
	// confirmation bounds how long Set waits for withdrawals to be written to the peers.
	confirmation = 2 * time.Second
)

// Speaker announces VIPs to BGP peers. It implements lb.Announcer and prometheus.Collector; all methods may be called
// from any goroutine.
type Speaker struct {
	o    Options
	wire *wire
	mail mailbox

	first     chan struct{} // closed by the first Set
	firstOnce sync.Once

	setMu     sync.Mutex // guards what follows; held for the whole of a Set
	wanted    routes
	installed routes
	engine    *engine // nil: Run is not that far, or has ended

	mu       sync.Mutex // guards what follows, never held while gobgp is called
	sessions map[netip.Addr]*session
	v4, v6   int // routes in gobgp
}

// New returns a Speaker, or every reason why o cannot be used. It opens nothing.
func New(o Options) (*Speaker, error) {
	o, err := o.withDefaults()
	if err != nil {
		return nil, fmt.Errorf("bgp options: %w", err)
	}
	s := &Speaker{
		o: o, wire: newWire(), mail: mailbox{wake: make(chan struct{}, 1)}, first: make(chan struct{}),
		installed: routes{}, sessions: map[netip.Addr]*session{},
	}
	now := time.Now()
	for _, p := range o.Peers {
		s.sessions[p.Address] = &session{peer: p, state: "idle", since: now, noTCP: now}
	}
	return s, nil
}

// Set implements lb.Announcer: exactly these VIPs are announced, whatever By says. It returns when withdrawals are
// written to every session; new routes are on their way to the sessions then. Announcements that cannot be made are
// errors and keep no other from being made.
func (s *Speaker) Set(ctx context.Context, announcements []lb.Announcement) error {
	s.setMu.Lock()
	defer s.setMu.Unlock()
	wanted, err := s.o.routesFor(announcements)
	s.wanted = wanted
	s.firstOnce.Do(func() { close(s.first) })
	if s.engine == nil {
		return err
	}
	return errors.Join(err, s.install(ctx))
}

// install makes gobgp have what is wanted. s.setMu is held.
func (s *Speaker) install(ctx context.Context) error {
	steps := s.o.changes(s.installed, s.wanted)
	withdrawn := 0
	for withdrawn < len(steps) && steps[withdrawn].weight == 0 {
		withdrawn++
	}
	gone := make([]netip.Prefix, withdrawn)
	for i, c := range steps[:withdrawn] {
		gone[i] = c.prefix
	}
	s.wire.expect(gone)
	var errs []error
	for i, c := range steps {
		if i%256 == 0 && ctx.Err() != nil {
			errs = append(errs, fmt.Errorf("change routes: %d of %d are not changed yet: %w", len(steps)-i, len(steps), ctx.Err()))
			break
		}
		if err := s.step(ctx, c); err != nil {
			errs = append(errs, err)
		}
	}
	s.count()
	if withdrawn > 0 {
		ctx, cancel := context.WithTimeout(ctx, confirmation)
		defer cancel()
		if n := s.wire.wait(ctx); n > 0 && len(errs) == 0 {
			s.o.Log.Warn("withdrawals not confirmed", "routes", n, "after", confirmation)
		}
	}
	return errors.Join(errs...)
}

// step makes one change in gobgp.
func (s *Speaker) step(ctx context.Context, c change) error {
	p, err := s.o.path(c)
	if err != nil {
		return err
	}
	if c.weight == 0 {
		if err := s.engine.DeletePath(ctx, &api.DeletePathRequest{Path: p}); err != nil {
			return fmt.Errorf("withdraw %v: %w", c.prefix, err)
		}
		delete(s.installed, c.prefix)
		return nil
	}
	if _, err := s.engine.AddPath(ctx, &api.AddPathRequest{Path: p}); err != nil {
		return fmt.Errorf("announce %v: %w", c.prefix, err)
	}
	s.installed[c.prefix] = c.weight
	return nil
}

// count publishes how many routes there are.
func (s *Speaker) count() {
	v4 := 0
	for p := range s.installed {
		if p.Addr().Is4() {
			v4++
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.v4, s.v6 = v4, len(s.installed)-v4
}

// Peers returns the state of every peer, in the order of their addresses.
func (s *Speaker) Peers() []lb.PeerStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	list := make([]lb.PeerStatus, 0, len(s.sessions))
	for _, e := range s.sessions {
		list = append(list, e.status(now, s.v4, s.v6))
	}
	slices.SortFunc(list, func(a, b lb.PeerStatus) int { return a.Peer.Compare(b.Peer) })
	return list
}

// mailbox hands facts to the goroutine of Run. Posting never blocks.
type mailbox struct {
	mu    sync.Mutex
	facts []fact
	wake  chan struct{}
}

func (m *mailbox) post(f fact) {
	m.mu.Lock()
	m.facts = append(m.facts, f)
	m.mu.Unlock()
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

func (m *mailbox) take() []fact {
	m.mu.Lock()
	defer m.mu.Unlock()
	facts := m.facts
	m.facts = nil
	return facts
}
