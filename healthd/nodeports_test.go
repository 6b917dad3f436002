package healthd

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// With Addresses, the ports are open there only.
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
	if err := n.Serve("default/web", port, 1, false); err == nil {
		t.Error("a node without such an address serves")
	}
}

// The responses are those of kube-proxy, byte by byte.
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
	if err := n.Serve("default/web", port, 1, false); err == nil {
		t.Error("Serve succeeded on a port in use")
	}
	l.Close()
	for _, tt := range []struct {
		endpoints int
		behind    time.Duration
		broken    error
		inForce   bool
		other     bool
		status    int
		healthy   bool
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
			req, err := http.NewRequest(request.method, fmt.Sprintf("http://%s:%d/any/path", request.at, port), nil)
			must.Do(t, err)
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

// freePorts returns n ports on which nothing listens.
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

// A changed port replaces the old one, the same port stays open, and the end of Run closes all.
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
		if got := isOpen(p[i]); got != want {
			t.Errorf("port %d of 3 is open: %t; want %t", i+1, got, want)
		}
	}
	n.Stop("default/unknown")
	stop()
	for i := range p {
		must.True(t, !isOpen(p[i]), "port %d of 3 is open after Run", i+1)
	}
	n.Stop("default/api") // Run has released its lock
	must.True(t, out.Len() == 0, "logged %s", &out)
}
