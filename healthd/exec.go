package healthd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// execChecker runs a program with the address and the port as arguments; exit status 0 is healthy. The program runs in
// its own process group, which is killed at the timeout. Its packets are not sent over the path of the traffic.
type execChecker struct{ target }

func (c execChecker) Probe(ctx context.Context) (Result, error) {
	addr, port := c.Target.Addr().String(), strconv.Itoa(int(c.Target.Port()))
	cmd := exec.CommandContext(ctx, c.Spec.Path, addr, port)
	cmd.Env = append(environment(),
		"STEELYARD_SERVICE="+c.Key.Service, "STEELYARD_ADDRESS="+addr, "STEELYARD_PORT="+port)
	if c.VIP.IsValid() {
		cmd.Env = append(cmd.Env, "STEELYARD_VIP="+c.VIP.String())
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 100 * time.Millisecond
	var stderr firstKiB
	cmd.Stderr = &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return Result{}, ctx.Err()
	case errors.As(err, &exit):
		line, _, _ := strings.Cut(strings.TrimSpace(stderr.kept.String()), "\n")
		if line != "" {
			line = ": " + line
		}
		return fail("%s%s", exit, line)
	case errors.Is(err, exec.ErrWaitDelay): // exit status 0, but another process has stderr open
	case err != nil: // the program did not start, which says nothing about the backend
		return Result{}, ownError{fmt.Errorf("run %s: %w", c.Spec.Path, errors.Unwrap(err))}
	}
	return ok("exit status 0")
}

// environment has what programs commonly need. The rest of the agent's environment stays with the agent: NOTIFY_SOCKET
// would let a program report to systemd in its name, and credentials may be among the others.
func environment() (env []string) {
	for _, name := range []string{"PATH", "LANG", "TZ", "TMPDIR"} {
		if v, ok := os.LookupEnv(name); ok {
			env = append(env, name+"="+v)
		}
	}
	return env
}

// firstKiB keeps the first 1,024 bytes written to it and discards the rest.
//
// The buffer is not embedded: os/exec would call its ReadFrom, which has no limit.
type firstKiB struct{ kept bytes.Buffer }

func (k *firstKiB) Write(b []byte) (int, error) {
	if room := 1024 - k.kept.Len(); room > 0 {
		k.kept.Write(b[:min(room, len(b))])
	}
	return len(b), nil
}
