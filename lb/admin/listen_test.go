package admin

import (
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
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

	if err := New(o).Run(t.Context()); err == nil || !strings.HasPrefix(err.Error(), "listen for the API: ") {
		t.Errorf("with the port in use: %v", err)
	}
	if _, err := os.Stat(o.Socket); err == nil {
		t.Error("with the port in use the socket stays")
	}
	free.Close()

	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- New(o).Run(ctx) }()
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
	err := New(o).Run(t.Context())
	if err == nil || !strings.HasPrefix(err.Error(), "remove the API socket of an earlier run: ") {
		t.Errorf("a directory in place of the socket: %v", err)
	}
}
