package bgp

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"github.com/steelyard-lb/steelyard/lb"
)

// pollInterval is how often the speaker checks this node's addresses and counts received routes.
const pollInterval = time.Second

// Run maintains BGP sessions until ctx ends, then closes each with CEASE, Administrative Shutdown (RFC 9003). Peers
// then remove the routes immediately, even with graceful restart. While Run cannot listen, it only connects.
//
// No session opens before the first Set, so after a restart, the first UPDATEs contain every route that should stay.
func (s *Speaker) Run(ctx context.Context) error {
	defer s.startBFD()()
	defer s.startFinder()()
	for {
		if again, err := s.run(ctx); err != nil || !again {
			return err
		}
	}
}

// run does the work of Run until an option changes that gobgp reads only at startup. again is then true.
func (s *Speaker) run(ctx context.Context) (again bool, err error) {
	srv, err := s.startServer(ctx, true)
	if err != nil {
		return false, err
	}
	defer srv.stop()
	select {
	case <-ctx.Done():
		return false, nil
	case <-s.firstSet:
	}
	if err := s.open(ctx, srv); err != nil {
		if ctx.Err() != nil {
			return false, nil
		}
		return false, err
	}
	stopGuard := s.startGuard()
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for ctx.Err() == nil && !again {
		select {
		case <-ctx.Done():
		case <-s.restart:
			again = true
		case <-s.mail.wake:
			s.handleAll()
		case <-ticker.C:
			s.poll(ctx, srv)
		}
	}
	s.setMu.Lock()
	s.server, s.installed = nil, routes{}
	s.setMu.Unlock()
	stopGuard()
	s.handleAll()
	s.forEachSession(func(p *session) {
		p.state = "idle"
		p.forgetSignature()
	})
	return again && ctx.Err() == nil, nil
}

// startGuard runs the guard until stop is called. Unless this is only a restart, stop tells the peers that this node
// stops, and returns once the message is written.
func (s *Speaker) startGuard() (stop func()) {
	ctx, cancel := context.WithCancelCause(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.guard.Run(ctx) })
	return func() {
		cancel(s.end())
		wg.Wait()
	}
}

// open sets up gobgp's policies and adds the wanted routes.
func (s *Speaker) open(ctx context.Context, srv *bgpServer) error {
	s.setMu.Lock()
	defer s.setMu.Unlock()
	now := time.Now()
	s.forEachSession(func(p *session) {
		p.disconnectedAt, p.dialErr, p.fault = now, nil, ""
	})
	s.attachMu.Lock()
	defer s.attachMu.Unlock()
	if err := setPolicies(ctx, srv.BgpServer, s.exports()); err != nil {
		return err
	}
	if err := assignPolicies(ctx, srv.BgpServer); err != nil {
		return err
	}
	s.installed, s.server, s.backend = routes{}, srv, srv
	failed, err := s.install(ctx)
	if err != nil {
		s.server = nil
		return err
	}
	for prefix, err := range failed { // the next Set tries again
		s.log.Error("route not announced", "prefix", prefix, "err", err)
	}
	return nil
}

func (s *Speaker) forEachSession(f func(*session)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.sessions {
		f(p)
	}
}

// exports returns the export policies of gobgp's peers, by their address towards gobgp.
func (s *Speaker) exports() map[netip.Addr]export {
	all := map[netip.Addr]export{}
	s.forEachSession(func(p *session) {
		if !p.attached {
			return
		}
		e := export{
			hops: p.nextHops, only: p.only, asn: p.peer.localASN(&s.o), Attributes: p.peer.Attributes,
			prepend: p.peer.Prepend,
		}
		switch {
		case p.peer.ASN == e.asn:
			e.prepend = 0
		case e.prepend == 0:
			e.pools = s.o.prepends(&p.peer)
		}
		all[p.from] = e
	})
	return all
}

func (s *Speaker) handleAll() {
	for _, ev := range s.mail.take() {
		s.record(ev)
		s.report(ev.Peer)
	}
}

// record updates the session with an event.
func (s *Speaker) record(ev guard.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.sessions[ev.Peer]
	if !ok {
		return
	}
	now := time.Now()
	if ev.Err != nil {
		p.remember(ev.Err.Error(), now)
	}
	if ev.Err != nil && ev.Dial {
		p.dialErr = ev.Err
	}
	if ev.Err != nil && !ev.Dial {
		p.dialErr = nil
		p.setFault(ev.Err, now)
	}
	was, is := p.state == stateEstablished, ev.New == guard.Established
	if p.state != string(ev.New) {
		p.state, p.moved = string(ev.New), now
	}
	switch {
	case is && !was:
		p.since, p.disconnectedAt, p.fault = now, time.Time{}, ""
		p.ups++
	case was && !is:
		p.since = now
		p.downs++
	}
	connected := is || ev.New == guard.OpenSent || ev.New == guard.OpenConfirm
	if connected {
		p.dialErr = nil
	}
	if !connected && (was || p.disconnectedAt.IsZero() || ev.Err != nil && !ev.Dial) {
		p.disconnectedAt = now
	}
}

const maxErrors = 10

// remember adds an error to the most recent ones. A repeated error only moves to the front.
func (n *session) remember(text string, now time.Time) {
	n.errors = slices.DeleteFunc(n.errors, func(e lb.PeerError) bool { return e.Text == text })
	n.errors = slices.Insert(n.errors, 0, lb.PeerError{At: now, Text: text})
	n.errors = n.errors[:min(len(n.errors), maxErrors)]
}

// setFault records why a session ended or did not come up. An error that names a cause stays until a newer cause is
// known or the session is up.
func (n *session) setFault(err error, now time.Time) {
	var cause *guard.Error
	if n.fault == "" || n.vague || errors.As(err, &cause) {
		n.fault, n.faultAt, n.vague = err.Error(), now, cause == nil
	}
}

// report logs a peer's state if it differs from the last one logged.
func (s *Speaker) report(addr netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.sessions[addr]
	if !ok {
		return
	}
	reason := p.logReason(time.Now())
	key := fmt.Sprint(p.state == stateEstablished, reason)
	if key == p.lastLogged || p.state != stateEstablished && reason == "" {
		return
	}
	limit := &p.limit
	if p.peer.ListenRange.IsValid() && p.peer.Password == "" { // any number of unknown hosts may connect
		limit = &s.refused
	}
	left, ok := limit.Allow(time.Now(), key)
	if !ok {
		return // logged later unless the state changes
	}
	p.lastLogged = key
	log := s.log.With("peer", addr)
	if left > 0 {
		log = log.With("changes_not_logged", left)
	}
	switch {
	case p.state != stateEstablished:
		log.Warn("bgp session down", "reason", reason)
	case reason != "":
		log.Warn("bgp session up, not all routes sent", "reason", reason)
	default:
		log.Info("bgp session up")
	}
}
