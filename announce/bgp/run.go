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
	// shutdownTimeout bounds how long Run waits until the peers have received the CEASE.
	shutdownTimeout = 3 * time.Second
	// A session that lasted less than flapThreshold is followed by the next one only after flapDelay.
	flapThreshold = 5 * time.Second
	flapDelay     = 2 * time.Second
	// addRetryDelay is the time before a peer that gobgp rejected is added again.
	addRetryDelay = 10 * time.Second
	// readdInterval is the minimum time between two readdWaiting of a peer.
	readdInterval = 10 * time.Second
	// pollInterval is the interval of checks that no event triggers: next hops and NOTIFICATION probes.
	pollInterval = time.Second
	// listenRetry is the interval at which a port that was in use is tried again.
	listenRetry = 5 * time.Second
)

// Run keeps BGP sessions until ctx ends, then closes each with CEASE, Administrative Shutdown (RFC 9003). Peers
// remove the routes at once then, also with graceful restart. While it cannot listen, it connects only.
//
// No session is opened before the first Set: the first UPDATEs after a restart have every route that is to stay.
func (s *Speaker) Run(ctx context.Context) error {
	for {
		if listen, err := s.run(ctx); err != nil || !listen {
			return err
		}
	}
}

// run is Run until the port is free that gobgp could not listen on, and no session needs to end for that: again is true
// then.
func (s *Speaker) run(ctx context.Context) (again bool, err error) {
	srv, err := s.startServer(ctx)
	if err != nil {
		return false, err
	}
	defer srv.stop()
	var probes sync.WaitGroup
	defer probes.Wait()
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
	defer s.startBFD()()
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	relisten := time.NewTicker(s.relisten)
	defer relisten.Stop()
	for ctx.Err() == nil && !again {
		select {
		case <-ctx.Done():
		case <-s.mail.wake:
			for _, ev := range s.mail.take() {
				s.handle(ctx, srv, ev)
			}
		case <-ticker.C:
			s.refreshNextHops(ctx, srv)
			s.probeRefusals(ctx, &probes)
		case <-relisten.C:
			again = s.established() == 0 && s.canListen()
		}
		s.addDue(ctx, srv)
	}
	s.close(srv)
	return again && ctx.Err() == nil, nil
}

// open adds the wanted routes to gobgp, and then the peers.
func (s *Speaker) open(ctx context.Context, srv *bgpServer) error {
	s.setMu.Lock()
	defer s.setMu.Unlock()
	now := time.Now()
	s.forEachSession(func(p *session) {
		p.addAt, p.disconnectedAt, p.dialErr, p.fault, p.md5Dropped = now, now, nil, "", md5Dropped()
		p.nextHops = s.o.nextHopsTo(p.peer)
	})
	if err := setPolicies(ctx, srv.BgpServer, s.nextHops()); err != nil {
		return err
	}
	if err := assignPolicies(ctx, srv.BgpServer); err != nil {
		return err
	}
	s.installed, s.server = routes{}, srv
	failed, err := s.install(ctx)
	if err != nil {
		s.server = nil
		return err
	}
	for prefix, err := range failed { // the next Set tries them again
		s.o.Log.Error("route not announced", "prefix", prefix, "err", err)
	}
	s.addDue(ctx, srv)
	return nil
}

// close sends a CEASE to the peers and waits for it to be sent, up to shutdownTimeout. Queued UPDATEs are sent before.
func (s *Speaker) close(srv *bgpServer) {
	s.setMu.Lock()
	s.server, s.installed = nil, routes{}
	s.setMu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	s.forEachSession(func(p *session) { p.addAt = time.Time{} })
	for addr := range s.nextHops() {
		_ = srv.DisablePeer(ctx, &api.DisablePeerRequest{Address: addr.String(), Communication: "steelyard stops"})
	}
	for s.established() > 0 && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-s.mail.wake:
			for _, ev := range s.mail.take() {
				s.record(ev)
			}
		}
	}
	s.forEachSession(func(p *session) {
		s.withdrawals.peerDown(p.peer.Address)
		p.state, p.has4, p.has6 = "idle", false, false
	})
	s.publishCounts()
}

// forEachSession calls f for every session with s.mu held.
func (s *Speaker) forEachSession(f func(*session)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.sessions {
		f(p)
	}
}

func (s *Speaker) nextHops() map[netip.Addr]nextHops {
	all := map[netip.Addr]nextHops{}
	s.forEachSession(func(p *session) { all[p.peer.Address] = p.nextHops })
	return all
}

func (s *Speaker) established() int {
	n := 0
	s.forEachSession(func(p *session) {
		if p.state == stateEstablished {
			n++
		}
	})
	return n
}

// handle processes an event of a peer.
func (s *Speaker) handle(ctx context.Context, srv *bgpServer, ev peerEvent) {
	wasUp := s.record(ev)
	switch {
	case ev.kind == eventBFD:
		s.resetPeer(ctx, srv, ev)
	case ev.kind != eventState:
	case ev.new == stateEstablished:
		s.sessionUp(ctx, srv, ev.peer)
		s.readdWaiting(ctx, srv, ev.peer)
	case ev.old == stateEstablished:
		delay := time.Duration(0)
		if wasUp < flapThreshold {
			delay = flapDelay
		}
		s.readd(ctx, srv, ev.peer, delay)
	}
	s.report(ev.peer)
}

// record updates the session by an event. It returns how long a session that ended was up.
func (s *Speaker) record(ev peerEvent) (wasUp time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.sessions[ev.peer]
	if !ok {
		return 0
	}
	now := time.Now()
	switch ev.kind {
	case eventDial:
		p.dialErr = ev.err
	case eventNotification:
		p.fault, p.faultAt, p.dialErr, p.reprobe = ev.text, now, nil, false
	case eventState:
		p.state = ev.new
		switch {
		case ev.new == stateEstablished:
			p.since, p.disconnectedAt, p.dialErr, p.fault, p.reprobe = now, time.Time{}, nil, "", false
			p.ups++
		case ev.old == stateEstablished:
			wasUp = now.Sub(p.since)
			p.since, p.local, p.has4, p.has6 = now, netip.Addr{}, false, false
			p.downs++
			fallthrough
		case ev.new == "idle":
			p.disconnectedAt, p.md5Dropped = now, md5Dropped()
			p.setFault(faultText(ev.text), now)
		}
	}
	return wasUp
}

// setFault sets why a session ended or did not come up. A text without a cause replaces no cause: that stays until
// another one is known, or the session is up. A cause that was set just now stays, too: it is from the peer.
func (n *session) setFault(text string, now time.Time) {
	age := now.Sub(n.faultAt)
	vague := vagueFaults[text]
	n.reprobe = n.reprobe || text == refusalUnknown && age > refusalTTL
	if n.fault == "" || vagueFaults[n.fault] || (!vague && age > pollInterval) {
		n.fault, n.faultAt = text, now
	}
}

const (
	closedByPeer   = "the peer closed the connection"
	sendFailed     = "the connection failed while sending"
	connectionLost = "the connection was lost"
)

// vagueFaults are faults without a cause.
var vagueFaults = map[string]bool{refusalUnknown: true, closedByPeer: true, sendFailed: true, connectionLost: true}

// faultText returns a description of the reason that gobgp gives for the end of a session.
func faultText(reason string) string {
	switch reason {
	case "invalid-msg":
		return refusalUnknown
	case "read-failed":
		return closedByPeer
	case "write-failed":
		return sendFailed
	case "graceful-restart":
		return connectionLost
	case "hold-timer-expired":
		return "hold timer expired: no message from the peer"
	}
	return reason
}

// report logs the state of a peer if it differs from the one last logged.
func (s *Speaker) report(addr netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.sessions[addr]
	reason := p.logReason()
	key := fmt.Sprint(p.state == stateEstablished, reason)
	unknown := reason == "" || (reason == refusalUnknown && time.Since(p.faultAt) < logRefusalAfter)
	if key == p.lastLogged || (p.state != stateEstablished && unknown) {
		return
	}
	p.lastLogged = key
	switch {
	case p.state != stateEstablished:
		s.o.Log.Warn("bgp session down", "peer", addr, "reason", reason)
	case reason != "":
		s.o.Log.Warn("bgp session up, not all routes sent", "peer", addr, "reason", reason)
	default:
		s.o.Log.Info("bgp session up", "peer", addr)
	}
}
