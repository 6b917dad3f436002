package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// withdrawGrace is the time between the withdrawal of the routes and the end of the BGP sessions: routers need time to
// apply the withdrawals, and after the exit of the agent no more packets should arrive.
const withdrawGrace = 500 * time.Millisecond

// Run runs the agent until ctx ends or a task fails. Then the engine withdraws the routes, and every task stops. Run
// closes the datapath; the kernel continues to forward. An agent runs once.
func (a *Agent) Run(ctx context.Context) error {
	defer a.close()
	rest, stopRest := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRest()
	g, rest := errgroup.WithContext(rest)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	context.AfterFunc(rest, stop)
	start := func(ctx context.Context, tasks []task) {
		for _, t := range tasks {
			g.Go(func() error {
				if err := t.run(ctx); err != nil {
					return fmt.Errorf("%s: %w", t.name, err)
				}
				return nil
			})
		}
	}
	start(rest, a.tasks)
	start(ctx, a.sources)
	systemd := a.reloader.readiness.notifier
	g.Go(func() error { return systemd.Run(rest, a.checkEngine) })
	g.Go(func() error { a.reloadOnSignal(ctx); return nil })
	g.Go(func() error { a.reportReady(ctx); return nil })

	a.log.Info("agent started", "version", a.reloader.version, "config", a.reloader.file,
		"services", len(a.reloader.running.Services))
	err := a.engine.Run(ctx)
	systemd.Stopping()
	if err == nil {
		time.Sleep(withdrawGrace)
	}
	stopRest()
	err = errors.Join(err, g.Wait())
	a.log.Info("agent stopped", "err", err)
	return err
}

// checkEngine returns an error when the engine does not respond.
func (a *Agent) checkEngine() error { return checkEngine(a.engine) }

// reportReady notifies systemd once every part of the configuration was applied or tried.
func (a *Agent) reportReady(ctx context.Context) {
	select {
	case <-a.engine.Settled():
		a.reloader.readiness.set()
		a.log.Info("agent ready")
	case <-ctx.Done():
	}
}

// reloadOnSignal reads the configuration again at each SIGHUP. reload logs the result.
func (a *Agent) reloadOnSignal(ctx context.Context) {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	for {
		select {
		case <-ctx.Done():
			return
		case <-hup:
			a.reloader.reload()
		}
	}
}

// close releases the descriptors of the datapath. The kernel continues to forward.
func (a *Agent) close() {
	if err := a.datapath.Close(); err != nil {
		a.log.Warn("datapath not closed", "err", err)
	}
}
