package healthd

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"testing"
)

// What kube-proxy answers, to the byte.
func TestNodePorts(t *testing.T) {
	healthy := true
	n := NewNodePorts(func() bool { return healthy }, slog.New(slog.DiscardHandler))
	l := listen(t)
	port := uint16(l.Addr().(*net.TCPAddr).Port)
	if err := n.Serve("default/web", port, 1); err == nil {
		t.Error("a port that somebody else has was served")
	}
	l.Close()
	for _, tt := range []struct {
		endpoints int
		healthy   bool
		status    int
	}{{2, true, 200}, {0, true, 503}, {2, false, 503}} {
		healthy = tt.healthy
		if err := n.Serve("default/web", port, tt.endpoints); err != nil {
			t.Fatal(err)
		}
		for _, ask := range []struct{ method, at string }{{"GET", "127.0.0.1"}, {"POST", "[::1]"}} {
			req, err := http.NewRequest(ask.method, fmt.Sprintf("http://%s:%d/any/path", ask.at, port), nil)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			want := fmt.Sprintf("{\n\t\"service\": {\n\t\t\"namespace\": \"default\",\n\t\t\"name\": \"web\"\n\t},\n\t\"localEndpoints\": %d,\n\t\"serviceProxyHealthy\": %t\n}", tt.endpoints, tt.healthy)
			if err != nil || resp.StatusCode != tt.status || string(body) != want {
				t.Errorf("%d, %v\n%s\nwant %d\n%s", resp.StatusCode, err, body, tt.status, want)
			}
			for name, want := range map[string]string{
				"Content-Type": "application/json", "X-Content-Type-Options": "nosniff", "X-Load-Balancing-Endpoint-Weight": fmt.Sprint(tt.endpoints),
			} {
				if got := resp.Header.Get(name); got != want {
					t.Errorf("%s: %q; want %q", name, got, want)
				}
			}
		}
	}
	n.Stop("default/web")
	if c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
		c.Close()
		t.Error("the port is still open")
	}
}
