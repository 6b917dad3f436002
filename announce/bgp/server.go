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

// engine is a running gobgp server without sessions.
type engine struct {
	*server.BgpServer
	served  chan struct{} // closed when the goroutine of Serve has ended
	leaving atomic.Bool
}

// startEngine starts gobgp and, unless told not to, listens.
func (s *Speaker) startEngine(ctx context.Context) (*engine, error) {
	e := &engine{served: make(chan struct{})}
	e.BgpServer = server.NewBgpServer(
		server.LoggerOption(&logger{log: s.o.Log, tell: s.mail.post, wire: s.wire}),
		server.TimingHookOption(e),
	)
	go func() {
		defer close(e.served)
		e.Serve()
	}()
	listen := s.listenAddresses()
	global := &api.Global{
		Asn: s.o.ASN, RouterId: s.o.RouterID.String(), ListenPort: int32(s.o.ListenPort), ListenAddresses: listen,
	}
	if len(listen) == 0 {
		global.ListenPort = -1
	}
	err := e.StartBgp(ctx, &api.StartBgpRequest{Global: global})
	if err == nil {
		return e, nil
	}
	e.end()
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("listen on port %d: another program does; stop it, or set listen_port = -1 to only dial: %w",
			s.o.ListenPort, err)
	}
	return nil, fmt.Errorf("start bgp: %w", err)
}

// listenAddresses returns where to listen: what was asked for, or everywhere for the families that peers have, so that a
// machine without IPv6 can serve IPv4 peers.
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

// end stops gobgp and returns when its goroutines have ended. Sessions that are left are closed with a CEASE.
//
// Serve of gobgp v3 has no way to return. It calls Observe after everything it does, and that ends its goroutine. A
// request that Serve never answers would hang for ever; so one is made only when none before it can end Serve.
func (e *engine) end() {
	ctx := context.Background()
	nobody := func(*api.Peer) {}
	_ = e.StopBgp(ctx, &api.StopBgpRequest{})
	_ = e.ListPeer(ctx, &api.ListPeerRequest{}, nobody)
	e.leaving.Store(true)
	select {
	case <-e.served:
	case <-time.After(50 * time.Millisecond):
		go func() { _ = e.ListPeer(ctx, &api.ListPeerRequest{}, nobody) }()
		<-e.served
	}
}

// Observe is called by gobgp in the goroutine of Serve.
func (e *engine) Observe(server.FSMOperation, time.Duration, time.Duration) {
	if e.leaving.Load() {
		runtime.Goexit()
	}
}
