package bgp

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	api "github.com/osrg/gobgp/v3/api"
)

const (
	// closing bounds how long Run waits for the peers to be told that it ends.
	closing = 3 * time.Second
	// A session that has not lasted shortLived is followed by the next one only after flapDelay.
	shortLived = 5 * time.Second
	flapDelay  = 2 * time.Second
	// refusedDelay is how long a peer that gobgp will not take is kept from it.
	refusedDelay = 10 * time.Second
	// renewEvery bounds how often a peer that waits for its session is given to gobgp anew.
	renewEvery = 10 * time.Second
	// tick is the time between two looks at what no fact tells: next hops that have come or gone.
	tick = time.Second
)

// Run speaks BGP until ctx ends, then closes every session with CEASE, Administrative Shutdown (RFC 9003), upon which
// peers forget our routes at once, graceful restart or not. It fails when it cannot listen.
//
// No session is opened before the first Set: the first thing a peer hears after a restart is everything it should keep.
func (s *Speaker) Run(ctx context.Context) error {
	e, err := s.startEngine(ctx)
	if err != nil {
		return err
	}
	defer e.end()
	var questions sync.WaitGroup
	defer questions.Wait()
	select {
	case <-ctx.Done():
		return nil
	case <-s.first:
	}
	if err := s.open(ctx, e); err != nil {
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-s.mail.wake:
			for _, f := range s.mail.take() {
				s.handle(ctx, e, f)
			}
		case <-ticker.C:
			s.look(ctx, e)
			s.ask(ctx, &questions)
		}
		s.addDue(ctx, e)
	}
	s.close(e)
	return nil
}

// open fills gobgp with what is wanted and then lets it talk to the peers.
func (s *Speaker) open(ctx context.Context, e *engine) error {
	s.setMu.Lock()
	defer s.setMu.Unlock()
	now := time.Now()
	s.each(func(p *session) {
		p.addAt, p.noTCP, p.dial, p.fault, p.md5Dropped = now, now, nil, "", md5Dropped()
		p.hops = s.o.nextHopsTo(p.peer)
	})
	if err := setPolicies(ctx, e.BgpServer, s.hops()); err != nil {
		return err
	}
	if err := assignPolicies(ctx, e.BgpServer); err != nil {
		return err
	}
	s.installed, s.engine = routes{}, e
	if err := s.install(ctx); err != nil {
		s.engine = nil
		return err
	}
	s.addDue(ctx, e)
	return nil
}

// close tells the peers and waits, for a bounded time, until they have been told. Updates queued before go out first.
func (s *Speaker) close(e *engine) {
	s.setMu.Lock()
	s.engine, s.installed = nil, routes{}
	s.setMu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), closing)
	defer cancel()
	s.each(func(p *session) { p.addAt = time.Time{} })
	for addr := range s.hops() {
		_ = e.DisablePeer(ctx, &api.DisablePeerRequest{Address: addr.String(), Communication: "steelyard stops"})
	}
	for s.established() > 0 && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-s.mail.wake:
			for _, f := range s.mail.take() {
				s.note(f)
			}
		}
	}
	s.each(func(p *session) {
		s.wire.down(p.peer.Address)
		p.state, p.has4, p.has6 = "idle", false, false
	})
	s.count()
}

// each calls f for every session, with s.mu held.
func (s *Speaker) each(f func(*session)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.sessions {
		f(p)
	}
}

func (s *Speaker) hops() map[netip.Addr]nextHops {
	hops := map[netip.Addr]nextHops{}
	s.each(func(p *session) { hops[p.peer.Address] = p.hops })
	return hops
}

func (s *Speaker) established() int {
	n := 0
	s.each(func(p *session) {
		if p.state == stateEstablished {
			n++
		}
	})
	return n
}

// handle acts on what gobgp said of a peer.
func (s *Speaker) handle(ctx context.Context, e *engine, f fact) {
	wasUp := s.note(f)
	switch {
	case f.kind != factState:
	case f.new == stateEstablished:
		s.up(ctx, e, f.peer)
		s.renewWaiting(ctx, e, f.peer)
	case f.old == stateEstablished:
		delay := time.Duration(0)
		if wasUp < shortLived {
			delay = flapDelay
		}
		s.renew(ctx, e, f.peer, delay)
	}
	s.report(f.peer)
}

// note writes down what gobgp said. It returns for how long a session that ended was up.
func (s *Speaker) note(f fact) (wasUp time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.sessions[f.peer]
	if !ok {
		return 0
	}
	now := time.Now()
	switch f.kind {
	case factDial:
		p.dial = f.err
	case factNotification:
		p.fault, p.faultAt, p.dial = f.text, now, nil
	case factState:
		p.state = f.new
		switch {
		case f.new == stateEstablished:
			p.since, p.noTCP, p.dial, p.fault = now, time.Time{}, nil, ""
			p.ups++
		case f.old == stateEstablished:
			wasUp = now.Sub(p.since)
			p.since, p.local, p.has4, p.has6 = now, netip.Addr{}, false, false
			p.downs++
			fallthrough
		case f.new == "idle":
			p.noTCP, p.md5Dropped = now, md5Dropped()
			p.blame(faultText(f.text), now)
		}
	}
	return wasUp
}

// blame writes down why a session ended or did not come up, unless it is known better: a NOTIFICATION has told it just
// now, or the peer has been asked.
func (e *session) blame(text string, now time.Time) {
	age := now.Sub(e.faultAt)
	if e.fault == "" || (text != unsaid && age > tick) || age > sayAgain {
		e.fault, e.faultAt = text, now
	}
}

// faultText says in words why gobgp ended a session.
func faultText(reason string) string {
	switch reason {
	case "invalid-msg":
		return unsaid
	case "read-failed":
		return "the peer closed the connection"
	case "write-failed":
		return "the connection broke while we sent"
	case "graceful-restart":
		return "the connection was lost"
	case "hold-timer-expired":
		return "nothing heard from the peer for the hold time"
	}
	return reason
}

// report logs the state of a peer when it is another than the one last logged.
func (s *Speaker) report(addr netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.sessions[addr]
	reason := p.problem()
	key := fmt.Sprint(p.state == stateEstablished, reason)
	unknown := reason == "" || (reason == unsaid && time.Since(p.faultAt) < sayWithin)
	if key == p.logged || (p.state != stateEstablished && unknown) {
		return
	}
	p.logged = key
	switch {
	case p.state != stateEstablished:
		s.o.Log.Warn("bgp session down", "peer", addr, "reason", reason)
	case reason != "":
		s.o.Log.Warn("bgp session up, not all routes sent", "peer", addr, "reason", reason)
	default:
		s.o.Log.Info("bgp session up", "peer", addr)
	}
}
