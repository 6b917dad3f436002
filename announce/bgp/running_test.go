package bgp

import (
	"context"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
)

// Every second Run refreshes the next hops and probes the refusals.
func TestRunPolls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o := validOptions()
		o.ListenPort = -1
		o.Peers = []Peer{{Address: netip.MustParseAddr("127.0.0.9"), ASN: 64500, Port: 1}}
		s, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Set(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		synctest.Wait()
		peer := o.Peers[0].Address
		p, want := s.sessions[peer], s.nextHops()[peer]
		s.mu.Lock()
		p.nextHops, p.fault, p.faultAt = nextHops{session4: true, reason6: "old"}, refusalUnknown, time.Now()
		s.mu.Unlock()
		time.Sleep(pollInterval)
		synctest.Wait()
		if got := s.nextHops()[peer]; got != want {
			t.Errorf("next hops %+v, want %+v", got, want)
		}
		s.mu.Lock()
		if !p.probedAt.Equal(time.Now()) {
			t.Errorf("probed at %v, want %v", p.probedAt, time.Now())
		}
		s.mu.Unlock()
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// open resets the sessions, adds the routes and the peers. When it fails, Set has no gobgp to change.
func TestOpen(t *testing.T) {
	s, srv, p := running(t)
	if err := s.Set(t.Context(), announce("203.0.113.1", 1, "2001:db8::1", 1)); err != nil {
		t.Fatal(err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.open(ended, srv); err == nil || s.server != nil || peerCount(t, srv) != 0 {
		t.Errorf("with an ended context: error %v, server %p", err, s.server)
	}
	p.fault, p.dialErr, p.nextHops = "old", context.Canceled, nextHops{}
	before := time.Now()
	if err := s.open(t.Context(), srv); err != nil {
		t.Fatal(err)
	}
	if s.server != srv || len(s.installed) != 2 || s.v4 != 1 || s.v6 != 1 || peerCount(t, srv) != 1 {
		t.Errorf("%d routes installed, %d IPv4, %d IPv6, %d peers", len(s.installed), s.v4, s.v6, peerCount(t, srv))
	}
	reset := p.fault == "" && p.dialErr == nil && p.nextHops.session4 && p.addAt.IsZero()
	if !reset || p.disconnectedAt.Before(before) {
		t.Errorf("session %+v", p)
	}
}

// When the first session is up, the peers that wait are removed from gobgp and added again at once, and it is logged.
func TestSessionUpReaddsWaitingPeers(t *testing.T) {
	var out strings.Builder
	s, _, srv := withServer(t, &out)
	defer srv.stop()
	up := validPeer().Address
	waiting := &session{state: "active", peer: Peer{
		Address: netip.MustParseAddr("127.0.0.9"), ASN: 64500, Port: 1, HoldTime: 9 * time.Second,
		GracefulRestart: true,
	}}
	waiting.addAt = time.Now()
	s.sessions[waiting.peer.Address] = waiting
	s.sessions[up].addAt = time.Time{}
	s.addDue(t.Context(), srv)
	s.handle(t.Context(), srv, peerEvent{peer: up, kind: eventState, old: "openconfirm", new: stateEstablished})
	readded := waiting.state == "idle" && waiting.addAt.IsZero() && !waiting.readdedAt.IsZero()
	if n := peerCount(t, srv); !readded || n != 1 || waiting.fault != "" {
		t.Errorf("%d peers in gobgp, %+v", n, waiting)
	}
	if got := out.String(); strings.Count(got, `msg="bgp session up" peer=192.0.2.1`) != 1 {
		t.Errorf("logged %q", got)
	}
}

// A probe of a refusal posts the reason, if there is one.
func TestProbeRefusals(t *testing.T) {
	refusal := bgp.NewBGPNotificationMessage(bgp.BGP_ERROR_OPEN_MESSAGE_ERROR, bgp.BGP_ERROR_SUB_BAD_PEER_AS, nil)
	for _, row := range []struct {
		name string
		send *bgp.BGPMessage
		want string
	}{
		{"refused", refusal, "received NOTIFICATION: code 2(open) subcode 2(bad peer as)"},
		{"accepted", bgp.NewBGPKeepAliveMessage(), ""},
	} {
		s, p := newTestSpeaker(t, new(strings.Builder))
		at := respond(t, row.send)
		p.peer.Address, p.peer.Port, p.fault = at.Addr(), at.Port(), refusalUnknown
		var probes sync.WaitGroup
		s.probeRefusals(t.Context(), &probes)
		probes.Wait()
		events := s.mail.take()
		if row.want == "" && len(events) == 0 {
			continue
		}
		want := peerEvent{peer: at.Addr(), kind: eventNotification, text: row.want}
		if len(events) != 1 || events[0] != want || row.want == "" {
			t.Errorf("%s: events %+v, want %+v", row.name, events, want)
		}
	}
}

// Without peers the policies accept local routes.
func TestOpenWithoutPeers(t *testing.T) {
	s, p, srv := withServer(t, new(strings.Builder))
	defer srv.stop()
	delete(s.sessions, p.peer.Address)
	s.server = nil
	if err := s.Set(t.Context(), announce("2001:db8::1", 1)); err != nil {
		t.Fatal(err)
	}
	if err := s.open(t.Context(), srv); err != nil {
		t.Fatal(err)
	}
	if got := nextHopOf(t, srv); got != "::" {
		t.Errorf("next hop %q of the route in gobgp, want ::", got)
	}
}
