package bgp

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	api "github.com/osrg/gobgp/v3/api"
)

// up finds out what a new session is like and puts right what was guessed before.
func (s *Speaker) up(ctx context.Context, e *engine, addr netip.Addr) {
	var local netip.Addr
	has4, has6 := false, false
	err := e.ListPeer(ctx, &api.ListPeerRequest{Address: addr.String()}, func(p *api.Peer) {
		local, _ = netip.ParseAddr(p.GetTransport().GetLocalAddress())
		has4, has6 = families(p.GetState())
	})
	if err != nil || !local.IsValid() {
		return // gone again already
	}
	s.mu.Lock()
	p := s.sessions[addr]
	before := p.hops
	p.local, p.hops, p.has4, p.has6 = local, s.o.nextHopsFrom(local), has4, has6
	after := p.hops
	s.mu.Unlock()
	s.rehop(ctx, e, addr, before, after)
	s.watch(addr)
}

// watch lets Set wait for what is written to an established session.
func (s *Speaker) watch(addr netip.Addr) {
	s.mu.Lock()
	p := *s.sessions[addr]
	s.mu.Unlock()
	if p.state == stateEstablished && p.local.IsValid() {
		s.wire.up(addr, p.carries)
	}
}

// families returns for which families the peer takes routes; a peer that names none takes IPv4 (RFC 4760, section 8).
func families(state *api.PeerState) (v4, v6 bool) {
	named := false
	for _, c := range state.GetRemoteCap() {
		var mp api.MultiProtocolCapability
		if c.MessageIs(&mp) && c.UnmarshalTo(&mp) == nil {
			named = true
			v4 = v4 || (mp.Family.Afi == api.Family_AFI_IP && mp.Family.Safi == api.Family_SAFI_UNICAST)
			v6 = v6 || (mp.Family.Afi == api.Family_AFI_IP6 && mp.Family.Safi == api.Family_SAFI_UNICAST)
		}
	}
	return v4 || !named, v6
}

// ask finds out why peers have refused us that gobgp does not know it of.
func (s *Speaker) ask(ctx context.Context, questions *sync.WaitGroup) {
	var silent []Peer
	now := time.Now()
	s.each(func(p *session) {
		if p.fault == unsaid && (p.state == "idle" || p.state == "active") && now.Sub(p.asked) > askAgain {
			p.asked = now
			silent = append(silent, p.peer)
		}
	})
	for _, p := range silent {
		questions.Go(func() {
			if text := s.o.why(ctx, p); text != "" {
				s.mail.post(fact{peer: p.Address, kind: factNotification, text: text})
			}
		})
	}
}

// look notices next hops that have come or gone with an address of this machine.
func (s *Speaker) look(ctx context.Context, e *engine) {
	for addr, before := range s.hops() {
		if before.session4 && before.session6 {
			continue
		}
		s.mu.Lock()
		p := s.sessions[addr]
		peer, local := p.peer, p.local
		s.mu.Unlock()
		after := s.o.nextHopsTo(peer)
		if local.IsValid() {
			after = s.o.nextHopsFrom(local)
		}
		if after == before {
			continue
		}
		s.mu.Lock()
		p.hops = after
		s.mu.Unlock()
		s.rehop(ctx, e, addr, before, after)
		s.watch(addr)
		s.report(addr)
	}
}

// rehop puts changed next hops into force. A next hop that is gone ends the session: gobgp would not withdraw the routes.
func (s *Speaker) rehop(ctx context.Context, e *engine, addr netip.Addr, before, after nextHops) {
	if before == after {
		return
	}
	if err := setPolicies(ctx, e.BgpServer, s.hops()); err != nil {
		s.o.Log.Error("next hop not changed", "peer", addr, "err", err)
		return
	}
	lost := false
	for _, family := range []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()} {
		lost = lost || (before.has(family) && !after.has(family))
	}
	if lost {
		s.renew(ctx, e, addr, 0)
		return
	}
	_ = e.ResetPeer(ctx, &api.ResetPeerRequest{Address: addr.String(), Soft: true, Direction: api.ResetPeerRequest_OUT})
}

// renew takes a peer from gobgp and gives it back after delay, so that the OPEN of its next session says again that
// forwarding goes on, and the session is not kept waiting.
func (s *Speaker) renew(ctx context.Context, e *engine, addr netip.Addr, delay time.Duration) {
	s.mu.Lock()
	p := s.sessions[addr]
	p.addAt, p.state, p.local = time.Now().Add(delay), "idle", netip.Addr{}
	s.mu.Unlock()
	s.wire.down(addr)
	_ = e.DeletePeer(ctx, &api.DeletePeerRequest{Address: addr.String()})
}

// renewWaiting gives those peers to gobgp anew that have no connection yet: when one session with LocalRestarting is
// up, gobgp takes the mark from all peers, and their OPEN would make them forget our routes (RFC 4724, section 4.2).
func (s *Speaker) renewWaiting(ctx context.Context, e *engine, up netip.Addr) {
	var waiting []netip.Addr
	now := time.Now()
	s.each(func(p *session) {
		idle := p.state == "idle" || p.state == "active"
		if p.peer.Address != up && p.peer.GracefulRestart && idle && p.addAt.IsZero() && now.Sub(p.renewed) > renewEvery {
			p.renewed = now
			waiting = append(waiting, p.peer.Address)
		}
	})
	for _, addr := range waiting {
		s.renew(ctx, e, addr, 0)
	}
	s.addDue(ctx, e)
}

// addDue gives to gobgp the peers whose time has come.
func (s *Speaker) addDue(ctx context.Context, e *engine) {
	now := time.Now()
	var due []*session
	s.each(func(p *session) {
		if !p.addAt.IsZero() && !now.Before(p.addAt) {
			p.addAt = time.Time{}
			due = append(due, p)
		}
	})
	for _, p := range due {
		if err := e.AddPeer(ctx, &api.AddPeerRequest{Peer: p.apiPeer(&s.o)}); err != nil {
			s.mu.Lock()
			p.fault, p.faultAt, p.addAt = fmt.Sprintf("add the peer: %v", err), now, now.Add(refusedDelay)
			s.mu.Unlock()
			s.report(p.peer.Address)
		}
	}
}
