package agent

import (
	"context"
	"errors"
	"os"
	"runtime/debug"
	"time"

	"golang.org/x/sync/errgroup"
)

// withdrawGrace is the time between the withdrawal of the routes and the end of the BGP sessions. Routers need time to
// apply the withdrawals, and no packets should arrive after the agent has exited.
const withdrawGrace = 500 * time.Millisecond

// A task that fails is restarted after failedDelay, which doubles up to failedDelayMax. It is a problem in the status
// until it has run for failedDelayMax.
const (
	failedDelay    = time.Second
	failedDelayMax = 30 * time.Second
)

// Run runs the agent until ctx ends or the engine fails. Then the engine withdraws the routes, and every task stops. A
// failed task is restarted without affecting the others. Run closes the datapath; the kernel continues to forward. An
// agent runs only once.
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
				a.supervise(ctx, t)
				return nil
			})
		}
	}
	start(rest, a.tasks)
	start(ctx, a.sources)
	systemd := a.reloader.readiness.notifier
	g.Go(func() error { return systemd.Run(rest, a.checkEngine) })
	g.Go(func() error { a.reloadOnSignal(ctx); return nil })
	g.Go(func() error { a.endForRestart(ctx, stop); return nil })
	g.Go(func() error { a.reportReady(ctx); return nil })

	a.log.Info("agent started", "version", a.reloader.version, "config", a.reloader.file, "services", a.configured)
	err := a.engine.Run(ctx)
	if a.anew.Load() {
		systemd.Reloading() // until the new agent is ready
	} else {
		systemd.Stopping()
	}
	if err == nil {
		time.Sleep(withdrawGrace)
	}
	stopRest()
	err = errors.Join(err, g.Wait())
	a.log.Info("agent stopped", "err", err)
	return err
}

// supervise runs a task until ctx ends, and restarts it after each failure.
func (a *Agent) supervise(ctx context.Context, t task) {
	defer a.queue.Flush() // so that the lines before a panic are written
	for delay := failedDelay; ; delay = min(2*delay, failedDelayMax) {
		steady := time.AfterFunc(failedDelayMax, func() { a.problems.set(t.name, nil) })
		start := time.Now()
		err := t.run(ctx)
		steady.Stop()
		if err == nil || ctx.Err() != nil {
			return
		}
		if time.Since(start) > failedDelayMax {
			delay = failedDelay
		}
		a.problems.set(t.name, err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(delay):
		}
	}
}

func (a *Agent) checkEngine() error { return checkEngine(a.engine) }

// reportReady notifies systemd once every part of the configuration has been applied or tried.
func (a *Agent) reportReady(ctx context.Context) {
	select {
	case <-a.engine.Settled():
		a.reloader.readiness.set()
		a.log.Info("agent ready")
		behind := func() time.Time { return a.engine.Progress().Behind }
		releaseAfterStart(ctx, behind, debug.FreeOSMemory)
	case <-ctx.Done():
	}
}

// reloadOnSignal rereads the configuration at each SIGHUP. reload logs the result.
func (a *Agent) reloadOnSignal(ctx context.Context) {
	onHangup(ctx, a.hangup, func() { a.reloader.follow() })
}

// onHangup calls f at each SIGHUP until ctx ends.
func onHangup(ctx context.Context, hup <-chan os.Signal, f func()) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-hup:
			f()
		}
	}
}

// close releases the descriptors of the datapath. The kernel continues to forward.
func (a *Agent) close() {
	a.keys.close()
	err := a.datapath.Close()
	if a.inside != nil {
		err = errors.Join(err, a.inside.Close())
	}
	if err != nil {
		a.log.Warn("datapath not closed", "err", err)
	}
}
