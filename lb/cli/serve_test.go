package cli

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// serve runs an API that answers with st, and returns its socket. change sets other options.
func serve(t *testing.T, st lb.Status, change ...func(*admin.Options)) string {
	socket := filepath.Join(t.TempDir(), "s")
	o := admin.Options{
		Socket:   socket,
		Status:   func(context.Context) (lb.Status, error) { return st, nil },
		StatusOf: func(context.Context, netip.Addr) (lb.Status, error) { return st, nil },
		Peers: func() []lb.PeerStatus {
			p := lb.PeerStatus{Peer: addr("192.0.2.1"), ASN: 64500, State: "active", LastError: "connection refused"}
			return []lb.PeerStatus{p}
		},
		Sent: func(peer netip.Addr) ([]lb.SentRoute, bool) {
			med := uint32(0)
			return []lb.SentRoute{{
				Prefix: netip.MustParsePrefix("203.0.113.10/32"), NextHop: addr("192.0.2.2"),
				ASPath: []uint32{64512, 64512}, MED: &med, Communities: []string{"no-export"},
				LargeCommunities: []string{"64512:1:2"}, Bandwidth: 375e6,
			}}, peer == addr("192.0.2.1")
		},
		Drain: func(_ context.Context, service string, on bool) (lb.Drains, error) {
			return lb.Drains{}.With(service, on), nil
		},
		Explain: func(q lb.Question) (lb.Explanation, error) {
			return lb.Explanation{
				Client: q.Client, Address: q.To.Addr(), Port: q.To.Port(), Protocol: q.Protocol,
				Action: "drop", Reason: "no_backend", Steps: []string{"first", "then"},
			}, nil
		},
		Flows: func(_ context.Context, want lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
			f := lb.FlowStatus{
				Service: "web", Client: netip.MustParseAddrPort("198.51.100.11:40000"),
				Address: addr("203.0.113.10"), Port: 80, Protocol: lb.TCP,
				Backend: netip.MustParseAddrPort("10.0.0.21:8080"), Forward: lb.MethodNAT,
				State: lb.FlowEstablished, Idle: 2.5,
			}
			if !want.Match(f) {
				return nil, false, nil
			}
			return []lb.FlowStatus{f}, want.Limit == 1, nil
		},
		Info: func() admin.Info { return admin.Info{Node: "lb1"} }, Metrics: http.NotFoundHandler(), Log: discard,
	}
	for _, f := range change {
		f(&o)
	}
	s := admin.New(o)
	l, err := net.Listen("unix", socket) // here, not in Server.Run: clients can connect from now on
	must.Do(t, err)
	server := &http.Server{Handler: s.Handler(true)}
	done := make(chan error, 1)
	go func() { done <- server.Serve(l) }()
	t.Cleanup(func() {
		server.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	})
	return socket
}
