package demo

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb"
)

// commandDir has the commands of the shell, on every host.
const commandDir = "/run/steelyard-demo/bin"

// Shell builds the network of the demo, makes the incident with this name unless it is "", and runs the user's shell
// until it ends. In the shell, the name of each host is a command that runs a program there.
//
// The network is in a PID namespace of its own, whose first process is this program again. When that process ends, even
// by SIGKILL, the kernel kills all others, including those that the user has started in the background.
func Shell(ctx context.Context, out io.Writer, incident string) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this binary: %w", err)
	}
	if os.Getpid() == 1 {
		return shell(ctx, out, self, incident)
	}
	if os.Geteuid() != 0 {
		return lab.ErrNotRoot
	}
	runtime.LockOSThread() // the parent-death signal depends on the thread that starts the process
	defer runtime.UnlockOSThread()
	args := []string{"demo", "--shell"}
	if incident != "" {
		args = append(args, "--break", incident)
	}
	c := attached(exec.CommandContext(ctx, self, args...))
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGTERM) }
	c.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID, Unshareflags: unix.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL,
	}
	err = c.Run()
	signal.Ignore(syscall.SIGTTOU) // the shell has left this process in the background of its terminal
	unix.IoctlSetPointerInt(0, unix.TIOCSPGRP, unix.Getpgrp())
	return err
}

// attached connects a command with the terminal of this process.
func attached(c *exec.Cmd) *exec.Cmd {
	c.Stdin, c.Stdout, c.Stderr = os.Stdin, os.Stdout, os.Stderr
	return c
}

// shell is Shell in the namespace.
func shell(ctx context.Context, out io.Writer, self, name string) (err error) {
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	s := &show{screen: newScreen(out)}
	if s.network, err = build(self); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	s.line("%s\n", s.picture())
	host, err := s.commands()
	if err == nil {
		_, err = s.announce(ctx)
	}
	if err == nil {
		err = s.connected(ctx)
	}
	if err != nil {
		s.showLogs()
		return err
	}
	defer s.stream(ctx, shellInterval).stop()
	broken := find(name)
	if broken != nil {
		if err := s.used(ctx); err != nil {
			return err
		}
		if err := broken.begin(s, ctx); err != nil {
			return fmt.Errorf("incident %s: %w", broken.name, err)
		}
	}
	s.line(welcome, vip4, vip6, lab.AgentConfigPath)
	if broken != nil {
		s.line("\n   The report: %s.", broken.symptom)
	}
	s.line("")
	if err := host.Do(func() error { return open(ctx) }); err != nil {
		return err
	}
	if broken != nil {
		s.line("The incident was %s: %s.", broken.name, broken.cause)
	}
	return nil
}

const welcome = `
   Both clients send ten requests a second. The names of the hosts are commands:
     client1 curl http://%s/        lb1 steelyard status    router ip route
     client2 curl 'http://[%s]/'  lb2 steelyard doctor    lb1 (opens a shell there)
   Both balancers have the configuration lb1:%s. This shell
   is on a host without a network. Everything is removed when it ends.`

// commands makes the hosts' names commands on all hosts, and returns the host of the shell, which has no network.
func (s *show) commands() (*lab.Host, error) {
	texts := map[string]string{"steelyard": fmt.Sprintf("exec '%s' \"$@\"\n", s.self)}
	for _, h := range s.Hosts() {
		texts[h.Name()] = fmt.Sprintf("[ $# != 0 ] || set -- \"${SHELL:-sh}\"\nexec %s \"$@\"\n", h.Enter())
	}
	host, err := s.Host("shell")
	if err != nil {
		return nil, err
	}
	for _, h := range s.Hosts() {
		for name, text := range texts {
			err = errors.Join(err, h.WriteFile(commandDir+"/"+name, "#!/bin/sh\n"+text, 0o755))
		}
	}
	return host, err
}

// connected waits until both balancers have all sessions and backends.
func (s *show) connected(ctx context.Context) error {
	_, err := s.until(ctx, "all sessions are up and all backends healthy", func() error {
		return errors.Join(s.healthy(ctx), sessions(ctx, s.agents[0]), sessions(ctx, s.agents[1]))
	})
	return err
}

// used waits until both balancers know the rate of packets, because some findings compare with an earlier rate.
func (s *show) used(ctx context.Context) error {
	_, err := s.until(ctx, "the rate of packets is known", func() error {
		for _, a := range s.agents {
			var all []lb.ServiceStatus
			if err := a.Get(ctx, "/v1/services", &all); err != nil {
				return err
			}
			for _, x := range all {
				if x.Port == webPort && x.PacketRate < 1 {
					return fmt.Errorf("%s has %.1f packets a second for %s", a.Name(), x.PacketRate, x.Address)
				}
			}
		}
		return nil
	})
	return err
}

// open runs the user's shell. Its exit status, which is that of its last command, is no error of the demo.
func open(ctx context.Context) error {
	c := attached(exec.CommandContext(ctx, cmp.Or(os.Getenv("SHELL"), "sh")))
	c.Env = append(os.Environ(), "PATH="+commandDir+":"+os.Getenv("PATH"), "STEELYARD_CONFIG="+lab.AgentConfigPath)
	if _, err := unix.IoctlGetTermios(0, unix.TCGETS); err == nil {
		c.SysProcAttr = &syscall.SysProcAttr{Foreground: true} // Ctrl-C is for the shell only
	}
	err := c.Run()
	if ctx.Err() != nil {
		return fmt.Errorf("interrupted; the network was removed: %w", context.Cause(ctx))
	}
	if errors.As(err, new(*exec.ExitError)) {
		return nil
	}
	return err
}
