package lab

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
)

// serverHeader and clientHeader of an answer say who answered and whom it saw asking.
const (
	serverHeader = "X-Lab-Server"
	clientHeader = "X-Lab-Client"
)

// HTTPServer is a web server in a host. Every path answers with the server's name (with ?size=N, followed by N bytes)
// and counts, once it has all that the client sends; /healthz answers 200 or 503 and does not. Its methods may be called from any goroutine.
type HTTPServer struct {
	Name string
	s    service

	mu      sync.Mutex // guards what follows
	sick    bool
	clients map[netip.Addr]int
	probes  int
}

// ServeHTTP starts a web server that listens on addrs. It ends with the host, if not before.
func (h *Host) ServeHTTP(name string, addrs ...netip.AddrPort) (*HTTPServer, error) {
	w := &HTTPServer{Name: name, clients: map[netip.Addr]int{}}
	w.s = service{host: h, addrs: addrs, serve: func(l net.Listener) {
		srv := &http.Server{Handler: w, ReadHeaderTimeout: 10 * time.Second, ErrorLog: log.New(io.Discard, "", 0)}
		srv.Serve(l) // ends when the listener is closed; service closes the connections
	}}
	if err := w.Start(); err != nil {
		return nil, err
	}
	return w, h.own(&w.s)
}

// Start lets a stopped server listen again.
func (w *HTTPServer) Start() error { return w.s.start() }

// Stop takes the server away as a crash does: connections are reset and its ports refuse.
func (w *HTTPServer) Stop() error { return w.s.Close() }

// SetHealthy says what /healthz answers from now on: 200, or 503.
func (w *HTTPServer) SetHealthy(ok bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sick = !ok
}

// Requests returns how many requests were answered, not counting /healthz.
func (w *HTTPServer) Requests() int {
	n := 0
	for _, c := range w.Clients() {
		n += c
	}
	return n
}

// Clients returns how many requests came from each address, not counting /healthz.
func (w *HTTPServer) Clients() map[netip.Addr]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return maps.Clone(w.clients)
}

// Probes returns how many times /healthz was asked.
func (w *HTTPServer) Probes() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.probes
}

// Connections returns how many connections are open.
func (w *HTTPServer) Connections() int { return w.s.open() }

// ServeHTTP implements http.Handler.
func (w *HTTPServer) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	out.Header().Set(serverHeader, w.Name)
	out.Header().Set(clientHeader, r.RemoteAddr)
	w.mu.Lock()
	if r.URL.Path == "/healthz" {
		w.probes++
		sick := w.sick
		w.mu.Unlock()
		if sick {
			http.Error(out, w.Name+" is sick", http.StatusServiceUnavailable)
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
		io.CopyN(out, zeros{}, int64(size)) // a client that went away is no concern of the server
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}
