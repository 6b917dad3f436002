package lb

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestFlowFilterSet(t *testing.T) {
	const notPort, notLimit = "want a decimal number from 0 to 65535", "want a decimal number, 0 or more"
	for _, tt := range []struct{ name, value, want, err string }{
		{"scope", "node", "{node  invalid Prefix invalid IP invalid IP 0  0}", ""},
		{"scope", "in", "", `scope "in": allowed: outside, inside, node`},
		{"service", "web", "{ web invalid Prefix invalid IP invalid IP 0  0}", ""},
		{"client", "198.51.100.7", "{  198.51.100.7/32 invalid IP invalid IP 0  0}", ""},
		{"client", "198.51.100.7/24", "{  198.51.100.0/24 invalid IP invalid IP 0  0}", ""},
		{"client", "2001:db8::7", "{  2001:db8::7/128 invalid IP invalid IP 0  0}", ""},
		{"client", "me", "", `client "me": neither an IP address nor a prefix`},
		{"client", "300.1.1.1", "", `client "300.1.1.1": neither an IP address nor a prefix`},
		{"backend", "10.0.0", "", `backend "10.0.0": not an IP address`},
		{"address", "web", "", `address "web": not an IP address`},
		{"backend", "10.0.0.1", "{  invalid Prefix 10.0.0.1 invalid IP 0  0}", ""},
		{"address", "203.0.113.10", "{  invalid Prefix invalid IP 203.0.113.10 0  0}", ""},
		{"state", "closing", "{  invalid Prefix invalid IP invalid IP 0 closing 0}", ""},
		{"state", "open", "", `state "open": allowed: half-open, established, closing, closed`},
		{"port", "80", "{  invalid Prefix invalid IP invalid IP 80  0}", ""},
		{"port", "65535", "{  invalid Prefix invalid IP invalid IP 65535  0}", ""},
		{"port", "65536", "", `port "65536": ` + notPort},
		{"port", "0x50", "", `port "0x50": ` + notPort},
		{"port", "80x", "", `port "80x": ` + notPort},
		{"port", "-1", "", `port "-1": ` + notPort},
		{"port", " 80", "", `port " 80": ` + notPort},
		{"port", "8_0", "", `port "8_0": ` + notPort},
		{"port", "", "", `port "": ` + notPort},
		{"limit", "0", "{  invalid Prefix invalid IP invalid IP 0  0}", ""},
		{"limit", "100", "{  invalid Prefix invalid IP invalid IP 0  100}", ""},
		{"limit", "0x10", "", `limit "0x10": ` + notLimit},
		{"limit", "10x", "", `limit "10x": ` + notLimit},
		{"limit", "-1", "", `limit "-1": ` + notLimit},
		{"limit", "", "", `limit "": ` + notLimit},
		{"colour", "red", "",
			`unknown filter "colour"; allowed: scope, service, client, backend, address, port, state, limit`},
	} {
		t.Run(tt.name+"="+tt.value, func(t *testing.T) {
			var f FlowFilter
			switch err := f.Set(tt.name, tt.value); {
			case tt.err != "":
				must.Equal(t, tt.err, fmt.Sprint(err))
			case err != nil:
				t.Error(err)
			case fmt.Sprint(f) != tt.want:
				t.Errorf("filter %v; want %s", f, tt.want)
			}
		})
	}
}

// A flow that differs from the filter in any one field does not match.
func TestFlowFilterMatch(t *testing.T) {
	flow := FlowStatus{
		Scope: ScopeInside, Service: "web", Client: netip.MustParseAddrPort("198.51.100.7:1234"),
		Address: netip.MustParseAddr("203.0.113.10"), Port: 80, Protocol: TCP,
		Backend: netip.MustParseAddrPort("10.0.0.1:8080"), State: FlowEstablished,
	}
	for _, tt := range []struct{ name, same, other string }{
		{"scope", "inside", "node"},
		{"service", "web", "mail"},
		{"client", "198.51.100.0/24", "198.51.101.0/24"},
		{"backend", "10.0.0.1", "10.0.0.2"},
		{"address", "203.0.113.10", "203.0.113.11"},
		{"port", "80", "81"},
		{"state", "established", "closed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for value, want := range map[string]bool{tt.same: true, tt.other: false} {
				var f FlowFilter
				must.Do(t, f.Set(tt.name, value))
				must.Row(t, value, want, f.Match(flow))
			}
		})
	}
	must.True(t, (FlowFilter{}).Match(flow), "the zero filter does not match; want every flow")
}
