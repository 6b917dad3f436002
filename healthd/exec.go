package healthd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/steelyard-lb/steelyard/healthd/program"
)

// execChecker runs a program with the address and the port as arguments; exit status 0 is healthy. The program has its
// own session and process group, which is killed at the timeout. The supervisor kills any processes that the program
// leaves behind. Its packets do not take the path of service traffic.
type execChecker struct{ target }

func (c execChecker) Probe(ctx context.Context) (Result, error) {
	addr, port := c.Target.Addr().String(), strconv.Itoa(int(c.Target.Port()))
	cmd, err := c.command(ctx, addr, port)
	if err != nil { // not the backend's fault
		return Result{}, ownError{err}
	}
	cmd.Env = append(environment(),
		"STEELYARD_SERVICE="+c.Key.Service, "STEELYARD_ADDRESS="+addr, "STEELYARD_PORT="+port)
	if c.VIP.IsValid() {
		cmd.Env = append(cmd.Env, "STEELYARD_VIP="+c.VIP.String())
	}
	var stderr firstKiB
	cmd.Stderr = &stderr
	err = programs.run(cmd, c.log)
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
	case err != nil: // the program did not start
		return Result{}, ownError{fmt.Errorf("run %s: %w", c.Spec.Path, errors.Unwrap(err))}
	}
	return ok("exit status 0")
}

// command returns the command of a probe. It runs as Spec.User, or as the agent's user if the agent is not root.
func (c execChecker) command(ctx context.Context, args ...string) (*exec.Cmd, error) {
	u, err := program.Lookup(c.Spec.User)
	if err != nil {
		return nil, fmt.Errorf("run %s: %w", c.Spec.Path, err)
	}
	attr := &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	if own := uint32(os.Geteuid()); own != 0 {
		u.UID, u.GID = own, uint32(os.Getegid())
	} else if u.UID != 0 {
		attr.Credential = &syscall.Credential{Uid: u.UID, Gid: u.GID}
		if lacks := lacking(); lacks != "" {
			return nil, fmt.Errorf("run %s as user %s: the agent lacks %s", c.Spec.Path, u.Name, lacks)
		}
	}
	path, err := program.Find(c.Spec.Path, u)
	if pe := new(fs.PathError); errors.As(err, &pe) {
		err = pe.Err
	}
	if err != nil {
		return nil, fmt.Errorf("run %s: %w", c.Spec.Path, err)
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Args[0], cmd.Dir, cmd.SysProcAttr = c.Spec.Path, "/", attr
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 100 * time.Millisecond
	return cmd, nil
}

// environment returns the variables that programs commonly need. Others are left out: NOTIFY_SOCKET would let a program
// send notifications to systemd as the agent, and other variables may contain credentials.
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
// The buffer is not embedded, because os/exec would call its ReadFrom, which has no limit.
type firstKiB struct{ kept bytes.Buffer }

func (k *firstKiB) Write(b []byte) (int, error) {
	if room := 1024 - k.kept.Len(); room > 0 {
		k.kept.Write(b[:min(room, len(b))])
	}
	return len(b), nil
}
