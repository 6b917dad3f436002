package admin

import (
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestVerdict(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	a, b := netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("203.0.113.11")
	up := lb.RouteStatus{Address: a, Announced: true}
	down := lb.RouteStatus{Address: b, Reason: "0 of 1 backends healthy, min_healthy is 1"}
	elsewhere := lb.RouteStatus{Address: b, Reason: lb.NoLocalEndpoint, Intended: true}
	peer, lost := lb.PeerStatus{State: established}, lb.PeerStatus{Peer: a, State: "active", LastError: "refused"}
	stranger := lb.PeerStatus{Peer: b, Dynamic: true, State: "idle"}
	sick := []lb.BackendStatus{{State: lb.StateHealthy}, {Service: "web", Address: b, Port: 8443, Reason: "HTTP 500"}}
	port := func(number uint16, s lb.State, backends []lb.BackendStatus) lb.ServiceStatus {
		return lb.ServiceStatus{Service: "web", Address: a, Port: number, Protocol: lb.TCP, Announced: true, State: s,
			Backends: backends}
	}
	for _, tt := range []struct {
		name    string
		i       Info
		st      lb.Status
		peers   []lb.PeerStatus
		want    Verdict
		reasons []string
	}{
		{"nothing to do", Info{}, lb.Status{Settled: true}, nil, OK, nil},
		{"all is well", Info{}, lb.Status{Settled: true, Routes: []lb.RouteStatus{up}}, []lb.PeerStatus{peer}, OK, nil},
		{"starting", Info{}, lb.Status{Routes: []lb.RouteStatus{down}}, nil, Degraded,
			[]string{"starting: the first health checks or the first sync of services is not complete"}},
		{"waiting", Info{Waiting: "waiting for the network"}, lb.Status{}, nil, Down,
			[]string{"waiting for the network"}},
		{"some", Info{}, lb.Status{Settled: true, Routes: []lb.RouteStatus{up, down}}, nil, Degraded,
			[]string{"1 of 2 addresses are not announced: 203.0.113.11: 0 of 1 backends healthy, min_healthy is 1"}},
		{"none", Info{}, lb.Status{Settled: true, Routes: []lb.RouteStatus{down}}, nil, Down,
			[]string{"no address is announced: 203.0.113.11: 0 of 1 backends healthy, min_healthy is 1"}},
		{"on other nodes", Info{}, lb.Status{Settled: true, Routes: []lb.RouteStatus{elsewhere}}, nil, OK, nil},
		{"a peer", Info{}, lb.Status{Settled: true, Routes: []lb.RouteStatus{up}}, []lb.PeerStatus{peer, lost},
			Degraded,
			[]string{"1 of 2 BGP sessions are not established: 203.0.113.10: refused"}},
		{"a stranger in a listen_range", Info{}, lb.Status{Settled: true, Routes: []lb.RouteStatus{up}},
			[]lb.PeerStatus{peer, stranger}, OK, nil},
		{"all peers", Info{}, lb.Status{Settled: true, Routes: []lb.RouteStatus{up}}, []lb.PeerStatus{lost}, Down,
			[]string{"1 of 1 BGP sessions are not established: 203.0.113.10: refused"}},
		{"all peers, and L2", Info{L2: true}, lb.Status{Settled: true, Routes: []lb.RouteStatus{up}},
			[]lb.PeerStatus{lost}, Degraded,
			[]string{"1 of 1 BGP sessions are not established: 203.0.113.10: refused"}},
		{"a backend", Info{}, lb.Status{Settled: true, Backends: sick}, nil, Degraded,
			[]string{"1 of 2 backends are not healthy: 203.0.113.11:8443 of web: HTTP 500"}},
		{"all backends at once", Info{}, lb.Status{Settled: true, Backends: failed(0, 400*time.Millisecond)}, nil,
			Degraded, []string{"all 2 backends, on 2 servers, failed within 400ms: no response within 1s"}},
		{"all backends, one later", Info{}, lb.Status{Settled: true, Backends: failed(0, time.Minute)}, nil, Degraded,
			[]string{"2 of 2 backends are not healthy: 10.0.0.1:80 of web: no response within 1s"}},
		{"a node port of some nodes", Info{}, lb.Status{Settled: true, Backends: []lb.BackendStatus{
			{State: lb.StateHealthy, Service: "web", Address: a, Port: 30080},
			{State: lb.StateUnhealthy, Service: "web", Address: b, Port: 30080, Reason: "no response within 1s"},
		}}, nil, Degraded, []string{"1 of 2 backends are not healthy: 203.0.113.11:30080 of web: no response within " +
			"1s; with externalTrafficPolicy: Local, only nodes with an endpoint answer on a node port"}},
		{"a port", Info{}, lb.Status{
			Settled: true, Routes: []lb.RouteStatus{up}, Backends: sick, Services: []lb.ServiceStatus{
				port(80, lb.StateHealthy, sick[:1]), port(443, lb.StateUnhealthy, sick[1:]),
				port(444, lb.StateUnhealthy, nil), // of a Service without endpoints
			},
		}, nil, Degraded, []string{
			"203.0.113.10:443/tcp of web: none of its backends is healthy (0 of 1)",
			"1 of 2 backends are not healthy: 203.0.113.11:8443 of web: HTTP 500",
		}},
		{"a warning", Info{Findings: []lb.Finding{lb.FoundTableSize.About("", "kept")}}, lb.Status{Settled: true},
			nil, OK, nil},
		{"a capacity", Info{Findings: []lb.Finding{lb.FoundCapacity.About("flows_full", "full")}},
			lb.Status{Settled: true}, nil, Degraded, []string{"full"}},
		{"behind", Info{}, lb.Status{Settled: true, Behind: now.Add(-time.Minute)}, nil, Degraded,
			[]string{"the kernel has lacked updates since 2026-01-02T03:03:05Z"}},
		{"for a moment", Info{}, lb.Status{Settled: true, Behind: now.Add(-time.Second)}, nil, OK, nil},
		{
			"the rest", Info{
				Interfaces: []Interface{{Name: "eth0", Err: "not found"}},
				Findings:   []lb.Finding{lb.FoundBGPListen.About("", "port 179 is taken")},
				Cluster:    &Cluster{Away: now}, Drained: &lb.Drains{Services: []string{"a", "b", "c", "d", "e", "f"}},
				LoadError: "x", NeedRestart: []string{"bgp"},
			}, lb.Status{Settled: true}, nil, Degraded, []string{
				"interface eth0: not found",
				"the API server has not answered since 2026-01-02T03:04:05Z; its last known state is used",
				"drained: a, b, c, d, e and 1 more", "the last reload was rejected",
				"a restart is needed to apply changes to: bgp", "port 179 is taken",
			},
		},
		{"a drained node", Info{Drained: &lb.Drains{Node: true}}, lb.Status{Settled: true}, nil, Degraded,
			[]string{"the node is drained"}},
	} {
		s := &Server{o: Options{
			Info: func() Info { return tt.i }, Peers: func() []lb.PeerStatus { return tt.peers },
			Now: func() time.Time { return now },
		}}
		got := s.info(tt.st)
		must.Row(t, tt.name, tt.want, got.Verdict)
		must.Row(t, tt.name, tt.reasons, got.Reasons)
	}
}

// The first line names an address that clients have stopped using, after a minute without packets.
func TestAnAddressWithoutPacketsIsNamed(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	a := netip.MustParseAddr("203.0.113.10")
	for _, tt := range []struct {
		idle, routed time.Duration
		rate         float64
		announced    bool
		want         string
	}{
		{time.Minute, time.Hour, 170, true, "OK, but no packet for 203.0.113.10 since 03:03:05 (340/s before)"},
		{time.Minute - 1, time.Hour, 170, true, "OK"},
		{time.Minute, time.Minute - 1, 170, true, "OK"}, // clients have not come back after a drain
		{time.Minute, time.Hour, 0.4, true, "OK"},
		{time.Minute, time.Hour, 170, false, "OK"},
	} {
		row := lb.ServiceStatus{Address: a, Traffic: lb.Traffic{Last: now.Add(-tt.idle), Before: tt.rate}}
		st := lb.Status{
			Settled: true, Services: []lb.ServiceStatus{row, row, {Address: a}},
			Routes: []lb.RouteStatus{{Address: a, Announced: tt.announced, Intended: true, Since: now.Add(-tt.routed)}},
		}
		var i Info
		i.judge(st, nil, now)
		got := i.Headline()
		must.True(t, got == tt.want && i.Verdict == OK, "%+v: %s %q", tt, i.Verdict, got)
	}
}

// The most frequent reason is named, with one of its addresses.
func TestMostFrequentReasonIsNamed(t *testing.T) {
	var st lb.Status
	for i, reason := range []string{"198.51.100.1 is in no pool", "no BGP peer has it", "no BGP peer has it"} {
		st.Routes = append(st.Routes, lb.RouteStatus{
			Address: netip.AddrFrom4([4]byte{198, 51, 100, byte(i + 1)}), Reason: reason,
		})
	}
	for n, want := range map[int]string{
		3: "no address is announced: 198.51.100.3: no BGP peer has it",
		1: "no address is announced: 198.51.100.1: is in no pool",
	} {
		var got []string
		i, part := Info{}, st
		part.Settled, part.Routes = true, st.Routes[:n]
		i.judge(part, nil, time.Now())
		got = i.Reasons
		must.True(t, len(got) == 1 && got[0] == want && i.Verdict == Down, "%v, %s; want %q", got, i.Verdict, want)
	}
}

// failed returns a backend on its own server for each time since when it is unhealthy.
func failed(since ...time.Duration) (all []lb.BackendStatus) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for n, d := range since {
		all = append(all, lb.BackendStatus{
			Service: "web", Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(n + 1)}), Port: 80,
			State: lb.StateUnhealthy, Reason: "no response within 1s", Since: at.Add(d),
		})
	}
	return all
}
