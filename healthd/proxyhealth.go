package healthd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// ProxyHealthPort is where a service proxy tells its health (pkg/cluster/ports in Kubernetes).
const ProxyHealthPort = 10256

// stuck is after how long a service proxy is not healthy any more that does not get done what it is to do: twice the period of
// kube-proxy's syncs.
const stuck = 60 * time.Second

// ProxyHealth answers at the health port of a service proxy as kube-proxy does (pkg/proxy/healthcheck/proxy_health.go in
// Kubernetes 1.35): /healthz says whether balancers outside the cluster are to send traffic to the node, /livez whether the
// proxy works.
type ProxyHealth struct {
	// Behind returns since when the kernel lacks something that it is to have; zero: it has all. An error: the proxy does not work.
	Behind func() (time.Time, error)
	// Eligible reports whether the node is to get traffic from outside the cluster (KEP-3836): it exists and stays.
	Eligible func() bool
	Log      *slog.Logger
}

// proxyAnswer has kube-proxy's names.
type proxyAnswer struct {
	LastUpdated  time.Time              `json:"lastUpdated"`
	CurrentTime  time.Time              `json:"currentTime"`
	NodeEligible *bool                  `json:"nodeEligible,omitempty"`
	Healthy      bool                   `json:"healthy"`
	Status       map[string]proxyFamily `json:"status"`
}

type proxyFamily struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// Handler answers /healthz and /livez.
func (p *ProxyHealth) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		eligible := p.Eligible()
		p.answer(w, &eligible)
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) { p.answer(w, nil) })
	return mux
}

func (p *ProxyHealth) answer(w http.ResponseWriter, eligible *bool) {
	now := time.Now().UTC()
	behind, err := p.Behind()
	a := proxyAnswer{LastUpdated: now, CurrentTime: now, NodeEligible: eligible}
	a.Healthy = err == nil && (behind.IsZero() || now.Sub(behind) < stuck)
	good := a.Healthy && (eligible == nil || *eligible)
	if !good && !behind.IsZero() { // when all is well, now is when it was last updated
		a.LastUpdated = behind.UTC()
	}
	family := proxyFamily{LastUpdated: a.LastUpdated, Healthy: a.Healthy}
	a.Status = map[string]proxyFamily{"IPv4": family, "IPv6": family}
	body, err := json.Marshal(a)
	if err != nil {
		panic("healthd: " + err.Error()) // there is nothing in it that could fail
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if !good {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	w.Write(body)
}

// portRetry is when a port that somebody has is tried again.
const portRetry = 5 * time.Second

// Run answers on every address of the node until ctx ends. While somebody else has the port it says so and tries again.
func (p *ProxyHealth) Run(ctx context.Context) error {
	said := false
	for {
		l, err := net.Listen("tcp", fmt.Sprintf(":%d", ProxyHealthPort))
		if err == nil {
			return p.serve(ctx, l)
		}
		if !said {
			p.Log.Error("health of the service proxy not served", "port", ProxyHealthPort, "err", err,
				"fix", `end the other service proxy, or set kubernetes.proxy = "kube-proxy"`)
			said = true
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(portRetry):
		}
	}
}

func (p *ProxyHealth) serve(ctx context.Context, l net.Listener) error {
	s := &http.Server{Handler: p.Handler(), ReadHeaderTimeout: 5 * time.Second, ErrorLog: slog.NewLogLogger(p.Log.Handler(), slog.LevelDebug)}
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve the health of the service proxy: %w", err)
	}
	return nil
}
