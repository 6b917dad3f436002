package healthd

import (
	"encoding/json"
	"errors"
	"net/http/httptest"
	"testing"
	"time"
)

// The cases are those of kube-proxy (pkg/proxy/healthcheck/healthcheck_test.go).
func TestProxyHealth(t *testing.T) {
	for _, tt := range []struct {
		name            string
		behind          time.Duration
		err             error
		eligible        bool
		healthz, livez  int
		healthy, recent bool
	}{
		{"all is well", 0, nil, true, 200, 200, true, true},
		{"busy", 30 * time.Second, nil, true, 200, 200, true, true},
		{"stuck", 61 * time.Second, nil, true, 503, 503, false, false},
		{"the node goes", 0, nil, false, 503, 200, true, true},
		{"does not answer", 0, errors.New("no answer"), true, 503, 503, false, true},
	} {
		p := &ProxyHealth{Eligible: func() bool { return tt.eligible }, Behind: func() (time.Time, error) {
			if tt.behind == 0 {
				return time.Time{}, tt.err
			}
			return time.Now().Add(-tt.behind), tt.err
		}}
		for path, want := range map[string]int{"/healthz": tt.healthz, "/livez": tt.livez, "/": 404} {
			r := httptest.NewRecorder()
			p.Handler().ServeHTTP(r, httptest.NewRequest("GET", path, nil))
			if r.Code != want {
				t.Errorf("%s: %s: %d; want %d", tt.name, path, r.Code, want)
			}
			if path == "/" {
				continue
			}
			var got map[string]any
			if err := json.Unmarshal(r.Body.Bytes(), &got); err != nil {
				t.Errorf("%s: %s: %v in %s", tt.name, path, err, r.Body)
				continue
			}
			eligible, told := got["nodeEligible"]
			if told != (path == "/healthz") || told && eligible != tt.eligible || got["healthy"] != tt.healthy {
				t.Errorf("%s: %s: %s", tt.name, path, r.Body)
			}
			for _, at := range []any{got["lastUpdated"], got["status"].(map[string]any)["IPv6"].(map[string]any)["lastUpdated"]} {
				updated, err := time.Parse(time.RFC3339, at.(string))
				if err != nil || time.Since(updated) < 10*time.Second != tt.recent {
					t.Errorf("%s: %s: last updated %v, %v", tt.name, path, at, err)
				}
			}
			if r.Header().Get("Content-Type") != "application/json" || r.Header().Get("X-Content-Type-Options") != "nosniff" {
				t.Errorf("%s: %s: headers %v", tt.name, path, r.Header())
			}
		}
	}
}
