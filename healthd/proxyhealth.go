package healthd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/httplimit"
)

// ProxyHealthPort is the port of the health endpoints of a service proxy (kubernetes pkg/cluster/ports).
const ProxyHealthPort = 10256

// connections limits the total client connections to this node's health ports.
var connections = httplimit.New(512)

// syncTimeout is how long a datapath update may be pending before the service proxy is considered unhealthy: twice
// kube-proxy's sync period.
const syncTimeout = 60 * time.Second

// ProxyHealth serves the health port of a service proxy with kube-proxy's responses
// (pkg/proxy/healthcheck/proxy_health.go in Kubernetes 1.35). /healthz reports whether external load balancers may send
// traffic to the node; /livez reports whether the proxy works.
type ProxyHealth struct {
	// Addresses are the addresses to listen on, or empty for all.
	Addresses []netip.Prefix
	// Behind returns when the oldest pending datapath update was requested, or zero if there is none. It returns an
	// error if the proxy does not work.
	Behind func() (time.Time, error)
	// Applied reports whether the first complete state was applied. Until then /healthz fails. /livez does not, because
	// a slow start does not require a restart.
	Applied func() bool
	// Eligible reports whether the node may receive traffic from outside the cluster (KEP-3836): the Node exists and is
	// not being deleted.
	Eligible func() bool
	// Boundary wraps the handling of each request. It may be nil.
	Boundary *lb.Boundary
	Log      *slog.Logger

	serves atomic.Bool
}

// Serves reports whether Run has the port, which no other program has then.
func (p *ProxyHealth) Serves() bool { return p.serves.Load() }

// proxyResponse has kube-proxy's field names.
type proxyResponse struct {
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

func (p *ProxyHealth) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		eligible := p.Eligible()
		p.respond(w, &eligible, p.Applied())
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) { p.respond(w, nil, true) })
	return mux
}

// inTime reports whether no update has been pending for too long. behind is zero if none is pending.
func inTime(behind, now time.Time) bool { return behind.IsZero() || now.Sub(behind) < syncTimeout }

func (p *ProxyHealth) respond(w http.ResponseWriter, eligible *bool, applied bool) {
	now := time.Now().UTC()
	behind, err := p.Behind()
	a := proxyResponse{LastUpdated: now, CurrentTime: now, NodeEligible: eligible}
	a.Healthy = err == nil && applied && inTime(behind, now)
	good := a.Healthy && (eligible == nil || *eligible)
	if !good && !behind.IsZero() { // a healthy proxy is up to date
		a.LastUpdated = behind.UTC()
	}
	family := proxyFamily{LastUpdated: a.LastUpdated, Healthy: a.Healthy}
	a.Status = map[string]proxyFamily{"IPv4": family, "IPv6": family}
	body, err := json.Marshal(a)
	if err != nil {
		panic("healthd: " + err.Error()) // cannot happen: every field can be encoded
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if !good {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	w.Write(body)
}

// portRetry is the time between attempts to listen while the port is in use.
const portRetry = 5 * time.Second

// Run serves on Addresses until ctx ends. While the port is in use, it logs this once and retries.
func (p *ProxyHealth) Run(ctx context.Context) error {
	return p.run(ctx, func() (net.Listener, error) { return listenOn(p.Addresses, ProxyHealthPort) })
}

func (p *ProxyHealth) run(ctx context.Context, listen func() (net.Listener, error)) error {
	port := proxyPort{ProxyHealthPort, httplimit.Bounded(p.Boundary, p.Handler()), p.Log}
	return port.run(ctx, func() (net.Listener, error) {
		l, err := listen()
		p.serves.Store(err == nil)
		return l, err
	})
}

// proxyPort is a port on which every service proxy listens.
type proxyPort struct {
	number  int
	handler http.Handler
	log     *slog.Logger
}

func (p proxyPort) run(ctx context.Context, listen func() (net.Listener, error)) error {
	logged := false
	for {
		l, err := listen()
		if err == nil {
			return p.serve(ctx, l)
		}
		if !logged {
			p.log.Error("port of the service proxy not served", "port", p.number, "err", err,
				"fix", `stop the other service proxy, or set kubernetes.proxy = "kube-proxy"`)
			logged = true
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(portRetry):
		}
	}
}

func (p proxyPort) serve(ctx context.Context, l net.Listener) error {
	s := connections.Server(p.handler, p.log)
	stop := context.AfterFunc(ctx, func() { s.Close() })
	defer stop()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve port %d of the service proxy: %w", p.number, err)
	}
	return nil
}
