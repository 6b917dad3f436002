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
	"path/filepath"
	"slices"
	"strconv"
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

// execCheck returns a check whose program is this script, and a directory to which the program may write.
func execCheck(t *testing.T, script string) (c lb.Check, dir string) {
	t.Helper()
	top, err := os.MkdirTemp("", "check") // only the owner can use t.TempDir
	must.Do(t, err)
	t.Cleanup(func() { os.RemoveAll(top) })
	path, dir := filepath.Join(top, "check"), filepath.Join(top, "out")
	for _, err := range []error{
		os.Chmod(top, 0o755), os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o700), os.Chmod(path, 0o755),
		os.Mkdir(dir, 0o700), os.Chmod(dir, 0o777),
	} {
		must.Do(t, err)
	}
	c = lb.Check{Key: lb.CheckKey{Service: "web"}, Target: netip.MustParseAddrPort("10.0.0.1:80")}
	c.Spec = lb.CheckSpec{Type: lb.CheckExec, Path: path, User: "nobody"}
	return c, dir
}

// A program receives its check's variables and few others.
func TestEnvironmentOfPrograms(t *testing.T) {
	t.Setenv("NOTIFY_SOCKET", "/run/systemd/notify")
	t.Setenv("WATCHDOG_USEC", "30000000")
	t.Setenv("SECRET", "x")
	c, dir := execCheck(t, `env >"${0%/*}/out/env"`)
	must.Equal(t, "ok: exit status 0", probeFor(t, c, "ok"))
	text := must.Get(os.ReadFile(dir + "/env"))(t)
	var names []string
	for line := range strings.Lines(string(text)) {
		name, _, _ := strings.Cut(line, "=")
		names = append(names, name)
	}
	for _, want := range []string{"PATH", "STEELYARD_SERVICE", "STEELYARD_ADDRESS", "STEELYARD_PORT"} {
		must.True(t, slices.Contains(names, want), "no %s in %v", want, names)
	}
	for _, bad := range []string{"NOTIFY_SOCKET", "WATCHDOG_USEC", "SECRET"} {
		must.True(t, !slices.Contains(names, bad), "%s is passed on", bad)
	}
}

func TestExec(t *testing.T) {
	const show = "echo $1 $2 $STEELYARD_SERVICE $STEELYARD_ADDRESS $STEELYARD_PORT $STEELYARD_VIP >&2; exit 1"
	for name, tt := range map[string]struct{ script, vip, want string }{
		"good":              {"exit 0", "", "ok: exit status 0"},
		"bad":               {"echo no disk >&2; echo more >&2; exit 2", "", "exit status 2: no disk"},
		"bad, no output":    {"exit 1", "", "exit status 1"},
		"bad, binary":       {"head -c 1000 /dev/zero >&2; exit 1", "", "exit status 1: �"},
		"arguments":         {show, "", "exit status 1: 10.0.0.1 80 web 10.0.0.1 80"},
		"arguments and VIP": {show, "203.0.113.10", "exit status 1: 10.0.0.1 80 web 10.0.0.1 80 203.0.113.10"},
		// The group is killed at the timeout. A process outside it that has stderr open does not extend the probe.
		"own session": {"setsid sleep 3 & wait", "", "no response within 300ms"},
		// A background process that has stderr open does not change the result.
		"good, background process": {"sleep 1 & exit 0", "", "ok: exit status 0"},
		"bad, background process":  {"sleep 1 & echo no disk >&2; exit 2", "", "exit status 2: no disk"},
		"hanging":                  {"sleep 60 & wait", "", "no response within 300ms"},
		"long output":              {"head -c 1000000 /dev/zero >&2", "", "ok: exit status 0"},
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := execCheck(t, tt.script)
			c.VIP, _ = netip.ParseAddr(tt.vip)
			wantProbe(t, c, tt.want)
		})
	}
	for name, want := range map[string]string{
		"missing":      "run %s: no such file or directory",
		"open to all":  "run %s: %[1]s can be written by users other than root (mode 0777)",
		"unknown user": `run %s: there is no user "nowhere"`,
	} {
		c, _ := execCheck(t, "exit 0")
		switch name {
		case "missing":
			os.Remove(c.Spec.Path)
		case "open to all":
			os.Chmod(c.Spec.Path, 0o777)
		case "unknown user":
			c.Spec.User = "nowhere"
		}
		must.Equal(t, fmt.Sprintf(want, c.Spec.Path), probeFor(t, c, ""))
	}
}

// A program runs as nobody without groups and capabilities, and cannot gain any.
func TestProgramsHaveNoPrivileges(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root")
	}
	c, dir := execCheck(t, `cat /proc/self/status >"${0%/*}/out/status"`)
	must.Equal(t, "ok: exit status 0", probeFor(t, c, ""))
	text := must.Get(os.ReadFile(dir + "/status"))(t)
	for _, want := range []string{
		"\nUid:\t65534\t65534\t65534\t65534\n", "\nGid:\t65534\t65534\t65534\t65534\n", "\nGroups:\t \n",
		"\nCapInh:\t0000000000000000\n", "\nCapPrm:\t0000000000000000\n", "\nCapEff:\t0000000000000000\n",
		"\nCapAmb:\t0000000000000000\n", "\nNoNewPrivs:\t1\n",
	} {
		must.True(t, strings.Contains(string(text), want), "no %q in\n%s", want, text)
	}
}

// Processes that a program starts soon end with it, even without a parent and in their own session, and nothing is left
// to reap. A child of this process that belongs to no check stays.
func TestProgramsAreEndedAsAWhole(t *testing.T) {
	own := exec.Command("sleep", "1000")
	must.Do(t, own.Start())
	defer func() { own.Process.Kill(); own.Wait() }()
	for name, script := range map[string]string{
		"at its end":     "%s & setsid %[1]s & (setsid sh -c '%[1]s & setsid %[1]s & sleep 0.1' &) ; exit 0",
		"at the timeout": "%s & setsid %[1]s & (setsid sh -c '%[1]s & setsid %[1]s & sleep 0.1' &) ; wait",
		"short children": "for i in 1 2 3 4 5; do setsid true & done; : %s",
	} {
		t.Run(name, func(t *testing.T) {
			mark := fmt.Sprintf("10%09d", time.Now().UnixNano()%1e9) // an argument that no other process has
			c, _ := execCheck(t, fmt.Sprintf(script, "sleep "+mark))
			want := "ok: exit status 0"
			if strings.HasSuffix(script, "wait") {
				want = "no response within 300ms"
			}
			wantProbe(t, c, want)
			for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
				left := append(processes(t, mark), childrenWithout(t, own.Process.Pid)...)
				if len(left) == 0 {
					break
				}
				must.Need(t, !time.Now().After(end), "left after 10 s: %v", left)
			}
		})
	}
	must.Do(t, own.Process.Signal(syscall.Signal(0)))
}

// processes returns the processes that have this argument.
func processes(t *testing.T, argument string) (pids []string) {
	t.Helper()
	all := must.Get(filepath.Glob("/proc/[0-9]*/cmdline"))(t)
	for _, name := range all {
		if text, _ := os.ReadFile(name); strings.Contains(string(text), argument) {
			pids = append(pids, name)
		}
	}
	return pids
}

// childrenWithout returns this process's children except pid.
func childrenWithout(t *testing.T, pid int) (pids []string) {
	t.Helper()
	lists, err := filepath.Glob("/proc/self/task/*/children")
	must.Need(t, err == nil && len(lists) != 0, "no lists of children: %v", err)
	for _, name := range lists {
		text, _ := os.ReadFile(name)
		pids = append(pids, strings.Fields(string(text))...)
	}
	return slices.DeleteFunc(pids, func(p string) bool { return p == strconv.Itoa(pid) })
}

// Programs are also killed if this process is process 1 of a container, whose children are all orphans, and has only
// the capabilities that programs need.
func TestProgramsOfProcessOne(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a PID namespace")
	}
	const tests = "^TestPrograms(AreEndedAsAWhole|HaveNoPrivileges)$"
	out, err := exec.CommandContext(t.Context(), "unshare", "--pid", "--fork", "--mount-proc",
		"setpriv", "--no-new-privs", "--bounding-set=-all,+setuid,+setgid,+kill",
		os.Args[0], "-test.run", tests, "-test.v").CombinedOutput()
	must.True(t, err == nil && strings.Count(string(out), "\n--- PASS") == 2, "%v\n%s", err, out)
}

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

// starvedEnv marks the process of TestWithoutDescriptors that has a low descriptor limit.
const starvedEnv = "STEELYARD_TEST_STARVED"

// A shortage of descriptors says nothing about backends. They keep their states until it is over, and the problem is
// reported. A separate process has the limit.
func TestWithoutDescriptors(t *testing.T) {
	if os.Getenv(starvedEnv) == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestWithoutDescriptors$", "-test.v")
		cmd.Env = append(os.Environ(), starvedEnv+"=1")
		out, err := cmd.CombinedOutput()
		must.Need(t, err == nil && strings.Contains(string(out), "--- PASS"), "%v\n%s", err, out)
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
			must.Need(t, !time.Now().After(end), "%s: not after 20 s; problems %q", what, lbtest.Texts(p.Findings()))
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
	time.Sleep(200 * time.Millisecond) // ten probes each
	must.Do(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &before))
	eventually("no problem", func() bool { return len(lbtest.Texts(p.Findings())) == 0 })
	must.True(t, healthy(), "a backend was reported as unhealthy, or twice")
}

// A program that cannot start says nothing about the backend. The report says why the backend has no state.
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
