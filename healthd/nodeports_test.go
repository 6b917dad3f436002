package healthd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// With Addresses, the ports are open only there.
func TestHealthAddresses(t *testing.T) {
	n := NewNodePorts(nil, nil, slog.New(slog.DiscardHandler))
	n.Addresses = []netip.Prefix{netip.MustParsePrefix("2001:db8:dead::/48"), netip.MustParsePrefix("127.0.0.0/8")}
	l := listen(t)
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	l.Close()
	dial := func(host string) error {
		c, err := net.Dial("tcp", net.JoinHostPort(host, fmt.Sprint(port)))
		if err == nil {
			c.Close()
		}
		return err
	}
	must.Do(t, n.Serve("default/web", port, 1, false))
	must.Do(t, dial("127.0.0.1"))
	for _, other := range []string{"127.0.0.2", "::1"} {
		must.True(t, dial(other) != nil, "%s is open", other)
	}
	n.Stop("default/web")
	must.True(t, dial("127.0.0.1") != nil, "the port is open after Stop")
	n.Addresses = n.Addresses[:1]
	err := n.Serve("default/web", port, 1, false)
	must.True(t, err != nil, "a node without such an address serves")
}

// The responses match kube-proxy's, byte for byte.
func TestNodePorts(t *testing.T) {
	var behind time.Duration
	var broken error
	inForce := true
	n := NewNodePorts(func() (time.Time, error) {
		if behind == 0 {
			return time.Time{}, broken
		}
		return time.Now().Add(-behind), broken
	}, func(service string) bool { return inForce && service == "default/web" }, slog.New(slog.DiscardHandler))
	l := listen(t)
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	err := n.Serve("default/web", port, 1, false)
	must.True(t, err != nil, "Serve succeeded on a port in use")
	l.Close()
	for _, tt := range []struct {
		endpoints      int
		behind         time.Duration
		broken         error
		inForce, other bool
		status         int
		healthy        bool
	}{
		{2, 0, nil, true, false, 200, true},
		{0, 0, nil, true, false, 503, true},
		{2, 59 * time.Second, nil, true, false, 200, true},
		{2, time.Minute, nil, true, false, 503, false},
		{2, 0, errors.New("no response"), true, false, 503, false},
		{2, 0, nil, false, false, 503, false}, // the datapath does not serve the Service yet
		{2, 0, nil, false, true, 200, true},   // another program does
		{2, time.Minute, nil, false, true, 503, false},
	} {
		behind, broken, inForce = tt.behind, tt.broken, tt.inForce
		must.Do(t, n.Serve("default/web", port, tt.endpoints, tt.other))
		for _, request := range []struct{ method, at string }{{"GET", "127.0.0.1"}, {"POST", "[::1]"}} {
			req := must.Get(http.NewRequest(request.method, fmt.Sprintf("http://%s:%d/any", request.at, port), nil))(t)
			resp := must.Get(http.DefaultClient.Do(req))(t)
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			want := fmt.Sprintf("{\n\t\"service\": {\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t},\n"+
				"\t\"localEndpoints\": %d,\n\t\"serviceProxyHealthy\": %t\n}", tt.endpoints, tt.healthy)
			must.True(t, err == nil && resp.StatusCode == tt.status && string(body) == want,
				"%d, %v\n%s\nwant %d\n%s", resp.StatusCode, err, body, tt.status, want)
			for name, want := range map[string]string{
				"Content-Type": "application/json", "X-Content-Type-Options": "nosniff",
				"X-Load-Balancing-Endpoint-Weight": fmt.Sprint(tt.endpoints),
			} {
				must.Row(t, name, want, resp.Header.Get(name))
			}
		}
	}
	n.Stop("default/web")
	if c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
		c.Close()
		t.Error("the port is still open")
	}
}

// freePorts returns n ports without listeners.
func freePorts(t *testing.T, n int) []uint16 {
	t.Helper()
	var ports []uint16
	for range n {
		l := must.Get(net.Listen("tcp", ":0"))(t)
		defer l.Close()
		ports = append(ports, uint16(l.Addr().(*net.TCPAddr).Port))
	}
	return ports
}

func isOpen(port uint16) bool {
	c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err == nil {
		c.Close()
	}
	return err == nil
}

// A changed port replaces the old one, an unchanged port stays open, and Run closes all ports when it ends.
func TestNodePortsChange(t *testing.T) {
	var out bytes.Buffer
	n := NewNodePorts(nil, nil, slog.New(slog.NewTextHandler(&out, nil)))
	stop := must.Run(t, n.Run)
	p := freePorts(t, 3)
	serve := func(service string, port uint16) *http.Server {
		t.Helper()
		must.Do(t, n.Serve(service, port, 1, false))
		return n.services[service].server
	}
	first := serve("default/web", p[0])
	must.Equal(t, 5*time.Second, first.ReadHeaderTimeout)
	must.True(t, serve("default/web", p[0]) == first, "the same port was opened again")
	serve("default/api", p[2])
	serve("default/web", p[1])
	for i, want := range []bool{false, true, true} {
		must.Row(t, fmt.Sprintf("port %d of 3 is open", i+1), want, isOpen(p[i]))
	}
	n.Stop("default/unknown")
	stop()
	for i := range p {
		must.True(t, !isOpen(p[i]), "port %d of 3 is open after Run", i+1)
	}
	n.Stop("default/api") // Run has released its lock
	must.True(t, out.Len() == 0, "logged %s", &out)
}

// The cases are kube-proxy's (pkg/proxy/healthcheck/healthcheck_test.go).
func TestProxyHealth(t *testing.T) {
	for _, tt := range []struct {
		name               string
		behind             time.Duration
		err                error
		eligible, starting bool
		healthz, livez     int
		healthy, recent    bool
	}{
		{"up to date", 0, nil, true, false, 200, 200, true, true},
		{"update pending for 30 s", 30 * time.Second, nil, true, false, 200, 200, true, true},
		{"update pending for 61 s", 61 * time.Second, nil, true, false, 503, 503, false, false},
		{"update pending for 59 s", 59 * time.Second, nil, true, false, 200, 200, true, true},
		{"node being deleted", 0, nil, false, false, 503, 200, true, true},
		{"nothing applied yet", 0, nil, true, true, 503, 200, true, true},
		{"engine error", 0, errors.New("no response"), true, false, 503, 503, false, true},
	} {
		p := &ProxyHealth{
			Applied: func() bool { return !tt.starting }, Eligible: func() bool { return tt.eligible },
			Behind: func() (time.Time, error) {
				if tt.behind == 0 {
					return time.Time{}, tt.err
				}
				return time.Now().Add(-tt.behind), tt.err
			},
		}
		for path, want := range map[string]int{"/healthz": tt.healthz, "/livez": tt.livez, "/": 404} {
			r := httptest.NewRecorder()
			p.Handler().ServeHTTP(r, httptest.NewRequest("GET", path, nil))
			must.True(t, r.Code == want, "%s: %s: %d; want %d", tt.name, path, r.Code, want)
			if path == "/" {
				continue
			}
			var got map[string]any
			if err := json.Unmarshal(r.Body.Bytes(), &got); err != nil {
				t.Errorf("%s: %s: %v in %s", tt.name, path, err, r.Body)
				continue
			}
			eligible, present := got["nodeEligible"]
			healthy := tt.healthy && !(tt.starting && path == "/healthz")
			if present != (path == "/healthz") || present && eligible != tt.eligible || got["healthy"] != healthy {
				t.Errorf("%s: %s: %s", tt.name, path, r.Body)
			}
			family := got["status"].(map[string]any)["IPv6"].(map[string]any)
			for _, at := range []any{got["lastUpdated"], family["lastUpdated"]} {
				updated, err := time.Parse(time.RFC3339, at.(string))
				must.True(t, err == nil && time.Since(updated) < 10*time.Second == tt.recent,
					"%s: %s: last updated %v, %v", tt.name, path, at, err)
			}
			h := r.Header()
			must.True(t, h.Get("Content-Type") == "application/json" && h.Get("X-Content-Type-Options") == "nosniff",
				"%s: %s: headers %v", tt.name, path, h)
		}
	}
}

// An update pending for exactly one minute is overdue.
func TestSyncTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begin := time.Now()
		p := &ProxyHealth{Behind: func() (time.Time, error) { return begin, nil }}
		for _, want := range []int{200, 503} {
			r := httptest.NewRecorder()
			p.Handler().ServeHTTP(r, httptest.NewRequest("GET", "/livez", nil))
			must.True(t, r.Code == want, "after %s: %d; want %d", time.Since(begin), r.Code, want)
			time.Sleep(time.Minute - time.Since(begin))
		}
	})
	must.Equal(t, 10256, ProxyHealthPort)
}

// While the port is in use, Run logs this once and retries every 5 s. It then serves until its context ends.
func TestProxyHealthRetries(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		p := &ProxyHealth{Log: slog.New(slog.NewTextHandler(&out, nil))}
		begin, l := time.Now(), &listener{closed: make(chan struct{})}
		var tries []time.Duration
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() {
			done <- p.run(ctx, func() (net.Listener, error) {
				if tries = append(tries, time.Since(begin)); len(tries) < 3 {
					return nil, syscall.EADDRINUSE
				}
				return l, nil
			})
		}()
		time.Sleep(time.Minute)
		synctest.Wait()
		must.Equal(t, []time.Duration{0, 5 * time.Second, 10 * time.Second}, tries)
		n := strings.Count(out.String(), "port of the service proxy not served")
		must.True(t, n == 1, "logged %d times; want once: %s", n, &out)
		cancel()
		must.Do(t, <-done)
	})
}

func TestProxyHealthEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &ProxyHealth{Log: slog.New(slog.DiscardHandler)}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		must.Do(t, p.run(ctx, func() (net.Listener, error) { return nil, syscall.EADDRINUSE }))
		broken := &listener{closed: make(chan struct{}), err: errors.New("broken")}
		err := p.run(t.Context(), func() (net.Listener, error) { return broken, nil })
		must.Equal(t, "serve port 10256 of the service proxy: broken", fmt.Sprint(err))
	})
}

// listener accepts nothing until it is closed, or fails with err.
type listener struct {
	closed chan struct{}
	once   sync.Once
	err    error
}

func (l *listener) Accept() (net.Conn, error) {
	if l.err == nil {
		<-l.closed
		return nil, net.ErrClosed
	}
	return nil, l.err
}

func (l *listener) Close() error   { l.once.Do(func() { close(l.closed) }); return nil }
func (l *listener) Addr() net.Addr { return &net.TCPAddr{} }
