package agent

import (
	"context"
	"fmt"
	"os"
	"syscall"
)

// During a restart the kernel continues to forward, and peers with graceful restart keep the routes until the new agent
// is up.

// endForRestart ends the agent when restart was called, or at SIGUSR1, with which a supervisor announces a restart
// (systemd sends it for "systemctl restart"). The supervisor would kill an agent that refused.
func (a *Agent) endForRestart(ctx context.Context, stop func()) {
	select {
	case <-ctx.Done():
		return
	case <-a.announced:
	case <-a.restarts:
		a.anew.Store(true)
	}
	a.log.Info("agent restarting; peers with graceful restart keep the routes")
	a.keepRoutes()
	stop()
}

// restart makes Run end so that another agent follows in this process. It fails if Check refuses the configuration,
// because the new agent would exit, or wait while the routes disappear. It also fails if permit refuses it.
func (a *Agent) restart() error {
	cfg, err := Check(a.reloader.file, false)
	if err == nil {
		a.reloader.readiness.exclusive(func() { _, err = a.reloader.permit(cfg, "") })
	}
	if err != nil {
		return err
	}
	select {
	case a.restarts <- struct{}{}:
	default: // it is already ending
	}
	return nil
}

// execute replaces this process with a new run of the program, which may be a newer version by now.
func execute() error {
	path, err := os.Executable()
	if err == nil {
		err = syscall.Exec(path, os.Args, os.Environ())
	}
	return fmt.Errorf("restart: %w", err)
}
