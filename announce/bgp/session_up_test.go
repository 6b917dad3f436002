package bgp

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"testing"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/apiutil"
	"github.com/osrg/gobgp/v3/pkg/packet/bgp"
	"github.com/osrg/gobgp/v3/pkg/server"
)

// startPassive starts a gobgp, AS 64500, that waits for a speaker of AS 64512, and returns its port on 127.0.0.2. The
// routers of other tests use 127.0.0.1, so that parallel tests do not choose the same port.
func startPassive(t *testing.T) (*bgpServer, uint16) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).AddrPort().Port()
	l.Close()
	r := &bgpServer{served: make(chan struct{})}
	discard := &logger{slog.New(slog.DiscardHandler), func(peerEvent) {}, newWithdrawalTracker()}
	r.BgpServer = server.NewBgpServer(server.LoggerOption(discard), server.TimingHookOption(r))
	go func() {
		defer close(r.served)
		r.Serve()
	}()
	t.Cleanup(r.stop)
	err = r.StartBgp(context.Background(), &api.StartBgpRequest{Global: &api.Global{
		Asn: 64500, RouterId: "192.0.2.1", ListenPort: int32(port), ListenAddresses: []string{"127.0.0.2"},
	}})
	if err != nil {
		t.Fatal(err)
	}
	family := func(f *api.Family) *api.AfiSafi {
		return &api.AfiSafi{Config: &api.AfiSafiConfig{Family: f, Enabled: true}}
	}
	err = r.AddPeer(context.Background(), &api.AddPeerRequest{Peer: &api.Peer{
		Conf:      &api.PeerConf{NeighborAddress: "127.0.0.1", PeerAsn: 64512},
		Transport: &api.Transport{PassiveMode: true},
		AfiSafis:  []*api.AfiSafi{family(familyV4), family(familyV6)},
	}})
	if err != nil {
		t.Fatal(err)
	}
	return r, port
}

// nextHopOf returns the next hop of the only IPv6 route of srv; "": none.
func nextHopOf(t *testing.T, srv *bgpServer) (hop string) {
	t.Helper()
	err := srv.ListPath(context.Background(), &api.ListPathRequest{TableType: api.TableType_GLOBAL, Family: familyV6},
		func(d *api.Destination) {
			attrs, _ := apiutil.GetNativePathAttributes(d.Paths[0])
			for _, a := range attrs {
				if mp, ok := a.(*bgp.PathAttributeMpReachNLRI); ok {
					hop = mp.Nexthop.String()
				}
			}
		})
	if err != nil {
		t.Fatal(err)
	}
	return hop
}

// A next hop that becomes known with the session, or changes later, is sent without ending the session.
func TestNextHopOfASession(t *testing.T) {
	t.Parallel()
	r, port := startPassive(t)
	o := validOptions()
	o.ListenPort = -1
	o.Peers = []Peer{{Address: netip.MustParseAddr("127.0.0.2"), ASN: 64500, Port: port, HoldTime: 9 * time.Second}}
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	srv, err := s.startServer(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer srv.stop()
	if err := s.Set(t.Context(), announce("2001:db8:1::1", 1)); err != nil {
		t.Fatal(err)
	}
	if err := s.open(t.Context(), srv); err != nil {
		t.Fatal(err)
	}
	peer := o.Peers[0].Address
	p := s.sessions[peer]
	limit := time.After(20 * time.Second)
	await := func(hop string) {
		t.Helper()
		for nextHopOf(t, r) != hop {
			select {
			case <-limit:
				t.Fatalf("next hop %q, want %q; %+v", nextHopOf(t, r), hop, p)
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
	s.o.NextHopV6 = netip.MustParseAddr("2001:db8::11") // unknown to open
	for p.ups == 0 {
		select {
		case <-limit:
			t.Fatalf("no session: %+v", p)
		case <-s.mail.wake:
			for _, ev := range s.mail.take() {
				s.handle(t.Context(), srv, ev)
			}
		}
	}
	if !p.has4 || !p.has6 || p.local.String() != "127.0.0.1" || p.nextHops.addr6 != s.o.NextHopV6 {
		t.Errorf("session %+v", p)
	}
	if s.withdrawals.pending[peer] == nil {
		t.Error("withdrawals to the session are not tracked")
	}
	await("2001:db8::11")
	s.o.NextHopV6 = netip.MustParseAddr("2001:db8::12")
	s.refreshNextHops(t.Context(), srv)
	await("2001:db8::12")
	for _, ev := range s.mail.take() {
		s.record(ev)
	}
	if s.established() != 1 || p.downs != 0 || !p.addAt.IsZero() {
		t.Errorf("session %+v", p)
	}
}
