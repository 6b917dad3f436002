package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// StopGrace is the time between a process's SIGTERM and SIGKILL.
const StopGrace = 30 * time.Second

// Command is a program to start on a host.
type Command struct {
	// Path is the program: a path, or a name to look up in PATH.
	Path string
	Args []string
	// Env is added to the environment of this process.
	Env []string
	// Abrupt makes Stop send SIGKILL immediately, for programs that are not under test and end slowly after SIGTERM.
	Abrupt bool
	// Output receives a copy of the output, unless it is nil.
	Output io.Writer
}

// Process is a program that was started on a host. Its methods may be called from any goroutine.
type Process struct {
	// Log has the end of stdout and stderr.
	Log  Log
	host *Host
	cmd  *exec.Cmd
	kill bool          // Command.Abrupt
	done chan struct{} // closed once the process has ended and its output has been read
	err  error         // Wait's error; set before done is closed
}

// Start starts a program on the host. The process ends with the host, and the kernel kills it if this process ends in
// any way.
func (h *Host) Start(c Command) (*Process, error) {
	p := &Process{host: h, kill: c.Abrupt, done: make(chan struct{})}
	p.Log.tee = c.Output
	cmd, err := command(c)
	if err != nil {
		return nil, err
	}
	p.cmd = cmd
	p.cmd.Stdout, p.cmd.Stderr = &p.Log, &p.Log
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, fmt.Errorf("start %s in host %s: the host is closed", c.Path, h)
	}
	if err := h.onAnchor(p.cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s in host %s: %w", c.Path, h, err)
	}
	h.processes[p] = struct{}{}
	go p.wait()
	return p, nil
}

// Run runs a program on the host and returns its output. If ctx ends first, the program is killed. The error includes
// the output.
func (h *Host) Run(ctx context.Context, path string, args ...string) (string, error) {
	p, err := h.Start(Command{Path: path, Args: args})
	if err != nil {
		return "", err
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		p.Kill()
		<-p.done
		err = ctx.Err()
	}
	out := p.Log.Tail(logLines)
	if err = errors.Join(err, p.err); err != nil {
		return out, fmt.Errorf("run %s %s in host %s: %w\n%s", path, strings.Join(args, " "), h, err, out)
	}
	return out, nil
}

func command(c Command) (*exec.Cmd, error) {
	path := c.Path
	if !filepath.IsAbs(path) { // relative to this process, not to cmd.Dir
		found, err := exec.LookPath(path)
		if err != nil {
			return nil, err
		}
		if path, err = filepath.Abs(found); err != nil {
			return nil, err
		}
	}
	cmd := exec.Command(path, c.Args...)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), c.Env...)
	// The process has its own process group, because Ctrl-C at a terminal must signal only this process, which ends the
	// others in order. The parent-death signal handles a SIGKILL of this process. WaitDelay is for grandchildren that
	// keep the output open.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = time.Second
	return cmd, nil
}

// onAnchor runs f on the thread that stays in the host until Close.
func (h *Host) onAnchor(f func() error) error {
	done := make(chan error, 1)
	select {
	case h.anchor <- func() { done <- f() }:
		return <-done
	case <-h.ended:
		return errors.New("the host is closed")
	}
}

func (p *Process) wait() {
	p.err = p.cmd.Wait()
	p.host.mu.Lock()
	delete(p.host.processes, p)
	p.host.mu.Unlock()
	close(p.done)
}

// Name returns the program's name.
func (p *Process) Name() string { return filepath.Base(p.cmd.Path) }

// Pid returns the process ID.
func (p *Process) Pid() int { return p.cmd.Process.Pid }

// Done returns a channel that is closed once the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running reports whether the process is running.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Wait waits until the process ends and returns how it ended: nil for exit status 0, an *exec.ExitError for another
// status or a signal, or ctx's error.
func (p *Process) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return fmt.Errorf("%s in host %s is still running: %w", filepath.Base(p.cmd.Path), p.host, ctx.Err())
	}
}

// Ended returns nil while the process is running. After that, it returns a Permanent error with how it ended and its
// last output.
func (p *Process) Ended() error {
	if p.Running() {
		return nil
	}
	how := cmp.Or(p.err, errors.New("exit status 0"))
	return Permanent(fmt.Errorf("%s ended: %w\n%s", p.Name(), how, p.Log.Tail(20)))
}

// Signal sends sig. It returns nil if the process has ended.
func (p *Process) Signal(sig os.Signal) error {
	err := p.cmd.Process.Signal(sig)
	if errors.Is(err, os.ErrProcessDone) {
		return nil
	}
	return err
}

// Kill sends SIGKILL to the process and its process group, and waits for the process's end.
func (p *Process) Kill() {
	p.cmd.Process.Kill()
	<-p.done
	// Its children are in its process group, whose ID is not reused as long as it has members.
	syscall.Kill(-p.Pid(), syscall.SIGKILL)
}

// Stop ends the process with SIGTERM. After StopGrace it sends SIGKILL and returns an error.
func (p *Process) Stop() error {
	if p.kill {
		p.Kill()
		return nil
	}
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	late := time.NewTimer(StopGrace)
	defer late.Stop()
	select {
	case <-p.done:
		syscall.Kill(-p.Pid(), syscall.SIGKILL)
		return nil
	case <-late.C:
		p.Kill()
		return fmt.Errorf("%s in host %s did not end within %v of SIGTERM and was killed; the end of its log:\n%s",
			filepath.Base(p.cmd.Path), p.host, StopGrace, p.Log.Tail(10))
	}
}

func (h *Host) running() []*Process {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []*Process
	for p := range h.processes {
		all = append(all, p)
	}
	return all
}

// stopAll ends all processes of the host concurrently.
func (h *Host) stopAll() error {
	all := h.running()
	errs := make(chan error, len(all))
	for _, p := range all {
		go func() { errs <- p.Stop() }()
	}
	var err error
	for range all {
		err = errors.Join(err, <-errs)
	}
	return err
}
