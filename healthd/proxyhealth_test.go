package healthd

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http/httptest"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The cases are those of kube-proxy (pkg/proxy/healthcheck/healthcheck_test.go).
func TestProxyHealth(t *testing.T) {
	for _, tt := range []struct {
		name            string
		behind          time.Duration
		err             error
		eligible        bool
		starting        bool
		healthz, livez  int
		healthy, recent bool
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

// An update that is pending for exactly a minute is too late.
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

// While the port is in use Run logs that once, retries every 5 s, and then serves until its context ends.
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
		if n := strings.Count(out.String(), "proxy health port not served"); n != 1 {
			t.Errorf("logged %d times; want once: %s", n, &out)
		}
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
		must.Equal(t, "serve the proxy health port: broken", fmt.Sprint(err))
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
