package healthd

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestInconclusive(t *testing.T) {
	dial := func(no syscall.Errno) error {
		return fmt.Errorf("get: %w", &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", no)})
	}
	for _, tt := range []struct {
		err  error
		want bool
	}{
		{dial(syscall.EMFILE), true}, {dial(syscall.ENFILE), true}, {dial(syscall.ENOBUFS), true},
		{dial(syscall.ENOMEM), true}, {dial(syscall.EADDRNOTAVAIL), true}, {dial(syscall.EPERM), true},
		{ownError{io.EOF}, true}, {fmt.Errorf("x: %w", ownError{io.EOF}), true},
		{dial(syscall.ECONNREFUSED), false}, {dial(syscall.ETIMEDOUT), false}, {dial(syscall.EHOSTUNREACH), false},
		{dial(syscall.ENETUNREACH), false}, {dial(syscall.EACCES), false},
		{&net.OpError{Op: "listen", Err: syscall.EACCES}, true}, {&fs.PathError{Err: syscall.EACCES}, true},
		{context.DeadlineExceeded, false}, {io.EOF, false},
		{errors.New("HTTP 500"), false},
	} {
		must.Row(t, tt.err, tt.want, inconclusive(tt.err))
	}
}

// starvedEnv marks the process of TestWithoutDescriptors whose limit of descriptors is low.
const starvedEnv = "STEELYARD_TEST_STARVED"

// A shortage of descriptors says nothing about the backends: they keep their states, the problem is reported, and
// probes decide again when it is over. A separate process has the limit.
func TestWithoutDescriptors(t *testing.T) {
	if os.Getenv(starvedEnv) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestWithoutDescriptors$", "-test.v")
		cmd.Env = append(os.Environ(), starvedEnv+"=1")
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	to := targetOf(listen(t).Addr())
	var mu sync.Mutex
	var reports []lb.State
	p := New(Options{Log: slog.New(slog.DiscardHandler), Report: func(h lb.Health) {
		mu.Lock()
		defer mu.Unlock()
		reports = append(reports, h.State)
	}})
	must.Run(t, p.Run)
	for i, typ := range []lb.CheckType{lb.CheckTCP, lb.CheckTCP, lb.CheckTCP} {
		s := lb.CheckSpec{Type: typ, Interval: 20 * time.Millisecond, Timeout: 10 * time.Second, Rise: 1, Fall: 2}
		key := lb.CheckKey{Service: "web", Backend: netip.AddrPortFrom(to.Addr(), uint16(i))}
		p.Put(fmt.Sprint("web", i), []lb.Check{{Key: key, Target: to, Spec: s}})
	}
	eventually := func(what string, f func() bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !f(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: not after 20 s; reports %v, problems %q", what, reports, lbtest.Texts(p.Findings()))
			}
		}
	}
	healthy := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(reports) == 3 && !slices.Contains(reports, lb.StateUnhealthy)
	}
	eventually("healthy", healthy)

	before := unix.Rlimit{}
	must.Do(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &before))
	must.Do(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1, Max: before.Max}))
	eventually("a problem", func() bool {
		problems := lbtest.Texts(p.Findings())
		return len(problems) == 1 && strings.Contains(problems[0], "3 health checks are inconclusive") &&
			strings.Contains(problems[0], "too many open files")
	})
	time.Sleep(200 * time.Millisecond) // ten probes of each
	must.Do(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before))
	eventually("no problem", func() bool { return len(lbtest.Texts(p.Findings())) == 0 })
	must.True(t, healthy(), "reports %v; want three of healthy backends", reports)
}

// A program that cannot be started says nothing about the backend; the report says why the backend has no state.
func TestMissingProgramIsInconclusive(t *testing.T) {
	reports := make(chan lb.Health, 1)
	p := New(Options{Report: func(h lb.Health) { reports <- h }, Log: slog.New(slog.DiscardHandler)})
	c := lb.Check{Key: lb.CheckKey{Service: "web"}, Target: netip.MustParseAddrPort("10.0.0.1:80")}
	c.Spec = lb.CheckSpec{
		Type: lb.CheckExec, Path: "/nowhere", User: "nobody", Interval: time.Hour, Timeout: time.Minute, Fall: 1,
	}
	p.Put("web", []lb.Check{c})
	must.Run(t, p.Run)
	select {
	case h := <-reports:
		must.True(t, h.State == lb.StateUnknown && strings.Contains(h.Reason, "no such file"),
			"%s: %q; want unknown, without the file", h.State, h.Reason)
	case <-time.After(time.Minute):
		t.Error("no report")
	}
}
