package bgp

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/server"
)

// bgpServer is a running gobgp server. It has the routes and sends them to the guard over the loopback interface.
type bgpServer struct {
	*server.BgpServer
	at       netip.AddrPort
	key      string        // MD5 key of all its peers, unknown to other processes
	served   chan struct{} // closed when Serve's goroutine ends
	stopping atomic.Bool
}

// backendAt is where gobgp listens, and backendFrom(n) is the address from which the guard connects for its nth peer.
// gobgp identifies peers by this unique address, because routers on two links may have the same link-local address.
var backendAt = netip.AddrFrom4([4]byte{127, 179, 0, 1})

func backendFrom(n int) netip.Addr {
	return netip.AddrFrom4([4]byte{127, 179, byte(1 + n/250), byte(1 + n%250)})
}

// maxPeers is the number of addresses that backendFrom can return.
const maxPeers = 250 * 250

// startServer starts gobgp on a free port. If listening is false, nothing can connect to it.
func (s *Speaker) startServer(ctx context.Context, listening bool) (*bgpServer, error) {
	for try := 0; ; try++ {
		srv, err := s.startOn(ctx, listening)
		if err == nil || try == 10 || !errors.Is(err, syscall.EADDRINUSE) {
			return srv, err
		}
	}
}

func (s *Speaker) startOn(ctx context.Context, listening bool) (*bgpServer, error) {
	srv, o := &bgpServer{served: make(chan struct{}), key: rand.Text()}, s.options()
	global := &api.Global{Asn: o.ASN, RouterId: o.RouterID.String(), ListenPort: -1}
	if listening {
		l, err := net.Listen("tcp4", netip.AddrPortFrom(backendAt, 0).String())
		if err != nil {
			return nil, fmt.Errorf("start bgp: %w", err)
		}
		srv.at = l.Addr().(*net.TCPAddr).AddrPort()
		l.Close()
		global.ListenPort, global.ListenAddresses = int32(srv.at.Port()), []string{srv.at.Addr().String()}
	}
	srv.BgpServer = server.NewBgpServer(server.LoggerOption(&logger{s.log}), server.TimingHookOption(srv))
	go func() {
		defer close(srv.served)
		srv.Serve()
	}()
	if err := srv.StartBgp(ctx, &api.StartBgpRequest{Global: global}); err != nil {
		srv.stop()
		return nil, fmt.Errorf("start bgp: %w", err)
	}
	return srv, nil
}

// stop stops gobgp and returns once Serve's goroutine has ended.
//
// Serve in gobgp v3 never returns. It calls Observe after each operation, and Observe ends its goroutine. A later
// request to Serve would block forever, so the last request is sent only if Serve has not yet ended.
func (srv *bgpServer) stop() {
	ctx := context.Background()
	ignore := func(*api.Peer) {}
	_ = srv.StopBgp(ctx, &api.StopBgpRequest{})
	_ = srv.ListPeer(ctx, &api.ListPeerRequest{}, ignore)
	srv.stopping.Store(true)
	select {
	case <-srv.served:
	case <-time.After(50 * time.Millisecond):
		go func() { _ = srv.ListPeer(ctx, &api.ListPeerRequest{}, ignore) }()
		<-srv.served
	}
}

func (srv *bgpServer) Observe(server.FSMOperation, time.Duration, time.Duration) {
	if srv.stopping.Load() {
		runtime.Goexit()
	}
}

// addPeer adds the passive peer for an established session, to which the guard connects. local is this node's AS number
// in the AS path, or 0 for Options.ASN.
func (srv *bgpServer) addPeer(ctx context.Context, from netip.Addr, asn, local uint32) error {
	family := func(f *api.Family) *api.AfiSafi {
		return &api.AfiSafi{
			Config:            &api.AfiSafiConfig{Family: f, Enabled: true},
			MpGracefulRestart: &api.MpGracefulRestart{Config: &api.MpGracefulRestartConfig{Enabled: true}},
		}
	}
	return srv.AddPeer(ctx, &api.AddPeerRequest{Peer: &api.Peer{
		Conf: &api.PeerConf{
			NeighborAddress: from.String(), PeerAsn: asn, LocalAsn: local, AuthPassword: srv.key,
		},
		Transport: &api.Transport{PassiveMode: true},
		Timers:    &api.Timers{Config: &api.TimersConfig{HoldTime: 65535, KeepaliveInterval: 21845}},
		AfiSafis:  []*api.AfiSafi{family(familyV4), family(familyV6)},
		// Only because gobgp then sends End-of-RIB after the first routes.
		GracefulRestart: &api.GracefulRestart{Enabled: true, RestartTime: 1},
	}})
}

// deletePeer removes a session's passive peer, if it exists.
func (srv *bgpServer) deletePeer(from netip.Addr) {
	_ = srv.DeletePeer(context.Background(), &api.DeletePeerRequest{Address: from.String()})
}
