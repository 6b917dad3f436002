package lb

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestParseQuestion(t *testing.T) {
	for _, tt := range []struct{ client, to, want string }{
		{"198.51.100.7", "203.0.113.10:80", "198.51.100.7:40000 203.0.113.10:80 tcp"},
		{"198.51.100.7:1234", "203.0.113.10:53/udp", "198.51.100.7:1234 203.0.113.10:53 udp"},
		{"2001:db8::7", "[2001:db8:1::10]:80/sctp", "[2001:db8::7]:40000 [2001:db8:1::10]:80 sctp"},
		{"me", "203.0.113.10:80", ""}, {"198.51.100.7", "203.0.113.10", ""},
		{"198.51.100.7", "203.0.113.10:80/icmp", ""}, {"2001:db8::7", "203.0.113.10:80", ""},
		{"198.51.100.7", "203.0.113.10:80/", ""}, {"", "", ""},
	} {
		q, err := ParseQuestion(tt.client, tt.to)
		got := fmt.Sprint(q.Client, " ", q.To, " ", q.Protocol)
		if err != nil {
			got = ""
		}
		must.True(t, got == tt.want, "%q, %q: %q (%v); want %q", tt.client, tt.to, got, err, tt.want)
	}
}

// An explanation includes the route, the peers, and the backends that receive no new flows.
func TestSurround(t *testing.T) {
	out := BackendStatus{Service: "web", Address: testVIP, Port: 8080, State: StateUnhealthy, Reason: "HTTP 503"}
	drain := BackendStatus{Service: "web", Address: testVIP6, Port: 8080, State: StateDraining}
	s := Status{
		Services: []ServiceStatus{
			{Service: "web", Address: testVIP, Port: 80, Protocol: TCP,
				Backends: []BackendStatus{out, drain, {State: StateHealthy}}},
			{Service: "dns", Address: testVIP, Port: 53, Protocol: UDP, Backends: []BackendStatus{out}},
		},
		Routes: []RouteStatus{
			{Address: testVIP6, State: RouteAnnounced},
			{Address: testVIP, State: RouteWithheld, Reason: drained},
		},
	}
	e := Explanation{Address: testVIP, Port: 80, Protocol: TCP, Steps: []string{"first"}}
	e.Surround(s, []PeerStatus{{Peer: testVIP, State: "active", LastError: "connection refused"}})
	must.True(t, len(e.Out) == 2 && e.Route.Reason == drained && len(e.Peers) == 1, "%+v", e)
	want := []string{
		"first", "gets no new flows: unhealthy: HTTP 503", "gets no new flows: draining",
		"is not announced: withheld: drained by the operator", "active, 0 routes: connection refused",
	}
	for i, text := range want {
		must.True(t, i < len(e.Steps) && strings.Contains(e.Steps[i], text), "step %d of %q; want %q", i, e.Steps, text)
	}
}

// During a drain, and while probes fail everywhere, an address is announced with a reason.
func TestSurroundWithALowerPreference(t *testing.T) {
	e := Explanation{Address: testVIP}
	e.Surround(Status{Routes: []RouteStatus{
		{Address: testVIP, State: RouteAnnounced, Reason: "with a lower preference: " + drained}}}, nil)
	want := testVIP.String() + " is announced with a lower preference: drained by the operator"
	must.Equal(t, want, strings.Join(e.Steps, "\n"))
}

// Reasons may change with every probe ("HTTP 503, request 4711"). A plan depends on states and weights only.
func TestReasonBuildsNoPlan(t *testing.T) {
	e := &Engine{checks: slog.New(slog.DiscardHandler), stale: map[string]time.Time{}}
	e.services = map[string]*entry{"web": {health: map[CheckKey]Health{}}}
	h := Health{Key: CheckKey{Service: "web"}, State: StateUnhealthy, Weight: -1, Reason: "first"}
	for i, step := range []struct {
		change func()
		stale  int
	}{
		{func() {}, 1},
		{func() { h.Reason = "second" }, 0},
		{func() { h.Weight = 3 }, 1},
		{func() { h.State = StateHealthy }, 1},
	} {
		clear(e.stale)
		step.change()
		e.healthChanged(h, testStart)
		must.True(t, len(e.stale) == step.stale && e.services["web"].health[h.Key].Reason == h.Reason,
			"step %d: %d stale plans, reason %q; want %d, %q", i, len(e.stale), e.services["web"].health[h.Key].Reason,
			step.stale, h.Reason)
	}
}
