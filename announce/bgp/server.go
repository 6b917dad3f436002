package bgp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime"
	"slices"
	"strconv"
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

// startServer starts gobgp. It listens unless the port is -1. When it cannot, it connects to peers only, which is
// sufficient for those that listen; Problems has the reason then.
func (s *Speaker) startServer(ctx context.Context) (*bgpServer, error) {
	srv, err := s.startListening(ctx, s.o.ListenPort)
	if errors.Is(err, syscall.EADDRINUSE) || errors.Is(err, syscall.EACCES) || errors.Is(err, syscall.EADDRNOTAVAIL) {
		s.setListenErr(err)
		return s.startListening(ctx, -1)
	}
	s.setListenErr(nil)
	return srv, err
}

// setListenErr records why gobgp does not listen; nil: it does, or need not.
func (s *Speaker) setListenErr(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && s.listen == nil {
		s.o.Log.Error("not listening; only connecting", "port", s.o.ListenPort, "err", cause(err))
	}
	s.listen = err
}

// Problems returns what does not work besides sessions.
func (s *Speaker) Problems() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.listen == nil {
		return nil
	}
	const text = "bgp only connects, and does not listen on port %d: %s"
	return []string{fmt.Sprintf(text, s.o.ListenPort, cause(s.listen))}
}

// canListen reports whether the port that gobgp could not listen on is free now.
func (s *Speaker) canListen() bool {
	s.mu.Lock()
	failed := s.listen != nil
	s.mu.Unlock()
	if !failed {
		return false
	}
	for _, a := range s.listenAddresses() {
		l, err := net.Listen("tcp", net.JoinHostPort(a, strconv.Itoa(s.o.ListenPort)))
		if err != nil {
			return false
		}
		l.Close()
	}
	return true
}

func (s *Speaker) startListening(ctx context.Context, port int) (*bgpServer, error) {
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
		Asn: s.o.ASN, RouterId: s.o.RouterID.String(), ListenPort: int32(port), ListenAddresses: listen,
	}
	if len(listen) == 0 || port < 0 {
		global.ListenPort, global.ListenAddresses = -1, nil
	}
	err := srv.StartBgp(ctx, &api.StartBgpRequest{Global: global})
	if err == nil {
		return srv, nil
	}
	srv.stop()
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
