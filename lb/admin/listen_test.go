package admin

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
)

// The TCP listener is read-only, the socket is not.
func TestListeners(t *testing.T) {
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o := options(t)
	o.Listen = free.Addr().String()
	o.Reload = func() (Reloaded, error) { return Reloaded{Config: "x"}, nil }

	var mu sync.Mutex
	problems := map[string]string{}
	problem := func() string {
		mu.Lock()
		defer mu.Unlock()
		return problems["admin API on "+o.Listen]
	}
	o.Problem = func(part string, err error) {
		mu.Lock()
		defer mu.Unlock()
		delete(problems, part)
		if err != nil {
			problems[part] = err.Error()
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	server := New(o)
	server.retry = 5 * time.Millisecond
	go func() { done <- server.Run(ctx) }()
	// While the port is in use, the socket works.
	var info Info
	deadline := time.Now().Add(5 * time.Second)
	for problem() == "" || NewClient(o.Socket).Get(ctx, "/v1/status", &info) != nil {
		if time.Now().After(deadline) {
			t.Fatalf("problem %q, answer %+v", problem(), info)
		}
		time.Sleep(5 * time.Millisecond)
	}
	if got := problem(); !strings.Contains(got, "address already in use") {
		t.Errorf("problem %q", got)
	}
	free.Close()

	url := "http://" + o.Listen + "/v1/"
	var resp *http.Response
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if resp, err = http.Get(url + "status"); err == nil || time.Now().After(deadline) {
			break
		}
	}
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("GET by TCP: %v, %v", resp, err)
	}
	resp.Body.Close()
	if got := problem(); got != "" {
		t.Errorf("problem %q; want none", got)
	}
	if resp, err = http.Post(url+"reload", "", nil); err != nil || resp.StatusCode != http.StatusNotFound {
		t.Fatalf("POST by TCP: %v, %v; want 404", resp, err)
	}
	resp.Body.Close()
	var now Reloaded
	if err := NewClient(o.Socket).Post(ctx, "/v1/reload", &now); err != nil || now.Config != "x" {
		t.Errorf("POST by the socket: %+v, %v", now, err)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestSocketThatCannotBeReplaced(t *testing.T) {
	o := options(t)
	if err := os.MkdirAll(filepath.Join(o.Socket, "file"), 0o755); err != nil {
		t.Fatal(err)
	}
	_, err := listenUnix(o.Socket)
	if err == nil || !strings.HasPrefix(err.Error(), "remove the API socket of an earlier run: ") {
		t.Errorf("a directory in place of the socket: %v", err)
	}
}

// By TCP, only requests for an address or a known name are served: a page of another site must not read the API.
func TestHostIsChecked(t *testing.T) {
	o := options(t)
	o.Hosts = []string{"lb1", "lb1.example.net"}
	s := New(o)
	h := s.checkHost(s.Handler(false))
	for host, want := range map[string]int{
		"192.0.2.1:9911": 200, "[2001:db8::1]:9911": 200, "192.0.2.1": 200, "localhost:9911": 200, "lb1": 200,
		"LB1.example.net.:9911": 200, "": 200,
		"evil.example:9911": 421, "lb1.evil.example": 421, "192.0.2.1.evil.example:80": 421,
	} {
		r := httptest.NewRequest(http.MethodGet, "/v1/status", nil)
		r.Host = host
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != want {
			t.Errorf("%q: status %d; want %d", host, w.Code, want)
		}
	}
}
