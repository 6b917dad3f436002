package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// get returns the code and the body, without white space, of a GET of path. The body must be one JSON value.
func get(t *testing.T, o Options, path string) (code int, body string) {
	t.Helper()
	w := ask(o, true, http.MethodGet, path, "")
	must.True(t, json.Valid(w.Body.Bytes()), "%s: not JSON: %s", path, w.Body)
	return w.Code, compact(w)
}

func TestExplainHandler(t *testing.T) {
	for _, tt := range []struct {
		query string
		err   error
		code  int
		want  string
	}{
		{"client=198.51.100.7&to=203.0.113.10:53/udp", nil, 200, `"reason":"no_backend"`},
		{"client=198.51.100.7&to=203.0.113.10:53/udp", errors.New("no map"), 500, `{"error":"nomap"}`},
		{"client=198.51.100.7&to=203.0.113.10", nil, 400, "wantVIP:PORT"},
		{"to=203.0.113.10:53", nil, 400, `{"error":`},
	} {
		o := options(t)
		o.Explain = func(q lb.Question) (lb.Explanation, error) {
			must.True(t, q.Client.Addr() == netip.MustParseAddr("198.51.100.7") && q.To.Port() == 53 &&
				q.Protocol == lb.UDP, "question %+v", q)
			return lb.Explanation{Reason: "no_backend"}, tt.err
		}
		if code, body := get(t, o, "/v1/explain?"+tt.query); code != tt.code || !strings.Contains(body, tt.want) {
			t.Errorf("%s: %d %s; want %d %s", tt.query, code, body, tt.code, tt.want)
		}
	}
}

// Lists are never null, because a client may iterate over them.
func TestEmptyLists(t *testing.T) {
	o := options(t)
	o.Status = func(context.Context) (lb.Status, error) { return lb.Status{}, nil }
	o.Peers = func() []lb.PeerStatus { return nil }
	o.Members = nil
	o.Flows = func(context.Context, lb.FlowFilter) ([]lb.FlowStatus, bool, error) { return nil, false, nil }
	o.Sent = func(netip.Addr) ([]lb.SentRoute, bool) { return nil, true }
	for path, want := range map[string]string{
		"/v1/services": "[]", "/v1/backends": "[]", "/v1/routes": "[]", "/v1/peers": "[]", "/v1/members": "[]",
		"/v1/routes?peer=192.0.2.1": "[]", "/v1/flows": `{"flows":[],"more":false}`,
	} {
		code, body := get(t, o, path)
		must.True(t, code == 200 && body == want, "%s: %d %s; want %s", path, code, body, want)
	}
	o.Flows = func(context.Context, lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
		return nil, false, errors.New("no map")
	}
	code, body := get(t, o, "/v1/flows")
	must.True(t, code == 500 && body == `{"error":"nomap"}`, "failed list: %d %s", code, body)
}

func TestInfoCounts(t *testing.T) {
	o := options(t)
	o.Info = func() Info { return Info{Interfaces: []Interface{{Name: "eth0"}}} }
	o.Peers = func() []lb.PeerStatus {
		return []lb.PeerStatus{{State: "idle"}, {State: "established"}, {State: "established"}}
	}
	backends := []lb.BackendStatus{{State: lb.StateHealthy}, {State: lb.StateUnhealthy}, {State: lb.StateDraining}}
	services := []lb.ServiceStatus{{State: lb.StateUnhealthy}, {State: lb.StateHealthy}, {State: lb.StateUnknown}}
	i := New(o).info(lb.Status{
		Behind: time.Unix(1, 0), Services: services, Backends: append(backends, backends[0]),
		Routes: []lb.RouteStatus{{Announced: true}, {}, {}, {}, {}},
	})
	got := [8]int{i.Services, i.Healthy, i.Backends, i.BackendsUp, i.Routes, i.Announced, i.Peers, i.PeersUp}
	want := [8]int{3, 1, 4, 2, 5, 1, 3, 2}
	must.True(t, got == want && !i.Settled && i.Behind.Equal(time.Unix(1, 0)), "%v; want %v; %+v", got, want, i)
	must.True(t, len(i.Interfaces) == 1, "interfaces %+v", i.Interfaces)
}

// Services that an operator has drained are not failures: they are counted as drained, whatever their checks say.
func TestDrainedServicesAreCounted(t *testing.T) {
	o := options(t)
	services := []lb.ServiceStatus{
		{Service: "web", State: lb.StateDraining}, {Service: "mail", State: lb.StateUnhealthy},
		{Service: "dns", State: lb.StateHealthy}, {Service: "ntp", State: lb.StateUnhealthy},
	}
	for _, tt := range []struct {
		drained         *lb.Drains
		healthy, drains int
	}{{nil, 1, 0}, {&lb.Drains{Services: []string{"web", "mail"}}, 1, 2}, {&lb.Drains{Node: true}, 0, 4}} {
		o.Info = func() Info { return Info{Drained: tt.drained} }
		i := New(o).info(lb.Status{Services: services})
		must.True(t, i.Services == 4 && i.Healthy == tt.healthy && i.DrainedServices == tt.drains,
			"%+v: %d services, %d healthy, %d drained", tt.drained, i.Services, i.Healthy, i.DrainedServices)
	}
}

// Answers that wait for the engine end after engineTimeout.
func TestHandlersBoundTheirRequests(t *testing.T) {
	o := options(t)
	checkDeadline := func(ctx context.Context) {
		t.Helper()
		at, ok := ctx.Deadline()
		must.True(t, ok && time.Until(at) <= engineTimeout, "deadline %s, %t", at, ok)
	}
	o.Status = func(ctx context.Context) (lb.Status, error) { checkDeadline(ctx); return status(ctx) }
	o.StatusOf = func(ctx context.Context, _ netip.Addr) (lb.Status, error) { checkDeadline(ctx); return status(ctx) }
	var drained context.Context
	o.Drain = func(ctx context.Context, _ lb.DrainTarget, _ bool) (lb.Drains, error) {
		checkDeadline(ctx)
		drained = ctx
		return lb.Drains{}, nil
	}
	get(t, o, "/v1/status")
	get(t, o, "/healthz")
	h := ask(o, true, http.MethodPost, "/v1/drain?service=web", "").Header()
	must.True(t, h.Get("Content-Type") == "application/json" && h.Get("X-Content-Type-Options") == "nosniff",
		"header %v", h)
	must.True(t, drained != nil && drained.Err() != nil, "the context of the request is not ended with it")
}

func TestStateMetrics(t *testing.T) {
	backend := func(state lb.State) lb.BackendStatus { return lb.BackendStatus{Service: "web", State: state} }
	var failure error
	m := NewStateMetrics(func(ctx context.Context) (lb.Status, error) {
		_, ok := ctx.Deadline()
		must.True(t, ok, "no deadline")
		return lb.Status{
			Settled: true,
			Services: []lb.ServiceStatus{
				{Service: "web"}, {Service: "idle"},
				{Service: "web", Address: vip, Port: 80, Protocol: lb.TCP, Backends: []lb.BackendStatus{
					backend(lb.StateHealthy), backend(lb.StateUnhealthy),
				}},
			},
			Backends: []lb.BackendStatus{
				backend(lb.StateHealthy), backend(lb.StateHealthy), backend(lb.StateUnhealthy),
				backend(lb.StateDraining), backend(lb.StateUnknown),
			},
			Routes: []lb.RouteStatus{{Address: vip}, {Address: vip.Next(), Announced: true}},
		}, failure
	}, func() []lb.Pool {
		ranges := []lb.AddrRange{{From: vip.Prev(), To: vip.Next()},
			{From: netip.MustParseAddr("2001:db8::1"), To: netip.MustParseAddr("2001:db8::2")}}
		return []lb.Pool{{Name: "public", Ranges: ranges}, {Name: "other", Ranges: ranges[1:]}}
	})
	want := map[string]float64{
		"pool_addresses public assigned": 1, "pool_addresses public free": 4,
		"pool_addresses other assigned": 0, "pool_addresses other free": 2,
		"engine_backends web unknown": 1, "engine_backends web healthy": 2,
		"engine_backends web unhealthy": 1, "engine_backends web draining": 1,
		"engine_backends idle unknown": 0, "engine_backends idle healthy": 0,
		"engine_backends idle unhealthy": 0, "engine_backends idle draining": 0,
		"frontend_backends 80 tcp web 203.0.113.10": 1,
		"engine_services": 2, "engine_settled": 1, "announce_vip_announced 203.0.113.10": 0,
		"announce_vip_announced 203.0.113.11": 1,
	}
	must.Equal(t, want, gauges(t, m))
	failure = errors.New("no answer")
	must.Equal(t, 0, testutil.CollectAndCount(m))
}

func TestCallMetrics(t *testing.T) {
	m := NewCallMetrics()
	m.Observe("datapath", 500*time.Millisecond, nil)
	m.Observe("datapath", 500*time.Millisecond, errors.New("no"))
	const want = `# HELP steelyard_engine_apply_duration_seconds Duration of calls to a consumer.
# TYPE steelyard_engine_apply_duration_seconds histogram
steelyard_engine_apply_duration_seconds_bucket{consumer="datapath",le="0.0001"} 0
steelyard_engine_apply_duration_seconds_bucket{consumer="datapath",le="0.0004"} 0
steelyard_engine_apply_duration_seconds_bucket{consumer="datapath",le="0.0016"} 0
steelyard_engine_apply_duration_seconds_bucket{consumer="datapath",le="0.0064"} 0
steelyard_engine_apply_duration_seconds_bucket{consumer="datapath",le="0.0256"} 0
steelyard_engine_apply_duration_seconds_bucket{consumer="datapath",le="0.1024"} 0
steelyard_engine_apply_duration_seconds_bucket{consumer="datapath",le="0.4096"} 0
steelyard_engine_apply_duration_seconds_bucket{consumer="datapath",le="1.6384"} 2
steelyard_engine_apply_duration_seconds_bucket{consumer="datapath",le="6.5536"} 2
steelyard_engine_apply_duration_seconds_bucket{consumer="datapath",le="+Inf"} 2
steelyard_engine_apply_duration_seconds_sum{consumer="datapath"} 1
steelyard_engine_apply_duration_seconds_count{consumer="datapath"} 2
# HELP steelyard_engine_apply_errors_total Failed calls to a consumer, retries included.
# TYPE steelyard_engine_apply_errors_total counter
steelyard_engine_apply_errors_total{consumer="datapath"} 1
`
	must.Do(t, testutil.CollectAndCompare(m, strings.NewReader(want)))
}

// Only GET reads, and JSON is indented, because people read the API with curl.
func TestOnlyGET(t *testing.T) {
	o := options(t)
	o.Metrics = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("up 1\n")) })
	for _, tt := range []struct {
		request, want string
		code          int
	}{
		{"GET /healthz", "{\n  \"healthy\": true,\n  \"settled\": true\n}\n", 200}, {"GET /metrics", "up 1\n", 200},
		{"GET /", "<title>Steelyard</title>", 200}, {"POST /v1/status", "", 405},
	} {
		method, path, _ := strings.Cut(tt.request, " ")
		w := ask(o, true, method, path, "")
		must.Row(t, tt.request, tt.code, w.Code)
		must.True(t, strings.Contains(w.Body.String(), tt.want), "%s: %s", tt.request, w.Body)
	}
}

// A service without flows has an empty list, and one that does not exist an error. Flows of a deleted one are listed.
func TestFlowsOfUnknownServices(t *testing.T) {
	for _, tt := range []struct {
		name, service    string
		flows            int
		settled, waiting bool
		code             int
	}{
		{"without flows", "web", 0, true, false, 200},
		{"with flows", "web", 1, true, false, 200},
		{"unknown", "wbe", 0, true, false, 404},
		{"deleted, with flows", "wbe", 1, true, false, 200},
		{"not yet known", "wbe", 0, false, false, 200},
		{"without an address", "new", 0, true, true, 200},
	} {
		o := options(t)
		o.Status = func(ctx context.Context) (lb.Status, error) {
			st, err := status(ctx)
			st.Settled = tt.settled
			return st, err
		}
		if tt.waiting {
			o.Waiting = func() []lb.ServiceStatus { return []lb.ServiceStatus{{Service: "new"}} }
		}
		o.Flows = func(context.Context, lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
			return make([]lb.FlowStatus, tt.flows), false, nil
		}
		code, body := get(t, o, "/v1/flows?service="+tt.service)
		if code != tt.code || code != 200 && !strings.Contains(body, `thereisnoservice\"wbe\"`) {
			t.Errorf("%s: %d %s; want %d", tt.name, code, body, tt.code)
		}
	}
}

// Nobody can list all flows over TCP, because an answer with a million of them takes a gigabyte.
func TestFlowsAreLimited(t *testing.T) {
	for _, tt := range []struct {
		writable bool
		query    string
		want     int
	}{
		{true, "?limit=0", 0}, {true, "", flowLimit}, {true, "?limit=5000", 5000},
		{false, "?limit=0", flowLimit}, {false, "", flowLimit}, {false, "?limit=5000", flowLimit},
		{false, "?limit=5", 5},
	} {
		o := options(t)
		var got lb.FlowFilter
		o.Flows = func(_ context.Context, f lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
			got = f
			return nil, false, nil
		}
		ask(o, tt.writable, http.MethodGet, "/v1/flows"+tt.query, "")
		must.True(t, got.Limit == tt.want, "%+v: limit %d", tt, got.Limit)
	}
}

// Services that wait for an address are listed among the others, by name.
func TestServicesAreSorted(t *testing.T) {
	o := options(t)
	o.Status = func(context.Context) (lb.Status, error) {
		// The last row has a refused address.
		rows := []lb.ServiceStatus{{Service: "b", Port: 443}, {Service: "b", Port: 80}, {Service: "d"}, {Service: "b"}}
		return lb.Status{Services: rows}, nil
	}
	for _, waiting := range []struct {
		rows func() []lb.ServiceStatus
		want string
	}{
		{nil, "[{b 443} {b 80} {b 0} {d 0}]"},
		{func() []lb.ServiceStatus { return []lb.ServiceStatus{{Service: "a"}, {Service: "c"}} },
			"[{a 0} {b 443} {b 80} {b 0} {c 0} {d 0}]"},
	} {
		o.Waiting = waiting.rows
		w := ask(o, false, http.MethodGet, "/v1/services", "")
		var got []struct {
			Service string
			Port    int
		}
		err := json.Unmarshal(w.Body.Bytes(), &got)
		must.True(t, err == nil && fmt.Sprint(got) == waiting.want, "%v %v; want %s", got, err, waiting.want)
	}
	o.Waiting = func() []lb.ServiceStatus { return nil }
	o.Status = func(context.Context) (lb.Status, error) { return lb.Status{Services: []lb.ServiceStatus{}}, nil }
	code, body := get(t, o, "/v1/services")
	must.True(t, code == http.StatusOK && body == "[]", "without services: %d %s", code, body)
}

// A service proxy lists its rules, and knows the Services that have no VIP.
func TestRulesOfServiceProxy(t *testing.T) {
	o := options(t)
	const path = "/v1/services?scope=inside"
	code, body := get(t, o, path)
	must.True(t, code == http.StatusNotFound && strings.Contains(body, "nottheserviceproxy"), "%d %s", code, body)
	o.Rules = func() []lb.NodeRule {
		return []lb.NodeRule{{Name: "default/dns:udp", Addr: netip.MustParseAddr("10.96.0.1"), Port: 53,
			Protocol: lb.UDP, ClusterIP: true, Inside: lb.NodeChoice{
				Endpoints: []netip.AddrPort{netip.MustParseAddrPort("10.244.0.1:53")}}}}
	}
	code, body = get(t, o, path)
	want := `[{"service":"default/dns:udp","address":"10.96.0.1","port":53,"protocol":"udp","cluster_ip":true,` +
		`"inside":{"endpoints":["10.244.0.1:53"]}}]`
	must.True(t, code == http.StatusOK && body == want, "%d %s", code, body)
	code, body = get(t, o, "/v1/services?scope=node")
	must.True(t, code == http.StatusBadRequest, "%d %s", code, body)
	o.Flows = func(context.Context, lb.FlowFilter) ([]lb.FlowStatus, bool, error) { return nil, false, nil }
	o.Status = func(context.Context) (lb.Status, error) { return lb.Status{Settled: true}, nil }
	for name, want := range map[string]int{"default/dns": http.StatusOK, "default/web": http.StatusNotFound} {
		code, body = get(t, o, "/v1/flows?service="+name)
		must.True(t, code == want, "%s: %d %s", name, code, body)
	}
}

func TestFindingMetrics(t *testing.T) {
	want := map[string]float64{"verdict": 1, "build_info 0.1.0": 1, "drained": 2, "config_last_reload_successful": 0}
	must.Equal(t, want, gauges(t, NewFindingMetrics(func(context.Context) (Info, error) {
		return Info{Verdict: Degraded, Version: "0.1.0", LoadError: "line 3: no", DrainedServices: 2}, nil
	})))
}

// gauges returns the values of a collector, by the name without "steelyard_" and the values of the labels.
func gauges(t *testing.T, c prometheus.Collector) map[string]float64 {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	r.MustRegister(c)
	families := must.Get(r.Gather())(t)
	got := map[string]float64{}
	for _, f := range families {
		for _, x := range f.Metric {
			name := f.GetName()
			for _, l := range x.Label {
				name += " " + l.GetValue()
			}
			got[strings.TrimPrefix(name, "steelyard_")] = x.Gauge.GetValue()
		}
	}
	return got
}
