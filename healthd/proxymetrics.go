package healthd

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/httplimit"
)

// ProxyMetricsPort is the port on which a service proxy answers programs of its node (kubernetes pkg/cluster/ports).
const ProxyMetricsPort = 10249

// proxyMode is the response to /proxyMode. Kubernetes' proxy names what it puts its rules into, such as "nftables".
const proxyMode = "steelyard"

// ProxyMetrics serves what kube-proxy serves on 127.0.0.1 (cmd/kube-proxy/app/server.go in Kubernetes 1.35): /metrics,
// /proxyMode, and /healthz, which reports only that the process responds.
type ProxyMetrics struct {
	Metrics  http.Handler
	Boundary *lb.Boundary // wraps the handling of each request; may be nil
	Log      *slog.Logger
}

func (p *ProxyMetrics) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", p.Metrics)
	for path, text := range map[string]string{"/healthz": "ok", "/proxyMode": proxyMode} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/plain; charset=utf-8")
			w.Header().Set("X-Content-Type-Options", "nosniff")
			io.WriteString(w, text)
		})
	}
	return mux
}

// Run serves until ctx ends. While the port is in use, it logs this once and retries.
func (p *ProxyMetrics) Run(ctx context.Context) error {
	port := proxyPort{ProxyMetricsPort, httplimit.Bounded(p.Boundary, p.Handler()), p.Log}
	return port.run(ctx, func() (net.Listener, error) {
		return net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port.number)))
	})
}
