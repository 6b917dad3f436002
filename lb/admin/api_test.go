package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var vip = netip.MustParseAddr("203.0.113.10")

func status(context.Context) (lb.Status, error) {
	b := lb.BackendStatus{
		Service: "web", Address: netip.MustParseAddr("10.0.0.1"), Port: 8080, Weight: 1, State: lb.StateHealthy,
	}
	return lb.Status{
		Settled: true,
		Services: []lb.ServiceStatus{{
			Service: "web", Address: vip, Port: 80, Protocol: lb.TCP, Policy: lb.PolicyCluster,
			Backends: []lb.BackendStatus{b}, State: lb.StateHealthy, Announced: true,
		}},
		Backends: []lb.BackendStatus{b},
		Routes: []lb.RouteStatus{
			{Address: vip, Services: []string{"web"}, Announced: true, State: lb.RouteAnnounced},
		},
	}, nil
}

func options(t *testing.T) Options {
	return Options{
		Socket: filepath.Join(t.TempDir(), "s"), Status: status, Problem: func(string, error) {},
		StatusOf: func(ctx context.Context, _ netip.Addr) (lb.Status, error) { return status(t.Context()) },
		Members: func() []lb.MemberStatus {
			return []lb.MemberStatus{{
				Member: netip.MustParseAddr("192.0.2.12"), Name: "lb2", State: lb.MemberUp,
				Since: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), Ahead: -2.5, Within: 0.001,
			}}
		},
		Peers: func() []lb.PeerStatus {
			return []lb.PeerStatus{{Peer: netip.MustParseAddr("192.0.2.1"), State: "established"}}
		},
		Sent: func(peer netip.Addr) ([]lb.SentRoute, bool) {
			med := uint32(0)
			return []lb.SentRoute{{
				Prefix: netip.PrefixFrom(vip, 32), NextHop: netip.MustParseAddr("192.0.2.2"), ASPath: []uint32{64512},
				MED: &med, Communities: []string{"no-export"}, Bandwidth: 125e6,
			}}, peer == netip.MustParseAddr("192.0.2.1")
		},
		Flows: func(_ context.Context, want lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
			if want != (lb.FlowFilter{Service: "web", Port: 80, Limit: flowLimit}) {
				return nil, false, fmt.Errorf("asked for %+v", want)
			}
			f := lb.FlowStatus{
				Scope: lb.ScopeOutside, Service: "web", Client: netip.MustParseAddrPort("198.51.100.11:40000"),
				Address: vip, Port: 80, Protocol: lb.TCP, Backend: netip.MustParseAddrPort("10.0.0.1:8080"),
				Forward: lb.MethodNAT, State: lb.FlowClosing, Idle: 1.5,
				Age: 60, FromClient: lb.FlowFigures{Packets: 12, Bytes: 640, Retransmissions: 1}, Handshake: 0.25,
			}
			return []lb.FlowStatus{f}, true, nil
		},
		Drain: func(_ context.Context, what lb.DrainTarget, on bool) (lb.Drains, error) {
			if what.Service == "gone" {
				return lb.Drains{}, errors.New("there is no service \"gone\"")
			}
			return lb.Drains{}.With(what, on), nil
		},
		Info:    func() Info { return Info{Node: "lb1", Version: "test"} },
		Metrics: promhttp.Handler(), Log: slog.New(slog.DiscardHandler),
	}
}

// ask returns a server's response to one request, on its socket if writable.
func ask(o Options, writable bool, method, path, body string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	New(o).Handler(writable).ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(body)))
	return w
}

// compact is the body of an answer without white space.
func compact(w *httptest.ResponseRecorder) string {
	return strings.Join(strings.Fields(w.Body.String()), "")
}

func TestAPI(t *testing.T) {
	const noTraffic = `"packets":0,"bytes":0,"connections":0,"packets_per_second":0,"bits_per_second":0,
		"connections_per_second":0`
	const backend = `{"service":"web","address":"10.0.0.1","port":8080,"weight":1,"state":"healthy",` + noTraffic + `}`
	for _, tt := range []struct {
		path string
		code int
		want string
	}{
		{"/v1/status", 200, `{"verdict":"OK","reasons":[],
			"node":"lb1","version":"test","started":"0001-01-01T00:00:00Z","config":"","settled":true,
			"services":1,"services_healthy":1,"backends":1,"backends_healthy":1,"routes":1,"routes_announced":1,
			"peers":1,"peers_established":1,"interfaces":[],"findings":[]}`},
		{"/v1/services", 200, `[{"service":"web","address":"203.0.113.10","port":80,"protocol":"tcp",
			"policy":"Cluster","forward":"","algorithm":"",
			"backends":[` + backend + `],"state":"healthy","announced":true,` + noTraffic + `}]`},
		{"/v1/backends", 200, "[" + backend + "]"},
		{"/v1/routes", 200, `[{"address":"203.0.113.10","services":["web"],"announced":true,"state":"announced"}]`},
		{"/v1/peers", 200, `[{"peer":"192.0.2.1","asn":0,"state":"established","routes":0,"flaps":0}]`},
		{"/v1/members", 200, `[{"member":"192.0.2.12","name":"lb2","state":"up","since":"2026-01-02T03:04:05Z",
			"clock_ahead_seconds":-2.5,"clock_within_seconds":0.001}]`},
		{"/v1/peers?peer=192.0.2.1", 200,
			`[{"peer":"192.0.2.1","asn":0,"state":"established","routes":0,"flaps":0}]`},
		{"/v1/peers?peer=192.0.2.9", 404, `{"error":"there is no BGP peer 192.0.2.9"}`},
		{"/v1/routes?peer=192.0.2.1", 200, `[{"prefix":"203.0.113.10/32","next_hop":"192.0.2.2","as_path":[64512],
			"med":0,"communities":["no-export"],"bandwidth":125000000,"at":"0001-01-01T00:00:00Z"}]`},
		{"/v1/routes?peer=192.0.2.9", 404, `{"error":"there is no BGP peer 192.0.2.9"}`},
		{"/v1/routes?peer=", 400, `{"error":"peer \"\": want an address"}`},
		{"/v1/flows?service=web&port=80", 200, `{"flows":[{"scope":"outside","service":"web",
			"client":"198.51.100.11:40000","address":"203.0.113.10","port":80,"protocol":"tcp",
			"backend":"10.0.0.1:8080","forward":"nat","state":"closing","idle_seconds":1.5,
			"age_seconds":60,"from_client":{"packets":12,"bytes":640,"retransmissions":1},
			"handshake_seconds":0.25}],"more":true}`},
		{"/v1/flows?who=me", 400,
			`{"error":"unknown filter \"who\"; allowed: ` + strings.Join(lb.FlowFilters, ", ") + `"}`},
		{"/v1/flows?port=http", 400, `{"error":"port \"http\": want a decimal number from 0 to 65535"}`},
		{"/healthz", 200, `{"healthy":true,"settled":true}`},
	} {
		t.Run(tt.path, func(t *testing.T) {
			w := ask(options(t), true, "GET", tt.path, "")
			var got, want any
			must.Do(t, json.Unmarshal(w.Body.Bytes(), &got))
			must.Do(t, json.Unmarshal([]byte(tt.want), &want))
			d := cmp.Diff(want, got)
			must.True(t, d == "" && w.Code == tt.code, "code %d, want %d; diff (-want +got):\n%s", w.Code, tt.code, d)
		})
	}
}

// Requests that change something are served only on the socket.
func TestDrain(t *testing.T) {
	for _, tt := range []struct {
		writable bool
		path     string
		code     int
		want     string
	}{
		{true, "/v1/drain?service=web", 200, `{"node":false,"services":["web"]}`},
		{true, "/v1/drain?node=true", 200, `{"node":true,"services":null}`},
		{true, "/v1/drain?service=", 400, `{"error":"wanteitherservice=NAMEornode=true"}`},
		{true, "/v1/drain", 400, `{"error":"wanteitherservice=NAMEornode=true"}`},
		{true, "/v1/drain?service=web&node=true", 400, `{"error":"wanteitherservice=NAMEornode=true"}`},
		{true, "/v1/drain?service=web&backend=10.0.0.1", 200,
			`{"node":false,"services":null,"backends":[{"service":"web","address":"10.0.0.1"}]}`},
		{true, "/v1/drain?service=web&backend=", 400,
			`{"error":"\"\"isnotanaddress;writetheserver'saddresswithoutaport"}`},
		{true, "/v1/drain?node=true&backend=10.0.0.1", 400, `{"error":"wantservice=NAMEwithbackend=ADDRESS"}`},
		{true, "/v1/undrain?service=web", 200, `{"node":false,"services":null}`},
		{true, "/v1/drain?service=gone", 400, `{"error":"thereisnoservice\"gone\""}`},
		{false, "/v1/drain?service=web", 404, "404pagenotfound"},
	} {
		w := ask(options(t), tt.writable, "POST", tt.path, "")
		must.True(t, w.Code == tt.code && compact(w) == tt.want,
			"POST %s, writable %t: %d %s; want %d %s", tt.path, tt.writable, w.Code, w.Body, tt.code, tt.want)
	}
}

func TestReload(t *testing.T) {
	now := Reloaded{
		Config: "/etc/x.toml", Loaded: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC),
		Warnings: []string{"w"}, NeedRestart: []string{"bgp"},
	}
	for _, tt := range []struct {
		name     string
		writable bool
		method   string
		err      error
		code     int
		want     string
		calls    int
	}{
		{"in force", true, "POST", nil, 200,
			`{"config":"/etc/x.toml","loaded":"2026-01-02T03:04:05Z","changes":[],"warnings":["w"],` +
				`"need_restart":["bgp"]}`, 1},
		{"refused", true, "POST", errors.New("a:1: x\na:2: y"), 422, `{"error":"a:1:x\na:2:y"}`, 1},
		{"read-only listener", false, "POST", nil, 404, "404pagenotfound", 0},
		{"GET", true, "GET", nil, 405, "MethodNotAllowed", 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			o, calls := options(t), 0
			o.Reload = func(string) (Reloaded, error) { calls++; return now, tt.err }
			w := ask(o, tt.writable, tt.method, "/v1/reload", "")
			must.True(t, w.Code == tt.code && compact(w) == tt.want && calls == tt.calls,
				"%d %s, %d calls; want %d %s, %d", w.Code, w.Body, calls, tt.code, tt.want, tt.calls)
		})
	}
}

// diff uses the agent's file, or a named text instead. It is not served over TCP.
func TestDiff(t *testing.T) {
	for _, tt := range []struct {
		method, path string
		writable     bool
		code         int
		want         string
	}{
		{"GET", "/v1/diff", true, 200, `{"config":"","changes":[{"op":"~","object":"[log]"}]}`},
		{"POST", "/v1/diff?name=/x.toml", true, 200, `{"config":"/x.toml","changes":[]}`},
		{"POST", "/v1/diff", true, 400, `{"error":"wantname=FILE"}`},
		{"POST", "/v1/diff?name=/bad", true, 422, `{"error":"bad"}`},
		{"GET", "/v1/diff", false, 404, "404pagenotfound"},
		{"GET", "/v1/proxy/diff", true, 422, `{"error":"theconfigurationhasnosection[kubernetes]"}`},
		{"GET", "/v1/doctor", true, 200, `[{"check":"mtu","expects":"large","findings":null}]`},
		{"GET", "/v1/doctor", false, 404, "404pagenotfound"},
		{"GET", "/v1/config", true, 200, `{"text":"[log]\n"}`},
		{"GET", "/v1/config", false, 404, "404pagenotfound"},
	} {
		o := options(t)
		o.Text = func() string { return "[log]\n" }
		o.Examine = func(context.Context, lb.Status) []lb.Diagnosis {
			return []lb.Diagnosis{{Check: "mtu", Expects: "large"}}
		}
		o.Diff = func(name string, text []byte) (Reloaded, error) {
			switch {
			case name == "/bad":
				return Reloaded{}, errors.New("bad")
			case name != "" && string(text) == "body":
				return Reloaded{Config: name}, nil
			}
			return Reloaded{Changes: []lb.Change{{Op: lb.Changed, Object: "[log]"}}}, nil
		}
		w := ask(o, tt.writable, tt.method, tt.path, "body")
		must.True(t, w.Code == tt.code && compact(w) == tt.want,
			"%s %s: %d %s; want %d %s", tt.method, tt.path, w.Code, w.Body, tt.code, tt.want)
	}
}

func TestStuckEngineIsUnhealthy(t *testing.T) {
	o := options(t)
	o.StatusOf = func(context.Context, netip.Addr) (lb.Status, error) {
		return lb.Status{}, errors.New("ask the engine: no answer")
	}
	code, body := get(t, o, "/healthz")
	must.True(t, code == 503 && body == `{"error":"asktheengine:noanswer"}`, "%d %s; want the reason", code, body)
}

func TestServerAndClient(t *testing.T) {
	o := options(t)
	c := NewClient(o.Socket)
	var info Info
	err := c.Get(t.Context(), "/v1/status", &info)
	must.Fail(t, err, "no agent listens on")
	for range 2 { // the second run finds the socket of the first
		must.Do(t, os.WriteFile(o.Socket+".stale", nil, 0o600))
		stop := must.Run(t, New(o).Run)
		deadline := time.Now().Add(5 * time.Second)
		for c.Get(t.Context(), "/v1/status", &info) != nil && time.Now().Before(deadline) {
			time.Sleep(5 * time.Millisecond)
		}
		must.Need(t, info.Node == "lb1", "answer %+v; want node lb1", info)
		must.Equal(t, 0o660, must.Get(os.Stat(o.Socket))(t).Mode().Perm())
		_, err := listenUnix(o.Socket)
		must.True(t, err != nil && strings.Contains(err.Error(), "another agent is running there"),
			"second server: %v", err)
		stop()
	}
}

// A configuration can be applied and confirmed on the socket only.
func TestApply(t *testing.T) {
	o := options(t)
	o.Apply = func(name string, text []byte, force string, within time.Duration) (Reloaded, error) {
		return Reloaded{Config: fmt.Sprint(name, string(text), force, within)}, nil
	}
	o.Confirm = func() (Reloaded, error) { return Reloaded{}, errors.New("none waits") }
	for _, tt := range []struct {
		writable bool
		path     string
		code     int
		want     string
	}{
		{true, "/v1/apply?name=/a&force=w&confirm=60s", 200, `"config":"/atextw1m0s"`},
		{true, "/v1/apply?name=/a", 200, `"config":"/atext0s"`},
		{true, "/v1/apply", 400, "wantname=FILE"},
		{true, "/v1/apply?name=/a&confirm=", 400, "wantatimefrom1sto1h"},
		{true, "/v1/apply?name=/a&confirm=0s", 400, "wantatimefrom1sto1h"},
		{true, "/v1/confirm", 422, "nonewaits"},
		{false, "/v1/apply?name=/a", 404, ""},
		{false, "/v1/confirm", 404, ""},
	} {
		w := ask(o, tt.writable, "POST", tt.path, "text")
		must.True(t, w.Code == tt.code && strings.Contains(compact(w), tt.want), "%s: %d %s", tt.path, w.Code, w.Body)
	}
}

func TestWeight(t *testing.T) {
	o := options(t)
	o.SetWeight = func(_ context.Context, target lb.DrainTarget, weight int) (lb.Drains, error) {
		return lb.Drains{Node: true}.WithWeight(target, weight), nil
	}
	const server = "/v1/weight?service=web&backend=10.0.0.1"
	for _, tt := range []struct {
		writable bool
		path     string
		code     int
		want     string
	}{
		{true, server + "&weight=3", 200, `{"weights":[{"service":"web","address":"10.0.0.1","weight":3}]}`},
		{true, server + "&weight=default", 200, `{"weights":[]}`},
		{true, server + "&weight=1000", 200, `"weight":1000`},
		{true, server + "&weight=1001", 400, "from0to1000"},
		{true, server + "&weight=-1", 400, "from0to1000"},
		{true, server, 400, "from0to1000"},
		{true, "/v1/weight?backend=10.0.0.1&weight=1", 400, "wantservice=NAME"},
		{true, "/v1/weight?service=web&weight=1", 400, "isnotanaddress"},
		{false, server + "&weight=3", 404, ""},
	} {
		w := ask(o, tt.writable, "POST", tt.path, "")
		must.True(t, w.Code == tt.code && strings.Contains(compact(w), tt.want), "%s: %d %s", tt.path, w.Code, w.Body)
	}
}

// Flows are ended on the socket only, and never without a filter.
func TestEndFlows(t *testing.T) {
	o := options(t)
	o.EndFlows = func(_ context.Context, want lb.FlowFilter) (ended, kept int, err error) {
		if want.Service == "gone" {
			return 0, 0, nil
		}
		must.Row(t, "filter", lb.FlowFilter{Client: netip.MustParsePrefix("192.0.2.7/32")}, want)
		return 2, 1, nil
	}
	for _, tt := range []struct {
		writable bool
		path     string
		code     int
		want     string
	}{
		{true, "/v1/flows/end?client=192.0.2.7", 200, `{"ended":2,"kept":1}`},
		{true, "/v1/flows/end", 400, "wantclient=ADDRESS"},
		{true, "/v1/flows/end?service=", 400, "wantclient=ADDRESS"},
		{true, "/v1/flows/end?state=closing&limit=3", 400, "wantclient=ADDRESS"},
		{true, "/v1/flows/end?client=x", 400, "neitheranIPaddress"},
		{true, "/v1/flows/end?service=gone", 404, "thereisnoservice"},
		{false, "/v1/flows/end?client=192.0.2.7", 404, ""},
	} {
		w := ask(o, tt.writable, "POST", tt.path, "")
		must.True(t, w.Code == tt.code && strings.Contains(compact(w), tt.want), "%s: %d %s", tt.path, w.Code, w.Body)
	}
}
