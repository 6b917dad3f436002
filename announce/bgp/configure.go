package bgp

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
)

// Configure changes the options. If the change needs a new OPEN or connection, the peer's session ends, or all sessions
// if ASN or RouterID changes. With graceful restart, the peer keeps the routes in the meantime. Changed attributes and
// prefixes are announced again, new prefixes before old ones are withdrawn. Log cannot change.
func (s *Speaker) Configure(ctx context.Context, o Options) error {
	o.Log = s.log
	o, err := o.withDefaults()
	if err != nil {
		return fmt.Errorf("bgp options: %w", err)
	}
	s.setMu.Lock()
	defer s.setMu.Unlock()
	s.mu.Lock()
	before := s.o
	s.o = o
	s.mu.Unlock()
	s.guard.Configure(o.ASN, o.RouterID, o.ListenPort, o.ListenAddresses)
	earlier := s.resolved(&before)
	s.setPeers()
	if before.ASN != o.ASN || before.RouterID != o.RouterID {
		s.wanted = s.routesNow(&o)
		select {
		case s.restart <- struct{}{}:
		default:
		}
		return nil
	}
	err = s.changeExports(ctx, &before, earlier)
	return errors.Join(err, s.reannounce(ctx, &before, &o))
}

// changeExports resends the routes to peers whose attributes differ from those in the previous options o.
func (s *Speaker) changeExports(ctx context.Context, o *Options, before []Peer) error {
	s.attachMu.Lock()
	defer s.attachMu.Unlock()
	earlier := map[netip.Addr]Peer{}
	for _, p := range before {
		earlier[p.Address] = p
	}
	var changed []session
	for _, n := range s.attached() {
		p := earlier[n.peer.Address]
		now := s.options()
		if p.Prepend != n.peer.Prepend || !reflect.DeepEqual(p.Attributes, n.peer.Attributes) ||
			!reflect.DeepEqual(o.prepends(&p), now.prepends(&n.peer)) {
			changed = append(changed, n)
		}
	}
	if len(changed) == 0 || s.server == nil {
		return nil
	}
	if err := setPolicies(ctx, s.server.BgpServer, s.exports()); err != nil {
		return err
	}
	var errs []error
	for _, n := range changed {
		errs = append(errs, s.server.ResetPeer(ctx, &api.ResetPeerRequest{
			Address: n.from.String(), Soft: true, Direction: api.ResetPeerRequest_OUT,
		}))
	}
	return errors.Join(errs...)
}

// setPeers applies the options' peers to the sessions, the guard and BFD.
func (s *Speaker) setPeers() {
	s.peersMu.Lock()
	defer s.peersMu.Unlock()
	o := s.options()
	s.finder.SetInterfaces(o.interfaces())
	o.Peers = s.resolved(&o)
	var peers []guard.Config
	wanted := map[netip.Addr]bool{}
	s.mu.Lock()
	used := map[netip.Addr]bool{}
	for _, p := range s.sessions {
		used[p.from] = true
	}
	next := 0
	for _, p := range o.Peers {
		wanted[p.Address] = true
		if p.known() {
			peers = append(peers, p.config(&o))
		}
		if have := s.sessions[p.Address]; have != nil {
			have.peer, have.only = p, o.only(&p)
			continue
		}
		for used[backendFrom(next)] {
			next++
		}
		used[backendFrom(next)] = true
		n := newSession(p, o.only(&p), backendFrom(next))
		n.wants4, n.wants6 = s.wants4, s.wants6
		s.sessions[p.Address] = n
	}
	s.mu.Unlock()
	s.guard.SetRanges(s.ranges())
	s.guard.SetPeers(peers) // returns after the sessions with removed peers have ended
	s.mu.Lock()
	maps.DeleteFunc(s.sessions, func(peer netip.Addr, p *session) bool {
		if !wanted[peer] {
			p.forgetSignature()
		}
		return !wanted[peer]
	})
	s.mu.Unlock()
	neighbors := o.neighbors()
	s.bfd.Set(neighbors)
	if len(neighbors) > 0 {
		s.bfdOnce.Do(func() { close(s.bfdWanted) })
	}
}

// reannounce resends the routes that the changed options affect. s.setMu is held.
func (s *Speaker) reannounce(ctx context.Context, before, o *Options) error {
	if s.server == nil {
		s.wanted = s.routesNow(o)
		return nil
	}
	if before.AggregateV4 == o.AggregateV4 && before.AggregateV6 == o.AggregateV6 &&
		before.MaxRoutes == o.MaxRoutes && before.sameAttributes(o) {
		return nil
	}
	wanted := s.routesNow(o)
	same := before.sameAttributes(o)
	s.wanted = maps.Clone(wanted)
	for p, weight := range s.installed {
		if _, ok := wanted[p]; !ok {
			s.wanted[p] = weight // withdrawn below
		} else if !same {
			s.installed[p] = outdated
		}
	}
	failed, err := s.install(ctx)
	s.wanted = wanted
	if err == nil && len(failed) == 0 {
		failed, err = s.install(ctx)
	}
	for _, e := range failed {
		return e
	}
	return err
}

// routesNow applies these options to the VIPs of the last Set, which has already reported its errors. s.setMu is held.
func (s *Speaker) routesNow(o *Options) routes {
	wanted, errs := o.routesFor(s.vips)
	o.limit(wanted, s.wanted, s.vips, errs)
	return wanted
}

func (o *Options) sameAttributes(other *Options) bool {
	return o.LocalPref == other.LocalPref && o.Weighted == other.Weighted &&
		reflect.DeepEqual(o.Pools, other.Pools) && reflect.DeepEqual(o.Communities, other.Communities) &&
		reflect.DeepEqual(o.LargeCommunities, other.LargeCommunities) &&
		reflect.DeepEqual(o.ExtCommunities, other.ExtCommunities)
}
