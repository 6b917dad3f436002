package bgp

import (
	"fmt"
	"net/netip"
	"slices"
)

// A peer may not accept routes of a family, if that family is not configured there. With one session per family this is
// normal. It is a fault if no session accepts the family.

// wants records the address families of a Set's routes.
func (s *Speaker) wants(all routes) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wants4, s.wants6 = false, false
	for p := range all {
		s.wants4, s.wants6 = s.wants4 || p.Addr().Is4(), s.wants6 || p.Addr().Is6()
	}
	for _, n := range s.sessions {
		n.wants4, n.wants6 = s.wants4, s.wants6
	}
}

// allUp reports whether all sessions are established. If not, a missing session may be the one for a family. s.mu is
// held.
func (s *Speaker) allUp() bool {
	for _, n := range s.sessions {
		if n.state != stateEstablished {
			return false
		}
	}
	return true
}

// lacking returns the families whose routes no peer has, each as its unspecified address. s.mu is held.
func (s *Speaker) lacking() (families []netip.Addr) {
	if !s.allUp() {
		return nil
	}
	if s.wants4 && !s.withdrawals.writtenOf(true) {
		families = append(families, netip.IPv4Unspecified())
	}
	if s.wants6 && !s.withdrawals.writtenOf(false) {
		families = append(families, netip.IPv6Unspecified())
	}
	return families
}

// writtenOf reports whether a peer has a route of a family.
func (w *withdrawalTracker) writtenOf(is4 bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.peers {
		for p := range r.routes {
			if p.Addr().Is4() == is4 {
				return true
			}
		}
	}
	return false
}

// notAccepted says that the peer of an established session does not accept one of the families, or returns "".
func (n *session) notAccepted(families ...netip.Addr) string {
	if n.state != stateEstablished || !n.attached {
		return ""
	}
	for _, f := range families {
		has, name := n.has6, "IPv6"
		if f.Is4() {
			has, name = n.has4, "IPv4"
		}
		sent := n.only == nil ||
			slices.ContainsFunc(n.only, func(p netip.Prefix) bool { return p.Addr().Is4() == f.Is4() })
		if sent && !has {
			return fmt.Sprintf("the peer does not accept %s routes; enable the address family there", name)
		}
	}
	return ""
}

// NotAccepted says which peer does not accept routes of the VIP's family although its session is established, or
// returns "".
func (s *Speaker) NotAccepted(vip netip.Addr) (reason string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.allUp() {
		return ""
	}
	var first netip.Addr
	for _, n := range s.sessions {
		text := n.notAccepted(vip.Unmap())
		if a := n.peer.Address; text != "" && (!first.IsValid() || a.Less(first)) {
			first, reason = a, fmt.Sprintf("%s: %s", a, text)
		}
	}
	return reason
}
