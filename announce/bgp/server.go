package bgp

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	"github.com/osrg/gobgp/v3/pkg/server"
)

// bgpServer is a running gobgp server.
type bgpServer struct {
	*server.BgpServer
	served   chan struct{} // closed when the goroutine of Serve has ended
	stopping atomic.Bool
}

// startServer starts gobgp. It listens unless the port is -1.
func (s *Speaker) startServer(ctx context.Context) (*bgpServer, error) {
	srv := &bgpServer{served: make(chan struct{})}
	srv.BgpServer = server.NewBgpServer(
		server.LoggerOption(&logger{log: s.o.Log, post: s.mail.post, withdrawals: s.withdrawals}),
		server.TimingHookOption(srv),
	)
	go func() {
		defer close(srv.served)
		srv.Serve()
	}()
	listen := s.listenAddresses()
	global := &api.Global{
		Asn: s.o.ASN, RouterId: s.o.RouterID.String(), ListenPort: int32(s.o.ListenPort), ListenAddresses: listen,
	}
	if len(listen) == 0 {
		global.ListenPort = -1
	}
	err := srv.StartBgp(ctx, &api.StartBgpRequest{Global: global})
	if err == nil {
		return srv, nil
	}
	srv.stop()
	if errors.Is(err, syscall.EADDRINUSE) {
		const hint = "in use by another program; stop it, or set listen_port = -1 to only connect"
		return nil, fmt.Errorf("listen on port %d: %s: %w", s.o.ListenPort, hint, err)
	}
	return nil, fmt.Errorf("start bgp: %w", err)
}

// listenAddresses returns the addresses of Options, or the unspecified address of each family that peers have, so
// that a node without IPv6 can have IPv4 peers.
func (s *Speaker) listenAddresses() []string {
	var list []string
	for _, a := range s.o.ListenAddresses {
		list = append(list, a.String())
	}
	if len(list) > 0 || s.o.ListenPort < 0 {
		return list
	}
	for _, p := range s.o.Peers {
		any := "::"
		if p.Address.Is4() {
			any = "0.0.0.0"
		}
		if !slices.Contains(list, any) {
			list = append(list, any)
		}
	}
	return list
}

// stop stops gobgp and returns when its goroutine has ended. Remaining sessions are closed with a CEASE.
//
// Serve of gobgp v3 never returns. It calls Observe after each operation, and Observe ends its goroutine. A request to
// Serve after that would block for ever, so the last one is sent only if Serve has not ended by then.
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

// Observe is called by gobgp in the goroutine of Serve.
func (srv *bgpServer) Observe(server.FSMOperation, time.Duration, time.Duration) {
	if srv.stopping.Load() {
		runtime.Goexit()
	}
}
