package systemd

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// manager returns the receiving end of the notification socket.
func manager(t *testing.T) *net.UnixConn {
	path := filepath.Join(t.TempDir(), "notify")
	c := must.Get(net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"}))(t)
	t.Cleanup(func() { c.Close() })
	t.Setenv("NOTIFY_SOCKET", path)
	return c
}

// read returns the next notification, or the error's text.
func read(t *testing.T, c *net.UnixConn, within time.Duration) string {
	t.Helper()
	must.Do(t, c.SetReadDeadline(time.Now().Add(within)))
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
	}{
		{n.Ready, "READY=1"},
		{n.Reloading, `RELOADING=1\nMONOTONIC_USEC=\d+`},
		{func() { n.Status("announces 2 of 3\naddresses") }, "STATUS=announces 2 of 3 addresses"},
		{n.Stopping, "STOPPING=1"},
	} {
		tt.say()
		if got := read(t, c, time.Second); !regexp.MustCompile("^" + tt.want + "$").MatchString(got) {
			t.Errorf("systemd received %q; want %q", got, tt.want)
		}
	}
}

func TestWithoutSystemdNothingHappens(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "")
	t.Setenv("WATCHDOG_USEC", "")
	var log bytes.Buffer
	n := New(slog.New(slog.NewTextHandler(&log, nil)))
	n.Ready()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	err := n.Run(ctx, func() error { t.Error("check was called"); return nil })
	must.True(t, err == nil && log.Len() == 0, "error %v, log %q; want none", err, &log)
}

func TestUnreachableSystemdIsLogged(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", filepath.Join(t.TempDir(), "no-socket"))
	var log bytes.Buffer
	New(slog.New(slog.NewTextHandler(&log, nil))).Ready()
	want := `msg="systemd notification not sent"`
	must.True(t, strings.Contains(log.String(), want), "log %q; want %s", &log, want)
}

func TestWrongWatchdogIntervalIsAnError(t *testing.T) {
	t.Setenv("WATCHDOG_USEC", "soon")
	err := New(slog.New(slog.DiscardHandler)).Run(t.Context(), func() error { return nil })
	must.Fail(t, err, "read the watchdog interval: ")
}

func TestWatchdogIsNotifiedWhileAlive(t *testing.T) {
	c := manager(t)
	t.Setenv("WATCHDOG_USEC", "200000")
	var ended atomic.Bool
	asked := make(chan struct{}, 1000)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		done <- New(slog.New(slog.DiscardHandler)).Run(ctx, func() error {
			asked <- struct{}{}
			if ended.Load() {
				return errors.New("stuck")
			}
			return nil
		})
	}()
	start := time.Now()
	for range 3 {
		must.Equal(t, "WATCHDOG=1", read(t, c, time.Second))
		<-asked
	}
	took := time.Since(start)
	must.True(t, took >= 150*time.Millisecond, "notified three times in %s; want twice in 200 ms", took)
	ended.Store(true)
	<-asked // the socket may still contain an older notification
	<-asked
	for range 10 {
		if read(t, c, time.Millisecond) != "WATCHDOG=1" {
			break
		}
	}
	<-asked
	<-asked
	got := read(t, c, time.Millisecond)
	must.True(t, strings.Contains(got, "timeout"), "a stuck agent notified systemd: %q", got)
	cancel()
	must.Do(t, <-done)
}

func TestInstall(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o077))
	root := t.TempDir()
	config := filepath.Join(root, configPath)
	remains := func(is bool) func() (bool, error) { return func() (bool, error) { return is, nil } }
	install := func(want string) {
		t.Helper()
		var out bytes.Buffer
		must.Do(t, Install(&out, root))
		must.True(t, strings.HasSuffix(out.String(), want+"\n"), "Install said:\n%s\nwant at the end: %s", &out, want)
	}
	install("Next: edit " + config + ", then systemctl enable --now steelyard")
	modes := map[string]os.FileMode{binaryPath: 0o755, unitPath: 0o644, watchPath: 0o644, configPath: 0o640}
	for path, mode := range modes {
		fi, err := os.Stat(filepath.Join(root, path))
		must.True(t, err == nil && fi.Mode().Perm() == mode, "%s: %v, %v; want mode %o", path, fi, err, mode)
	}
	must.Do(t, os.WriteFile(config, []byte("mine"), 0o600))
	must.Do(t, os.Chmod(filepath.Join(root, unitPath), 0o600))
	install("Next: steelyard restart")
	must.Equal(t, 0o644, must.Get(os.Stat(filepath.Join(root, unitPath)))(t).Mode().Perm())

	if err := Uninstall(new(bytes.Buffer), root, remains(true)); err == nil || len(files(t, root)) != 4 {
		t.Errorf("Uninstall with programs in the kernel: %v, leaving %q", err, files(t, root))
	}
	for range 2 { // the second call finds nothing to remove
		must.Do(t, Uninstall(new(bytes.Buffer), root, remains(false)))
	}
	must.Equal(t, "mine", string(must.Get(os.ReadFile(config))(t)))
	install("Next: systemctl enable --now steelyard")
	// A drain from before an uninstall does not apply after the next installation.
	drained := filepath.Join(root, drainsPath)
	must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(drained), 0o755), os.WriteFile(drained, nil, 0o600)))
	must.Do(t, Uninstall(new(bytes.Buffer), root, remains(false)))
	must.Do(t, os.Remove(config))
	must.Equal(t, nil, files(t, root))
}

func files(t *testing.T, root string) (all []string) {
	must.Do(t, filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			all = append(all, path)
		}
		return err
	}))
	return all
}

func TestInstallIntoAFileFails(t *testing.T) {
	root := filepath.Join(t.TempDir(), "file")
	must.Do(t, os.WriteFile(root, nil, 0o644))
	err := Install(new(bytes.Buffer), root)
	must.Fail(t, err, "install "+filepath.Join(root, binaryPath)+": ")
}

// need skips the test if a program is missing, and fails it in CI.
func need(t *testing.T, program, pkg string) string {
	t.Helper()
	path, err := exec.LookPath(program)
	if err == nil {
		return path
	}
	must.Need(t, os.Getenv("STEELYARD_CI") != "1", "%s is missing (apt-get install %s)", program, pkg)
	t.Skipf("SKIPPED: %s is missing (apt-get install %s)", program, pkg)
	return ""
}

// The unit needs no other programs, because a minimal system has no procps. A filtered system call must not kill the
// agent. A reload must fail if the file is rejected, which a signal could not report.
func TestUnitLines(t *testing.T) {
	lines := strings.Split(string(unit), "\n")
	for _, want := range []string{
		"ExecStart=/usr/local/bin/steelyard run", "ExecReload=/usr/local/bin/steelyard reload",
		"SystemCallErrorNumber=EPERM", "Type=notify", "OOMScoreAdjust=-900",
		"UMask=0077", "ProtectProc=invisible", "LimitCORE=0", "RuntimeDirectoryMode=0700", "StateDirectoryMode=0700",
		"MemoryMax=2G", "SystemCallFilter=sched_setattr setpriority setrlimit",
		"SystemCallFilter=~@clock @cpu-emulation @debug @module @mount @obsolete @raw-io @reboot @resources @swap",
	} {
		must.True(t, slices.Contains(lines, want), "the unit has no line %q", want)
	}
	for _, line := range append(lines, strings.Split(string(watchUnit), "\n")...) {
		key, command, _ := strings.Cut(line, "=")
		if strings.HasPrefix(key, "Exec") && !strings.HasPrefix(command, "/"+binaryPath+" ") {
			t.Errorf("%s runs a program other than ours", line)
		}
	}
}

func TestUnitIsValid(t *testing.T) {
	analyze := need(t, "systemd-analyze", "systemd")
	// The unit has the paths of an installed system. systemd-analyze verify requires that the program exists.
	dir := t.TempDir()
	bin := filepath.Join(dir, "steelyard")
	must.Do(t, os.WriteFile(bin, []byte("#!/bin/sh\n"), 0o755))
	file := filepath.Join(dir, "steelyard.service")
	watch := filepath.Join(dir, watchName)
	for path, text := range map[string][]byte{file: unit, watch: watchUnit} {
		text = bytes.ReplaceAll(text, []byte("/usr/local/bin/steelyard"), []byte(bin))
		must.Do(t, os.WriteFile(path, text, 0o644))
	}
	out, err := exec.Command(analyze, "verify", "--man=no", file, watch).CombinedOutput()
	must.True(t, err == nil && !bytes.Contains(out, []byte("steelyard.service:")) &&
		!bytes.Contains(out, []byte(watchName+":")), "systemd-analyze verify: %v\n%s", err, out)
}
