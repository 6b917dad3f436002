package bgp

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/announce/bgp/guard"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// open resets the sessions and adds the routes. If it fails, Set has no gobgp to change.
func TestOpen(t *testing.T) {
	s, p, srv := withServer(t, new(strings.Builder))
	defer srv.stop()
	s.server = nil
	must.Do(t, s.Set(t.Context(), announce("203.0.113.1", 1, "2001:db8::1", 1)))
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.open(ended, srv); err == nil || s.server != nil {
		t.Errorf("with an ended context: error %v, server %p", err, s.server)
	}
	p.fault, p.dialErr = "old", context.Canceled
	must.Do(t, s.open(t.Context(), srv))
	if s.server != srv || len(s.installed) != 2 || p.fault != "" || p.dialErr != nil {
		t.Errorf("%d routes installed, session %+v", len(s.installed), p)
	}
}

// gobgp has a peer exactly while its session is attached.
func TestAttach(t *testing.T) {
	s, p, srv := withServer(t, new(strings.Builder))
	defer srv.stop()
	peer, local := p.peer.Address, netip.MustParseAddr("127.0.0.1")
	session := guard.Session{Peer: peer, Local: local, ASN: 64500, V4: true}
	if _, err := s.attach(t.Context(), session); !errors.Is(err, errNoTable) {
		t.Errorf("before gobgp runs: error %v", err)
	}
	must.Do(t, s.open(t.Context(), srv))
	unknown := session
	unknown.Peer = netip.MustParseAddr("192.0.2.99")
	if _, err := s.attach(t.Context(), unknown); err == nil {
		t.Error("an unknown peer was attached")
	}
	for range 2 {
		b := must.Get(s.attach(t.Context(), session))(t)
		if b.From != p.from || b.Key != srv.key || peerCount(t, srv) != 1 || s.withdrawals.peers[peer] == nil {
			t.Errorf("backend %+v, %d peers", b, peerCount(t, srv))
		}
		if !p.attached || !p.has4 || p.has6 || p.nextHops.addr4 != local {
			t.Errorf("session %+v", p)
		}
		s.detach(peer)
		if peerCount(t, srv) != 0 || p.attached || p.has4 || p.local.IsValid() || s.withdrawals.peers[peer] != nil {
			t.Errorf("after the session: %d peers, %+v", peerCount(t, srv), p)
		}
	}
	s.detach(unknown.Peer)
}

// Every peer has its own address towards gobgp.
func TestBackendAddresses(t *testing.T) {
	seen := map[netip.Addr]bool{backendAt: true}
	for n := range maxPeers {
		a := backendFrom(n)
		if seen[a] || !a.IsLoopback() {
			t.Fatalf("peer %d has %v", n, a)
		}
		seen[a] = true
	}
}
