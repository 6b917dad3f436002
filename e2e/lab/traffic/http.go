package traffic

import (
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
)

// Response headers with the server's name, and the client's address and port as the server sees them.
const (
	serverHeader = "X-Lab-Server"
	clientHeader = "X-Lab-Client"
)

// HTTPServer is a web server on a host. It reads the request body, counts the request, and responds to every path with
// its name. With ?size=N, N bytes follow. /healthz responds with 200 or 503 and is not counted. Its methods may be
// called from any goroutine.
type HTTPServer struct {
	Name string
	l    listeners

	mu      sync.Mutex    // guards the following fields
	failing bool          // /healthz responds with 503
	delay   time.Duration // before each response
	clients map[netip.Addr]int
	probes  int
}

// ServeHTTP starts a web server on h that listens on addrs. It ends with the host, if not before.
func ServeHTTP(h *lab.Host, name string, addrs ...netip.AddrPort) (*HTTPServer, error) {
	w := &HTTPServer{Name: name, clients: map[netip.Addr]int{}}
	w.l = listeners{host: h, addrs: addrs, serve: func(l net.Listener) {
		srv := &http.Server{Handler: w, ReadHeaderTimeout: 10 * time.Second, ErrorLog: log.New(io.Discard, "", 0)}
		srv.Serve(l) // returns when the listener is closed; w.l closes the connections
	}}
	if err := w.Start(); err != nil {
		return nil, err
	}
	return w, h.Own(&w.l)
}

// Start makes a stopped server listen again.
func (w *HTTPServer) Start() error { return w.l.start() }

// Stop simulates a crash: connections are reset, and the ports refuse new ones.
func (w *HTTPServer) Stop() error { return w.l.Close() }

// SetHealthy sets the status of /healthz: 200 or 503.
func (w *HTTPServer) SetHealthy(ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failing = !ok
}

// SetDelay makes the server wait before each response.
func (w *HTTPServer) SetDelay(d time.Duration) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.delay = d
}

// Requests returns the number of answered requests, except for /healthz.
func (w *HTTPServer) Requests() int {
	n := 0
	for _, c := range w.Clients() {
		n += c
	}
	return n
}

// Clients returns the number of requests by client address, except for /healthz.
func (w *HTTPServer) Clients() map[netip.Addr]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.clients)
}

// Probes returns the number of requests for /healthz.
func (w *HTTPServer) Probes() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.probes
}

// Connections returns the number of open connections.
func (w *HTTPServer) Connections() int { return w.l.open() }

// ServeHTTP implements http.Handler.
func (w *HTTPServer) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	out.Header().Set(serverHeader, w.Name)
	out.Header().Set(clientHeader, r.RemoteAddr)
	w.mu.Lock()
	delay := w.delay
	w.mu.Unlock()
	time.Sleep(delay)
	w.mu.Lock()
	if r.URL.Path == "/healthz" {
		w.probes++
		failing := w.failing
		w.mu.Unlock()
		if failing {
			http.Error(out, w.Name+" is unhealthy", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(out, "ok")
		return
	}
	if from, err := netip.ParseAddrPort(r.RemoteAddr); err == nil {
		w.clients[from.Addr().Unmap()]++
	}
	w.mu.Unlock()
	if n, err := io.Copy(io.Discard, r.Body); err != nil || n != max(0, r.ContentLength) {
		http.Error(out, fmt.Sprintf("%d bytes, %v", n, err), http.StatusBadRequest)
		return
	}
	fmt.Fprintln(out, w.Name)
	if size, err := strconv.Atoi(r.URL.Query().Get("size")); err == nil && size > 0 {
		io.CopyN(out, zeros{}, int64(size)) // fails if the client closes the connection early
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}
