package admin

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestTraceHandler(t *testing.T) {
	packet := lb.TraceEvent{Packet: &lb.TracedPacket{Interface: "eth0", Reason: "no_flow"}}
	for name, tt := range map[string]struct {
		writable    bool
		query       string
		err         error
		code        int
		want        string // in the body
		wantsFilter lb.TraceFilter
	}{
		"all": {true, "", nil, 200, "data: {}\n\ndata: {\"packet\":{", lb.TraceFilter{}},
		"filters": {true, "client=192.0.2.7&vip=203.0.113.10&service=web&drops=true", nil, 200, `"reason":"no_flow"`,
			lb.TraceFilter{Client: netip.MustParseAddr("192.0.2.7"), VIP: vip, Service: "web", Drops: true}},
		"left out":           {true, "", nil, 200, "data: {\"over_limit\":3}\n\n", lb.TraceFilter{}},
		"another trace":      {true, "", lb.ErrTracing, 409, "another trace is running", lb.TraceFilter{}},
		"another error":      {true, "", errors.New("no program"), 500, "no program", lb.TraceFilter{}},
		"an unknown service": {true, "service=wep", nil, 404, `there is no service`, lb.TraceFilter{}},
		"no VIP":             {true, "vip=203.0.113.99", nil, 404, "no service has the address", lb.TraceFilter{}},
		"any address":        {true, "client=::", nil, 400, "not the address of a host", lb.TraceFilter{}},
		"with a zone":        {true, "client=fe80::1%25eth0", nil, 400, "without %eth0", lb.TraceFilter{}},
		"not an address":     {true, "client=web", nil, 400, "not an IP address", lb.TraceFilter{}},
		"an unknown filter":  {true, "port=80", nil, 400, "allowed: client, vip, service, drops", lb.TraceFilter{}},
		"over TCP":           {false, "", nil, 404, "not found", lb.TraceFilter{}},
	} {
		t.Run(name, func(t *testing.T) {
			o := options(t)
			o.Trace = func(_ context.Context, f lb.TraceFilter, emit func([]lb.TraceEvent) error) error {
				must.Equal(t, tt.wantsFilter, f)
				if tt.err != nil {
					return tt.err
				}
				return errors.Join(emit(nil), emit([]lb.TraceEvent{packet, {OverLimit: 3}}), emit(nil))
			}
			server := httptest.NewServer(New(o).Handler(tt.writable))
			defer server.Close()
			resp := must.Get(http.Get(server.URL + "/v1/trace?" + tt.query))(t)
			defer resp.Body.Close()
			body := string(must.Get(io.ReadAll(resp.Body))(t))
			must.True(t, resp.StatusCode == tt.code && strings.Contains(body, tt.want), "%d %s; want %d %s",
				resp.StatusCode, body, tt.code, tt.want)
		})
	}
}

// Services and addresses of the service proxy are known as well, and with node ports each address.
func TestTraceOfServiceProxy(t *testing.T) {
	rule := lb.NodeRule{Name: "default/dns:udp", Addr: netip.MustParseAddr("10.96.0.10")}
	port := lb.NodeRule{Name: "default/web:http", Addr: netip.IPv4Unspecified()}
	for _, tt := range []struct {
		filter lb.TraceFilter
		rules  []lb.NodeRule
		known  bool
	}{
		{lb.TraceFilter{Service: "default/dns"}, []lb.NodeRule{rule}, true},
		{lb.TraceFilter{Service: "default/dns"}, nil, false},
		{lb.TraceFilter{VIP: rule.Addr}, []lb.NodeRule{rule}, true},
		{lb.TraceFilter{VIP: netip.MustParseAddr("192.0.2.9")}, []lb.NodeRule{rule}, false},
		{lb.TraceFilter{VIP: netip.MustParseAddr("192.0.2.9")}, []lb.NodeRule{rule, port}, true},
	} {
		err := unknown(tt.filter, nil, tt.rules)
		must.True(t, (err == nil) == tt.known, "%+v: %v", tt.filter, err)
	}
}

// An error that ends a trace is its last event.
func TestTraceFails(t *testing.T) {
	o := options(t)
	o.Trace = func(_ context.Context, _ lb.TraceFilter, emit func([]lb.TraceEvent) error) error {
		return errors.Join(emit(nil), errors.New("no ring"))
	}
	server := httptest.NewServer(New(o).Handler(true))
	defer server.Close()
	resp := must.Get(http.Get(server.URL + "/v1/trace"))(t)
	defer resp.Body.Close()
	must.Equal(t, "data: {}\n\ndata: {\"error\":\"no ring\"}\n\n", string(must.Get(io.ReadAll(resp.Body))(t)))
}
