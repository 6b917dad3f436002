package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	ucli "github.com/urfave/cli/v2"
	"golang.org/x/sync/errgroup"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/systemd"
)

// run starts the agent and stays until ctx ends (SIGTERM, SIGINT): then it withdraws every route, confirms that, and
// ends everything else. What the kernel forwards goes on: that is how a restart costs no connection.
func (e *env) run(c *ucli.Context) error {
	name := c.String("config")
	cfg, err := load(name)
	if err == nil {
		err = unsupported(cfg)
	}
	if err != nil {
		return err
	}
	level := new(slog.LevelVar)
	log := newLogger(e.err, cfg.Log, level)
	a, err := newAgent(name, cfg, level, log)
	if err != nil {
		return err
	}
	defer a.close()
	return a.run(c.Context)
}

func newLogger(w io.Writer, c config.Log, level *slog.LevelVar) *slog.Logger {
	level.Set(c.Level)
	o := &slog.HandlerOptions{Level: level}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

// linger is how long the sessions over which the routes were withdrawn stay up: a router needs a moment to act on it, and
// whoever waits for our end takes it that nothing comes here any more.
const linger = 500 * time.Millisecond

// run runs every part. The engine ends first, for it withdraws the routes; then the rest, among it the BGP sessions
// over which that went out. Any part that fails ends the agent the same way.
func (a *agent) run(ctx context.Context) error {
	rest, stopRest := context.WithCancel(context.WithoutCancel(ctx))
	defer stopRest()
	g, rest := errgroup.WithContext(rest)
	for _, p := range a.parts {
		g.Go(func() error {
			if err := p.run(rest); err != nil {
				return fmt.Errorf("%s: %w", p.name, err)
			}
			return nil
		})
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	context.AfterFunc(rest, stop)

	notifier := systemd.New(a.log)
	g.Go(func() error { return notifier.Run(rest, a.alive) })
	g.Go(func() error { return a.file.Run(ctx, a.engine) })
	g.Go(func() error { return a.runKube(ctx) })
	g.Go(func() error { a.reloads(ctx, notifier); return nil })
	g.Go(func() error { a.ready(ctx, notifier); return nil })

	a.log.Info("agent started", "version", version, "config", a.name, "services", len(a.cfg.Services))
	err := a.engine.Run(ctx)
	notifier.Stopping()
	if err == nil {
		time.Sleep(linger)
	}
	stopRest()
	err = errors.Join(err, g.Wait())
	a.log.Info("agent stopped", "err", err)
	return err
}

// alive asks the engine for a sign of life, for systemd's watchdog.
func (a *agent) alive() error {
	_, err := a.behind()
	return err
}

// behind returns since when the kernel lacks something that it is to have; zero: it has all.
func (a *agent) behind() (time.Time, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	st, err := a.engine.Status(ctx)
	return st.Behind, err
}

// ready tells systemd when everything that the configuration asks for has been tried once.
func (a *agent) ready(ctx context.Context, n *systemd.Notifier) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		if st, err := a.engine.Status(ctx); err == nil && st.Settled {
			n.Ready()
			a.log.Info("agent ready", "routes", len(st.Routes))
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// reloads reads the configuration again at each SIGHUP.
func (a *agent) reloads(ctx context.Context, n *systemd.Notifier) {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	for {
		select {
		case <-ctx.Done():
			return
		case <-hup:
			n.Reloading()
			a.reload()
			n.Ready()
		}
	}
}
