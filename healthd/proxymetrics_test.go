package healthd

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Programs of the node find what kube-proxy serves there.
func TestProxyMetrics(t *testing.T) {
	p := &ProxyMetrics{Metrics: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "kubeproxy_x 1")
	})}
	for path, want := range map[string]string{
		"/metrics": "kubeproxy_x 1", "/healthz": "ok", "/proxyMode": "steelyard", "/": "404 page not found\n",
	} {
		r := httptest.NewRecorder()
		p.Handler().ServeHTTP(r, httptest.NewRequest("GET", path, nil))
		must.Row(t, path, want, r.Body.String())
	}
	must.Equal(t, 10249, ProxyMetricsPort)
}
