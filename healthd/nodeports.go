package healthd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/httplimit"
)

// NodePorts serves health check node ports. The responses match kube-proxy's byte for byte
// (pkg/proxy/healthcheck/service_health.go in Kubernetes 1.35), because external load balancers rely on them to learn
// whether a node has endpoints of a Service.
type NodePorts struct {
	// Addresses are the addresses to listen on, or empty for all. Set them before the first call of Serve.
	Addresses []netip.Prefix
	behind    func() (time.Time, error) // as in ProxyHealth
	inForce   func(service string) bool // whether the datapath serves a Service
	log       *slog.Logger
	// Boundary wraps the handling of each request. Set it before the first call of Serve. It may be nil.
	Boundary *lb.Boundary

	mu       sync.Mutex // guards services
	services map[string]*nodePort
}

type nodePort struct {
	port     uint16
	listener net.Listener
	server   *http.Server

	mu        sync.Mutex // guards endpoints and other
	endpoints int
	other     bool // another program serves the Service
}

// NewNodePorts returns NodePorts without listeners. They call behind and inForce for each request. behind returns when
// the oldest pending datapath update was requested, or an error if the engine does not respond. inForce reports whether
// the datapath serves a Service.
func NewNodePorts(
	behind func() (time.Time, error), inForce func(service string) bool, log *slog.Logger,
) *NodePorts {
	return &NodePorts{behind: behind, inForce: inForce, log: log, services: map[string]*nodePort{}}
}

// healthy reports whether the proxy may receive traffic for a Service: the datapath or another program serves it, and
// no update is overdue.
func (n *NodePorts) healthy(service string, other bool) bool {
	behind, err := n.behind()
	return err == nil && inTime(behind, time.Now()) && (other || n.inForce(service))
}

// Serve listens for a Service, "namespace/name", on the node's Addresses and responds with its number of ready local
// endpoints. other says that another program, not the datapath, serves the Service. Later calls update these values or
// the port. Serve fails if the port is in use; call it again to retry.
func (n *NodePorts) Serve(service string, port uint16, endpoints int, other bool) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	p := n.services[service]
	if p != nil && p.port != port {
		n.stop(service)
		p = nil
	}
	if p == nil {
		l, err := listenOn(n.Addresses, port)
		if err != nil {
			return err
		}
		p = &nodePort{port: port, listener: l}
		p.server = connections.Server(httplimit.Bounded(n.Boundary, n.handler(service, p)), n.log)
		n.services[service] = p
		go func() {
			if err := p.server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				n.log.Error("health check node port not served", "service", service, "port", port, "err", err)
			}
		}()
	}
	p.mu.Lock()
	p.endpoints, p.other = endpoints, other
	p.mu.Unlock()
	return nil
}

func (n *NodePorts) Stop(service string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.stop(service)
}

func (n *NodePorts) stop(service string) {
	if p := n.services[service]; p != nil {
		// Errors do not matter here. A server that is not serving yet does not close its listener.
		p.server.Close()
		p.listener.Close()
		delete(n.services, service)
	}
}

// Run waits until ctx ends and then closes every port.
func (n *NodePorts) Run(ctx context.Context) error {
	<-ctx.Done()
	n.mu.Lock()
	defer n.mu.Unlock()
	for service := range n.services {
		n.stop(service)
	}
	return nil
}

const nodePortResponse = `{
	"service": {
		"namespace": %q,
		"name": %q
	},
	"localEndpoints": %d,
	"serviceProxyHealthy": %t
}`

func (n *NodePorts) handler(service string, p *nodePort) http.HandlerFunc {
	namespace, name, _ := strings.Cut(service, "/")
	return func(w http.ResponseWriter, _ *http.Request) {
		p.mu.Lock()
		endpoints, other := p.endpoints, p.other
		p.mu.Unlock()
		healthy := n.healthy(service, other)
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(endpoints))
		if endpoints == 0 || !healthy {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		fmt.Fprintf(w, nodePortResponse, namespace, name, endpoints, healthy)
	}
}
