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

// execChecker runs a program with the address and the port as arguments; exit status 0 is healthy. The program has a
// process group of its own, which is killed when the time is over. Its own packets do not go the way of traffic.
type execChecker struct{ target }

func (c execChecker) Probe(ctx context.Context) (Result, error) {
	addr, port := c.Target.Addr().String(), strconv.Itoa(int(c.Target.Port()))
	cmd := exec.CommandContext(ctx, c.Spec.Path, addr, port)
	cmd.Env = append(os.Environ(), "STEELYARD_SERVICE="+c.Key.Service, "STEELYARD_ADDRESS="+addr, "STEELYARD_PORT="+port)
	if c.VIP.IsValid() {
		cmd.Env = append(cmd.Env, "STEELYARD_VIP="+c.VIP.String())
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 100 * time.Millisecond
	var stderr head
	cmd.Stderr = &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		return Result{Weight: -1}, ctx.Err()
	case errors.As(err, &exit):
		why, _, _ := strings.Cut(strings.TrimSpace(stderr.String()), "\n")
		if why != "" {
			why = ": " + why
		}
		return fail("%s%s", exit, why)
	case err != nil:
		return Result{Weight: -1}, fmt.Errorf("run %s: %w", c.Spec.Path, errors.Unwrap(err))
	}
	return ok("exit status 0")
}

// head keeps the first KiB of what a program says, and takes the rest without keeping it.
type head struct{ bytes.Buffer }

func (h *head) Write(b []byte) (int, error) {
	if room := 1024 - h.Len(); room > 0 {
		h.Buffer.Write(b[:min(room, len(b))])
	}
	return len(b), nil
}
