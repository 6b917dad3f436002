package bgp

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	api "github.com/osrg/gobgp/v3/api"
)

// sessionUp reads the properties of a new session and corrects the next hops that were expected for it.
func (s *Speaker) sessionUp(ctx context.Context, srv *bgpServer, addr netip.Addr) {
	var local netip.Addr
	has4, has6 := false, false
	err := srv.ListPeer(ctx, &api.ListPeerRequest{Address: addr.String()}, func(p *api.Peer) {
		local, _ = netip.ParseAddr(p.GetTransport().GetLocalAddress())
		has4, has6 = families(p.GetState())
	})
	if err != nil || !local.IsValid() {
		return // the session has ended already
	}
	s.mu.Lock()
	p := s.sessions[addr]
	before := p.nextHops
	p.local, p.nextHops, p.has4, p.has6 = local, s.o.nextHopsFrom(local), has4, has6
	after := p.nextHops
	s.mu.Unlock()
	s.changeNextHops(ctx, srv, addr, before, after)
	s.trackWithdrawals(addr)
}

// trackWithdrawals makes Set wait for withdrawals to an established session.
func (s *Speaker) trackWithdrawals(addr netip.Addr) {
	s.mu.Lock()
	p := *s.sessions[addr]
	s.mu.Unlock()
	if p.state == stateEstablished && p.local.IsValid() {
		s.withdrawals.peerUp(addr, p.carries)
	}
}

// families returns the families of the peer; without a multiprotocol capability that is IPv4 (RFC 4760, section 8).
func families(state *api.PeerState) (v4, v6 bool) {
	multiprotocol := false
	for _, c := range state.GetRemoteCap() {
		var mp api.MultiProtocolCapability
		if c.MessageIs(&mp) && c.UnmarshalTo(&mp) == nil {
			multiprotocol = true
			v4 = v4 || (mp.Family.Afi == api.Family_AFI_IP && mp.Family.Safi == api.Family_SAFI_UNICAST)
			v6 = v6 || (mp.Family.Afi == api.Family_AFI_IP6 && mp.Family.Safi == api.Family_SAFI_UNICAST)
		}
	}
	return v4 || !multiprotocol, v6
}

// probeRefusals starts a NOTIFICATION probe of every peer that refused the session without a known reason.
func (s *Speaker) probeRefusals(ctx context.Context, probes *sync.WaitGroup) {
	for _, p := range s.toProbe(time.Now()) {
		probes.Go(func() {
			if text := s.o.probeNotification(ctx, p); text != "" {
				s.mail.post(peerEvent{peer: p.Address, kind: eventNotification, text: text})
			}
		})
	}
}

// toProbe returns the peers to probe now, and records that they are probed.
func (s *Speaker) toProbe(now time.Time) (due []Peer) {
	s.forEachSession(func(p *session) {
		if (p.fault == refusalUnknown || p.reprobe) && p.connecting() && now.Sub(p.probedAt) > probeInterval {
			p.probedAt = now
			due = append(due, p.peer)
		}
	})
	return due
}

// refreshNextHops applies changes of next hops that follow from changed addresses of this node.
func (s *Speaker) refreshNextHops(ctx context.Context, srv *bgpServer) {
	for addr, before := range s.nextHops() {
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
		p.nextHops = after
		s.mu.Unlock()
		s.changeNextHops(ctx, srv, addr, before, after)
		s.trackWithdrawals(addr)
		s.report(addr)
	}
}

// changeNextHops applies changed next hops. A next hop that was lost ends the session, because gobgp would not withdraw
// the routes.
func (s *Speaker) changeNextHops(ctx context.Context, srv *bgpServer, addr netip.Addr, before, after nextHops) {
	if before == after {
		return
	}
	if err := setPolicies(ctx, srv.BgpServer, s.nextHops()); err != nil {
		s.o.Log.Error("next hop not changed", "peer", addr, "err", err)
		return
	}
	if lostNextHop(before, after) {
		s.readd(ctx, srv, addr, 0)
		return
	}
	_ = srv.ResetPeer(ctx, &api.ResetPeerRequest{
		Address: addr.String(), Soft: true, Direction: api.ResetPeerRequest_OUT,
	})
}

// lostNextHop reports whether a family had a next hop before and has none after.
func lostNextHop(before, after nextHops) bool {
	lost := func(family netip.Addr) bool { return before.has(family) && !after.has(family) }
	return lost(netip.IPv4Unspecified()) || lost(netip.IPv6Unspecified())
}

// readd removes a peer from gobgp and adds it again after delay, so that the OPEN of its next session has the
// Forwarding State bit again, and gobgp does not delay the session.
func (s *Speaker) readd(ctx context.Context, srv *bgpServer, addr netip.Addr, delay time.Duration) {
	s.mu.Lock()
	p := s.sessions[addr]
	p.addAt, p.state, p.local = time.Now().Add(delay), "idle", netip.Addr{}
	s.mu.Unlock()
	s.withdrawals.peerDown(addr)
	_ = srv.DeletePeer(ctx, &api.DeletePeerRequest{Address: addr.String()})
}

// readdWaiting removes and adds the peers that have no session yet. Once one session with LocalRestarting is up, gobgp
// clears the flag of all peers, and their next OPEN would make them drop the routes (RFC 4724, section 4.2).
func (s *Speaker) readdWaiting(ctx context.Context, srv *bgpServer, up netip.Addr) {
	for _, addr := range s.toReadd(up, time.Now()) {
		s.readd(ctx, srv, addr, 0)
	}
	s.addDue(ctx, srv)
}

// toReadd returns the peers that readdWaiting readds now, and records that.
func (s *Speaker) toReadd(up netip.Addr, now time.Time) (waiting []netip.Addr) {
	s.forEachSession(func(p *session) {
		waits := p.connecting() && p.addAt.IsZero() && now.Sub(p.readdedAt) > readdInterval
		if waits && p.peer.Address != up && p.peer.GracefulRestart {
			p.readdedAt = now
			waiting = append(waiting, p.peer.Address)
		}
	})
	return waiting
}

// addDue adds the peers to gobgp whose addAt has passed.
func (s *Speaker) addDue(ctx context.Context, srv *bgpServer) {
	now := time.Now()
	var due []*session
	s.forEachSession(func(p *session) {
		if !p.addAt.IsZero() && !now.Before(p.addAt) {
			p.addAt = time.Time{}
			due = append(due, p)
		}
	})
	for _, p := range due {
		if err := srv.AddPeer(ctx, &api.AddPeerRequest{Peer: p.apiPeer(&s.o)}); err != nil {
			s.mu.Lock()
			p.fault, p.faultAt, p.addAt = fmt.Sprintf("add the peer: %v", err), now, now.Add(addRetryDelay)
			s.mu.Unlock()
			s.report(p.peer.Address)
		}
	}
}
