package cli

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// restart reports a configuration that would be rejected, and waits until the new agent is ready.
func TestRestart(t *testing.T) {
	var started atomic.Int64
	serve := func(restart func() error) string {
		socket := filepath.Join(t.TempDir(), "s")
		s := admin.New(admin.Options{
			Socket: socket, Restart: restart, Log: discard, Metrics: http.NotFoundHandler(),
			Status: func(context.Context) (lb.Status, error) { return lb.Status{Settled: started.Load() == 2}, nil },
			Peers:  func() []lb.PeerStatus { return nil },
			Info: func() admin.Info {
				return admin.Info{Version: fmt.Sprint("v", started.Load()), Started: time.Unix(started.Load(), 0)}
			},
		})
		l := must.Get(net.Listen("unix", socket))(t)
		h := &http.Server{Handler: s.Handler(true)}
		go h.Serve(l)
		t.Cleanup(func() { h.Close() })
		return socket
	}
	socket := serve(func() error { return errors.New("x.toml:1: first") })
	code, _, errOut := steelyard(t, "restart", "--socket", socket)
	if code != 1 || errOut != "x.toml:1: first\nrejected; the running agent goes on\n" {
		t.Errorf("code %d, stderr %q", code, errOut)
	}
	socket = serve(func() error {
		time.AfterFunc(150*time.Millisecond, func() { started.Store(1) })
		time.AfterFunc(300*time.Millisecond, func() { started.Store(2) })
		return nil
	})
	if code, out, errOut := steelyard(t, "restart", "--socket", socket); code != 0 || out != "restarted: version v2\n" {
		t.Errorf("code %d, stdout %q, stderr %q", code, out, errOut)
	}
}

// An agent of the first release does not know the request.
func TestRestartOfAnEarlierRelease(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	l := must.Get(net.Listen("unix", socket))(t)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"version": "v0.1"}`)
	})
	h := &http.Server{Handler: mux}
	go h.Serve(l)
	t.Cleanup(func() { h.Close() })
	code, _, errOut := steelyard(t, "restart", "--socket", socket)
	const want = "the running agent (v0.1) is of an earlier release, which cannot replace itself: end it"
	if code != 1 || !strings.Contains(errOut, want) {
		t.Errorf("code %d, stderr %q; want %q", code, errOut, want)
	}
}
