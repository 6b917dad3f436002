package systemd

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// manager is systemd's end of the notification socket.
func manager(t *testing.T) *net.UnixConn {
	path := filepath.Join(t.TempDir(), "notify")
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	return c
}

func read(t *testing.T, c *net.UnixConn, within time.Duration) string {
	t.Helper()
	c.SetReadDeadline(time.Now().Add(within))
	b := make([]byte, 4096)
	n, err := c.Read(b)
	if err != nil {
		return err.Error()
	}
	return string(b[:n])
}

func TestNotify(t *testing.T) {
	c := manager(t)
	n := New(slog.New(slog.DiscardHandler))
	for _, tt := range []struct {
		say  func()
		want string
	}{{n.Ready, "READY=1"}, {n.Reloading, "RELOADING=1\nMONOTONIC_USEC="}, {n.Stopping, "STOPPING=1"}} {
		tt.say()
		if got := read(t, c, time.Second); !strings.HasPrefix(got, tt.want) {
			t.Errorf("systemd was told %q; want %q", got, tt.want)
		}
	}
}

func TestWatchdogIsFedWhileAlive(t *testing.T) {
	c := manager(t)
	t.Setenv("WATCHDOG_USEC", "40000")
	var dead atomic.Bool
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- New(slog.New(slog.DiscardHandler)).Run(ctx, func() error {
			if dead.Load() {
				return errors.New("stuck")
			}
			return nil
		})
	}()
	for range 3 {
		if got := read(t, c, time.Second); got != "WATCHDOG=1" {
			t.Fatalf("systemd was told %q; want WATCHDOG=1", got)
		}
	}
	dead.Store(true)
	read(t, c, 50*time.Millisecond) // one may have been on its way
	if got := read(t, c, 200*time.Millisecond); !strings.Contains(got, "timeout") {
		t.Errorf("a stuck agent told systemd %q", got)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestInstall(t *testing.T) {
	root := t.TempDir()
	var out bytes.Buffer
	if err := Install(&out, root); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(root, configPath)
	if err := os.WriteFile(config, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Install(&out, root); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(filepath.Join(root, binaryPath)); err != nil || fi.Mode().Perm() != 0o755 {
		t.Errorf("binary: %v, %v", fi, err)
	}
	if err := Uninstall(&out, root); err != nil {
		t.Fatal(err)
	}
	if text, err := os.ReadFile(config); err != nil || string(text) != "mine" {
		t.Errorf("configuration after all: %q, %v; want it as it was", text, err)
	}
	for _, gone := range []string{binaryPath, unitPath} {
		if _, err := os.Stat(filepath.Join(root, gone)); err == nil {
			t.Errorf("%s is still there", gone)
		}
	}
}

func TestUnitIsValid(t *testing.T) {
	if _, err := exec.LookPath("systemd-analyze"); err != nil {
		if os.Getenv("STEELYARD_CI") == "1" {
			t.Fatal("systemd-analyze is missing (apt-get install systemd)")
		}
		t.Skip("SKIPPED: systemd-analyze is missing (apt-get install systemd)")
	}
	// The unit is judged as installed, with a program where it says that there is one.
	dir := t.TempDir()
	bin := filepath.Join(dir, "steelyard")
	if err := os.WriteFile(bin, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "steelyard.service")
	if err := os.WriteFile(file, bytes.ReplaceAll(unit, []byte("/usr/local/bin/steelyard"), []byte(bin)), 0o644); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("systemd-analyze", "verify", "--man=no", file).CombinedOutput()
	if err != nil || bytes.Contains(out, []byte("steelyard.service:")) {
		t.Errorf("systemd-analyze verify: %v\n%s", err, out)
	}
}
