package agent

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os/signal"

	"k8s.io/klog/v2"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
)

// Main is "steelyard run": the agent with this configuration file until ctx ends, with its log on w.
func Main(ctx context.Context, configFile, version string, w io.Writer) error {
	mount := mountedVersion(configFile) // before it is read: a change meanwhile is not missed
	cfg, err := load(configFile)
	if err != nil {
		return err
	}
	limitGarbage()
	restart := announceRestart()
	defer signal.Stop(restart)
	level := new(slog.LevelVar)
	log := newLogger(w, cfg.Log, level)
	klog.SetSlogLogger(component(log, "kubernetes"))
	return start(ctx, Options{
		ConfigFile: configFile, Config: cfg, Version: version, Log: log, Level: level, mounted: mount, restart: restart,
	})
}

// start runs an agent as soon as this node has the network that it needs.
func start(ctx context.Context, o Options) (err error) {
	if o.Config, err = waitForNetwork(ctx, o); err != nil {
		if ctx.Err() != nil || errors.Is(err, errRestart) {
			return nil
		}
		return err
	}
	a, err := New(o)
	if err != nil {
		return err
	}
	if err := a.Run(ctx); err != nil || !a.anew.Load() || ctx.Err() != nil { // a stop during a restart is a stop
		return err
	}
	return execute()
}

// newLogger returns a logger in the configured format; its level is that of level, which becomes the configured one.
func newLogger(w io.Writer, c config.Log, level *slog.LevelVar) *slog.Logger {
	level.Set(c.Level)
	o := &slog.HandlerOptions{Level: level}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(w, o))
	}
	return slog.New(slog.NewTextHandler(w, o))
}

// Cleanup is "steelyard cleanup": it removes programs, links, maps, filters and sysctl changes. It fails while an
// agent runs.
func Cleanup(w io.Writer) error {
	log := slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelWarn}))
	return datapath.Cleanup(datapath.DefaultPinPath, datapath.DefaultStateDir, log)
}

// Remains reports whether there is something for Cleanup to remove from the kernel.
func Remains() (bool, error) { return datapath.Remains(datapath.DefaultPinPath) }
