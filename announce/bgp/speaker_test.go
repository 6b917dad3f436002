package bgp_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	api "github.com/osrg/gobgp/v3/api"
	gobgplog "github.com/osrg/gobgp/v3/pkg/log"
	"github.com/osrg/gobgp/v3/pkg/server"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/steelyard-lb/steelyard/announce/announcetest"
	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"golang.org/x/sys/unix"
)

var loopback = netip.MustParseAddr("127.0.0.1")

// testLog logs to stderr if STEELYARD_BGP_DEBUG is set.
func testLog() *slog.Logger {
	if os.Getenv("STEELYARD_BGP_DEBUG") == "" {
		return slog.New(slog.DiscardHandler)
	}
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// quiet discards the log of the router's gobgp server.
type quiet struct{ gobgplog.Logger }

func (quiet) Panic(string, gobgplog.Fields) {}
func (quiet) Fatal(string, gobgplog.Fields) {}
func (quiet) Error(string, gobgplog.Fields) {}
func (quiet) Warn(string, gobgplog.Fields)  {}
func (quiet) Info(string, gobgplog.Fields)  {}
func (quiet) Debug(string, gobgplog.Fields) {}
func (quiet) SetLevel(gobgplog.LogLevel)    {}
func (quiet) GetLevel() gobgplog.LogLevel   { return gobgplog.ErrorLevel }

// router is a passive gobgp in this process, on the loopback interface.
type router struct {
	*server.BgpServer
	port uint16
	asn  uint32 // of the neighbour
}

func startRouter(t testing.TB) *router {
	t.Helper()
	return startRouterFor(t, 64512)
}

// startRouterFor starts a router, AS 64500, with a speaker of this AS as neighbour.
func startRouterFor(t testing.TB, asn uint32) *router {
	t.Helper()
	r, err := routerOnFreePort(asn)
	for try := 0; errors.Is(err, unix.EADDRINUSE) && try < 10; try++ { // another program may take the port
		r, err = routerOnFreePort(asn)
	}
	must.Do(t, err)
	t.Cleanup(r.Stop)
	r.addNeighbour(t)
	return r
}

func routerOnFreePort(asn uint32) (*router, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	port := l.Addr().(*net.TCPAddr).AddrPort().Port()
	l.Close()
	r := &router{server.NewBgpServer(server.LoggerOption(quiet{})), port, asn}
	go r.Serve()
	err = r.StartBgp(context.Background(), &api.StartBgpRequest{Global: &api.Global{
		Asn: 64500, RouterId: "192.0.2.1", ListenPort: int32(port), ListenAddresses: []string{"127.0.0.1"},
	}})
	if err != nil {
		r.Stop()
	}
	return r, err
}

func (r *router) addNeighbour(t testing.TB) {
	t.Helper()
	family := func(afi api.Family_Afi) *api.AfiSafi {
		f := &api.Family{Afi: afi, Safi: api.Family_SAFI_UNICAST}
		return &api.AfiSafi{Config: &api.AfiSafiConfig{Family: f, Enabled: true}}
	}
	must.Do(t, r.AddPeer(context.Background(), &api.AddPeerRequest{Peer: &api.Peer{
		Conf:      &api.PeerConf{NeighborAddress: "127.0.0.1", PeerAsn: r.asn},
		Transport: &api.Transport{PassiveMode: true},
		AfiSafis:  []*api.AfiSafi{family(api.Family_AFI_IP), family(api.Family_AFI_IP6)},
	}}))
}

// forgetNeighbour removes and adds the neighbour, because gobgp accepts no connections for 5 s after a session.
func (r *router) forgetNeighbour(t testing.TB) {
	t.Helper()
	must.Do(t, r.DeletePeer(context.Background(), &api.DeletePeerRequest{Address: "127.0.0.1"}))
	r.addNeighbour(t)
}

// paths returns the router's routes by prefix.
func (r *router) paths(t testing.TB) map[netip.Prefix]*api.Path {
	t.Helper()
	paths := map[netip.Prefix]*api.Path{}
	for _, afi := range []api.Family_Afi{api.Family_AFI_IP, api.Family_AFI_IP6} {
		must.Do(t, r.ListPath(context.Background(), &api.ListPathRequest{
			TableType: api.TableType_GLOBAL, Family: &api.Family{Afi: afi, Safi: api.Family_SAFI_UNICAST},
		}, func(d *api.Destination) { paths[netip.MustParsePrefix(d.Prefix)] = d.Paths[0] }))
	}
	return paths
}

func (r *router) seen(t testing.TB) []netip.Addr {
	var list []netip.Addr
	for p := range r.paths(t) {
		list = append(list, p.Addr())
	}
	return list
}

// options returns the options of a speaker whose only peer is r.
func (r *router) options() bgp.Options {
	return bgp.Options{
		ASN: 64512, RouterID: netip.MustParseAddr("192.0.2.11"), ListenPort: -1,
		NextHopV6: netip.MustParseAddr("2001:db8::11"), Log: testLog(),
		Peers: []bgp.Peer{
			{Address: loopback, ASN: 64500, Port: r.port, HoldTime: 9 * time.Second, GracefulRestart: true},
		},
	}
}

func newSpeaker(t testing.TB, o bgp.Options) *bgp.Speaker {
	t.Helper()
	s := must.Get(bgp.New(o))(t)
	return s
}

func vips(s ...string) []netip.Addr {
	list := make([]netip.Addr, len(s))
	for i, a := range s {
		list[i] = netip.MustParseAddr(a)
	}
	return list
}

func announcements(vips ...netip.Addr) []lb.Announcement {
	list := make([]lb.Announcement, len(vips))
	for i, v := range vips {
		list[i] = lb.Announcement{VIP: v, Weight: 1}
	}
	return list
}

func TestConformance(t *testing.T) {
	t.Parallel()
	announcetest.Run(t, func(t *testing.T) *announcetest.Bench {
		t.Parallel()
		r := startRouter(t)
		return &announcetest.Bench{
			Announcer: newSpeaker(t, r.options()),
			Seen:      func() []netip.Addr { return r.seen(t) },
			VIPs:      vips("203.0.113.10", "2001:db8:1::10", "203.0.113.11"),
			Bad:       netip.MustParseAddr("224.0.0.1"),
		}
	})
}

func TestNewRejects(t *testing.T) {
	_, err := bgp.New(bgp.Options{
		RouterID: netip.MustParseAddr("::1"), ListenPort: 70000, AggregateV4: 33, AggregateV6: -1,
		RestartTime: 5000 * time.Second,
		NextHopV4:   netip.MustParseAddr("::1"), NextHopV6: netip.MustParseAddr("fe80::1"),
		Peers: []bgp.Peer{
			{Address: netip.MustParseAddr("fe80::1"), HoldTime: time.Second, Multihop: 300,
				Password: strings.Repeat("x", 81)},
			{Address: loopback, ASN: 1, Source: netip.MustParseAddr("::1")},
			{Address: loopback, ASN: 1},
			{ASN: 1},
		},
	})
	want := `bgp options: Log is required
ASN is required
router id ::1: want an IPv4 address
listen port 70000: want -1 to 65535
aggregate_v4 33: want 1 to 32
aggregate_v6 -1: want 1 to 128
restart time 1h23m20s: want whole seconds, 1s to 4095s
IPv4 next hop ::1: want an IPv4 address
IPv6 next hop fe80::1: want a global IPv6 address
peer fe80::1: a link-local address needs its interface, as in fe80::1%eth0
peer fe80::1: want either ASN or External
peer fe80::1: password has 81 bytes, the kernel accepts 80
peer fe80::1: hold time 1s: want 0, or whole seconds, 3s to 65535s
peer fe80::1: multihop 300: want 0 to 255
peer 127.0.0.1: source ::1 has the other address family
peer 127.0.0.1 is named twice
peer invalid IP: want the address of a neighbour`
	must.True(t, err != nil && err.Error() == want, "error\n%v\nwant\n%s", err, want)
}

func TestNewStartsNothing(t *testing.T) {
	before := runtime.NumGoroutine()
	s := newSpeaker(t, (&router{port: 1}).options())
	must.Do(t, s.Set(t.Context(), announcements(vip4)))
	n := runtime.NumGoroutine()
	must.True(t, n <= before, "%d goroutines, before %d", n, before)
}

// Run leaves no goroutine running, although gobgp's Serve never returns.
func TestNoGoroutineIsLeft(t *testing.T) {
	r := startRouter(t)
	for range 3 {
		s := newSpeaker(t, r.options())
		stop := must.Run(t, s.Run)
		must.Do(t, s.Set(t.Context(), announcements(vip4, vip6)))
		r.awaitPaths(t, 2)
		labtest.Until(t, "the speaker has the session", func() error {
			p := s.Peers()[0]
			return labtest.ErrorIf(p.State != "established", "%+v", p)
		})
		must.Do(t, s.Set(t.Context(), nil))
		stop()
		p := s.Peers()[0]
		must.True(t, p.State == "idle" && p.Routes == 0, "after Run: %+v", p)
		r.forgetNeighbour(t)
	}
	// The router is also a gobgp server, whose remaining goroutines do not count.
	labtest.Until(t, "all goroutines to end", func() error {
		b := make([]byte, 1<<20)
		for stack := range strings.SplitSeq(string(b[:runtime.Stack(b, true)]), "\n\n") {
			if strings.Contains(stack, "/announce/bgp.") || strings.Contains(stack, "/announce/bgp/guard.") {
				return errors.New(stack)
			}
		}
		return nil
	})
}

// Run without a Set opens no session and returns when its context ends.
func TestRunEndsBeforeSet(t *testing.T) {
	r := startRouter(t)
	s := newSpeaker(t, r.options())
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must.Do(t, s.Run(ctx))
}

// A speaker can run again, and then announces the last set.
func TestRunTwice(t *testing.T) {
	t.Parallel()
	r := startRouter(t)
	s := newSpeaker(t, r.options())
	must.Do(t, s.Set(t.Context(), announcements(vip4)))
	for range 2 {
		stop := must.Run(t, s.Run)
		r.awaitPaths(t, 1)
		stop()
		r.awaitPaths(t, 0)
		r.forgetNeighbour(t)
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	r := startRouter(t)
	s := newSpeaker(t, r.options())
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(s)
	text := `# HELP steelyard_bgp_peer_up 1 while the BGP session with the peer is established, otherwise 0.
# TYPE steelyard_bgp_peer_up gauge
steelyard_bgp_peer_up{peer="127.0.0.1"} %d
# HELP steelyard_bgp_routes_announced Routes announced to the peer.
# TYPE steelyard_bgp_routes_announced gauge
steelyard_bgp_routes_announced{peer="127.0.0.1"} %d
# HELP steelyard_bgp_session_transitions_total Transitions of the BGP session with the peer to up and down.
# TYPE steelyard_bgp_session_transitions_total counter
steelyard_bgp_session_transitions_total{peer="127.0.0.1",to="down"} 0
steelyard_bgp_session_transitions_total{peer="127.0.0.1",to="up"} %d
`
	gathered := func(up, routes, ups int) error {
		return testutil.GatherAndCompare(reg, strings.NewReader(fmt.Sprintf(text, up, routes, ups)))
	}
	must.Do(t, gathered(0, 0, 0))
	must.Run(t, s.Run)
	must.Do(t, s.Set(t.Context(), announcements(vip4, vip6)))
	labtest.Until(t, "metrics of a session", func() error { return gathered(1, 2, 1) })
	problems, err := testutil.GatherAndLint(reg)
	must.True(t, err == nil && len(problems) == 0, "promlint: %v %v", problems, err)
}

// BenchmarkSet adds or removes one of 10,000 VIPs with an established session.
func BenchmarkSet(b *testing.B) {
	r := startRouter(b)
	s := newSpeaker(b, r.options())
	must.Run(b, s.Run)
	list := make([]lb.Announcement, 10_000)
	for i := range list {
		list[i] = lb.Announcement{VIP: netip.AddrFrom4([4]byte{100, 64, byte(i >> 8), byte(i)}), Weight: 1}
	}
	began := time.Now()
	must.Do(b, s.Set(b.Context(), list))
	first := time.Since(began)
	r.awaitPaths(b, len(list))
	arrived := time.Since(began)
	for i := 0; b.Loop(); i++ {
		must.Do(b, s.Set(b.Context(), list[:len(list)-i%2]))
	}
	b.ReportMetric(float64(first.Milliseconds()), "first-ms")
	b.ReportMetric(float64(arrived.Milliseconds()), "all-at-router-ms")
}

// A Speaker opens no session before Run and the first Set.
func ExampleSpeaker() {
	s, err := bgp.New(bgp.Options{
		ASN: 64512, RouterID: netip.MustParseAddr("192.0.2.11"), Log: slog.New(slog.DiscardHandler),
		Peers: []bgp.Peer{{Address: netip.MustParseAddr("192.0.2.1"), ASN: 64500}},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = s.Set(context.Background(), []lb.Announcement{{VIP: netip.MustParseAddr("203.0.113.10"), Weight: 1}})
	if err != nil {
		fmt.Println(err)
	}
	for _, p := range s.Peers() {
		fmt.Println(p.Peer, p.ASN, p.State, p.Routes)
	}
	// Output:
	// 192.0.2.1 64500 idle 0
}
