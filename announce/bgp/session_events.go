package bgp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	api "github.com/osrg/gobgp/v3/api"

	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"github.com/steelyard-lb/steelyard/lb"
)

// errNoTable rejects a session that comes up while the speaker is stopping.
var errNoTable = errors.New("steelyard is stopping")

// attach adds an established session's passive peer to gobgp, which then sends the routes.
func (s *Speaker) attach(ctx context.Context, e guard.Session) (guard.Backend, error) {
	s.attachMu.Lock()
	defer s.attachMu.Unlock()
	srv := s.backend
	s.mu.Lock()
	p := s.sessions[e.Peer]
	if p == nil || srv == nil {
		s.mu.Unlock()
		return guard.Backend{}, errNoTable
	}
	p.attached, p.local, p.has4, p.has6 = true, e.Local, e.V4, e.V6
	p.extended, p.asn = e.ExtendedNextHop, e.ASN
	p.nextHops = p.nextHopsNow(&s.o)
	from, local := p.from, p.peer.LocalASN
	s.mu.Unlock()
	s.trackWithdrawals(e.Peer)
	if err := setPolicies(ctx, srv.BgpServer, s.exports()); err != nil {
		return guard.Backend{}, err
	}
	if err := srv.addPeer(ctx, from, e.ASN, local); err != nil {
		return guard.Backend{}, fmt.Errorf("add the peer: %w", err)
	}
	return guard.Backend{At: srv.at, From: from, Key: srv.key}, nil
}

// detach removes the passive peer of a session that has ended.
func (s *Speaker) detach(peer netip.Addr) {
	s.attachMu.Lock()
	defer s.attachMu.Unlock()
	s.withdrawals.peerDown(peer)
	s.mu.Lock()
	p := s.sessions[peer]
	if p == nil {
		s.mu.Unlock()
		return
	}
	p.attached, p.local, p.has4, p.has6, p.received = false, netip.Addr{}, false, false, 0
	from := p.from
	s.mu.Unlock()
	s.backend.deletePeer(from)
}

// trackWithdrawals makes Set wait until withdrawals are written to a session.
func (s *Speaker) trackWithdrawals(addr netip.Addr) {
	s.mu.Lock()
	p := *s.sessions[addr]
	s.mu.Unlock()
	if p.attached {
		s.withdrawals.peerUp(addr, p.carries)
	}
}

// poll handles changes that no event reports.
func (s *Speaker) poll(ctx context.Context, srv *bgpServer) {
	s.refreshNextHops(ctx, srv)
	s.announceSettled(ctx)
	s.forgetDynamic()
	for _, p := range s.attached() {
		s.countReceived(p.peer.Address)
	}
	s.watchSignatures()
	var peers []netip.Addr
	s.forEachSession(func(p *session) { peers = append(peers, p.peer.Address) })
	for _, peer := range peers {
		s.report(peer)
	}
}

func (s *Speaker) countReceived(peer netip.Addr) {
	got, _ := s.guard.Details(peer)
	s.mu.Lock()
	defer s.mu.Unlock()
	if p := s.sessions[peer]; p != nil && p.attached {
		p.received = got.Routes.Announced
	}
}

// attached returns the sessions with a passive peer in gobgp.
func (s *Speaker) attached() (list []session) {
	s.forEachSession(func(p *session) {
		if p.attached {
			list = append(list, *p)
		}
	})
	return list
}

func (s *Speaker) refreshNextHops(ctx context.Context, srv *bgpServer) {
	o := s.options()
	for _, p := range s.attached() {
		after := p.nextHopsNow(&o)
		if after == p.nextHops {
			continue
		}
		s.changeNextHops(ctx, srv, &p, after)
	}
}

// changeNextHops applies changed next hops. Losing a next hop ends the session, because gobgp would not withdraw the
// routes.
func (s *Speaker) changeNextHops(ctx context.Context, srv *bgpServer, before *session, after nextHops) {
	addr := before.peer.Address
	s.attachMu.Lock()
	defer s.attachMu.Unlock()
	s.mu.Lock()
	p := s.sessions[addr]
	if p == nil || !p.attached || p.local != before.local {
		s.mu.Unlock()
		return
	}
	p.nextHops = after
	s.mu.Unlock()
	if err := setPolicies(ctx, srv.BgpServer, s.exports()); err != nil {
		s.log.Error("next hop not changed", "peer", addr, "err", err)
		return
	}
	s.trackWithdrawals(addr)
	if lostNextHop(before.nextHops, after) {
		s.guard.Reset(addr, "next hop lost: "+cmp.Or(after.reason4, after.reason6))
		return
	}
	_ = srv.ResetPeer(ctx, &api.ResetPeerRequest{
		Address: before.from.String(), Soft: true, Direction: api.ResetPeerRequest_OUT,
	})
}

// lostNextHop reports whether a family has lost its next hop.
func lostNextHop(before, after nextHops) bool {
	lost := func(family netip.Addr) bool { return before.has(family) && !after.has(family) }
	return lost(netip.IPv4Unspecified()) || lost(netip.IPv6Unspecified())
}

// Findings returns problems that do not belong to a single session.
func (s *Speaker) Findings() (all []lb.Finding) {
	for at, err := range s.guard.Problems() {
		device := ""
		if at.Device != "" {
			device = " of device " + at.Device
		}
		all = append(all, lb.FoundBGPListen.About("", "bgp only connects and does not listen on port %d%s: %s",
			at.Port(), device, cause(err)))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now, states := time.Now(), s.bfdStates()
	for peer, n := range s.sessions {
		if text := n.bfdNotice(states[peer], now); text != "" {
			all = append(all, lb.FoundBFD.About(fmt.Sprint(peer), "peer %v: %s", peer, text))
		}
	}
	slices.SortFunc(all, func(a, b lb.Finding) int { return strings.Compare(a.Text, b.Text) })
	return slices.Compact(all) // there is one per address
}
