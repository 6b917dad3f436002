package bgp

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
)

const (
	// maxDynamic limits the total number of peers from ranges, because each costs a session in gobgp.
	maxDynamic = 100
	// dynamicIdle is how long such a peer is kept without a session.
	dynamicIdle = time.Minute
)

// resolved returns the peers in o, each with an address. Until its router is found, a peer on an interface has the
// unspecified address with the interface as zone.
func (s *Speaker) resolved(o *Options) (list []Peer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	fixed := map[netip.Addr]bool{}
	for _, p := range o.Peers {
		switch {
		case p.ListenRange.IsValid():
			continue
		case p.Interface != "":
			if p.Address = s.found[p.Interface]; !p.Address.IsValid() {
				p.Address = netip.IPv6Unspecified().WithZone(p.Interface)
			}
		}
		if !fixed[p.Address] { // a discovered router may also have a configured address
			list = append(list, p)
		}
		fixed[p.Address] = true
	}
	for a := range s.dynamic {
		if p, ok := o.rangeOf(a); ok && !fixed[a] {
			p.Address = a
			list = append(list, p)
		}
	}
	return list
}

// known reports whether the address of a resolved peer is known.
func (p *Peer) known() bool { return !p.Address.WithZone("").IsUnspecified() }

func (o *Options) rangeOf(a netip.Addr) (best Peer, ok bool) {
	for _, p := range o.Peers {
		if p.ListenRange.Contains(a) && (!ok || p.ListenRange.Bits() > best.ListenRange.Bits()) {
			best, ok = p, true
		}
	}
	return best, ok
}

func (s *Speaker) ranges() (list []guard.Range) {
	for _, p := range s.options().Peers {
		if p.ListenRange.IsValid() {
			list = append(list, guard.Range{Prefix: p.ListenRange, Password: p.Password, Device: p.Device})
		}
	}
	return list
}

func (o *Options) interfaces() (names []string) {
	for _, p := range o.Peers {
		if p.Interface != "" {
			names = append(names, p.Interface)
		}
	}
	return names
}

// connected creates a peer for a connecting address in a range, unless there are too many peers. The guard calls it.
func (s *Speaker) connected(from netip.Addr) bool {
	s.mu.Lock()
	full := len(s.dynamic) >= maxDynamic
	if _, ok := s.o.rangeOf(from); !ok || full {
		logged := false
		if full {
			_, logged = s.refused.Allow(time.Now(), "full")
		}
		s.mu.Unlock()
		if logged {
			s.log.Warn("connection closed: too many peers in listen_range", "peer", from, "most", maxDynamic)
		}
		return false
	}
	s.dynamic[from] = true
	s.mu.Unlock()
	s.setPeers()
	return true
}

// forgetDynamic removes peers from ranges that are no longer connected.
func (s *Speaker) forgetDynamic() {
	now, some := time.Now(), false
	s.mu.Lock()
	for a := range s.dynamic {
		n := s.sessions[a]
		idle := n == nil || !n.attached && n.state != stateEstablished && now.Sub(n.disconnectedAt) > dynamicIdle
		if idle && (n == nil || !n.disconnectedAt.IsZero()) {
			delete(s.dynamic, a)
			some = true
		}
	}
	s.mu.Unlock()
	if some {
		s.setPeers()
	}
}

// routerFound is called by the finder. A new router on the link replaces the previous one.
func (s *Speaker) routerFound(iface string, router netip.Addr) {
	s.mu.Lock()
	wanted := slices.Contains(s.o.interfaces(), iface)
	if wanted {
		s.found[iface] = router
	}
	s.mu.Unlock()
	if wanted {
		s.setPeers()
	}
}

// isEstablished reports whether there is a session with a router. Advertisements, which any host on the link can send,
// must not replace such a router.
func (s *Speaker) isEstablished(router netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.sessions[router]
	return p != nil && p.state == stateEstablished
}

func (s *Speaker) startFinder() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.finder.Run(ctx) })
	return func() {
		cancel()
		wg.Wait()
	}
}
