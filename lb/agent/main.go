package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/datapath/inside"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/events"
	"github.com/steelyard-lb/steelyard/lb/kube/proxy"
	"github.com/steelyard-lb/steelyard/lb/logqueue"
)

// Schema is the version of the layout of the tables in the kernel.
const Schema = datapath.Schema

// Main is "steelyard run": it runs the agent with this configuration file until ctx ends, and logs to w.
func Main(ctx context.Context, configFile, version string, w io.Writer) error {
	hangup, restart := catch(syscall.SIGHUP), catch(syscall.SIGUSR1)
	defer signal.Stop(hangup)
	defer signal.Stop(restart)
	mount := mountedVersion(configFile) // before it is read, so that no change is missed
	cfg, err := load(configFile)
	if err != nil {
		return err
	}
	limitGarbage()
	level := new(slog.LevelVar)
	log, queue := openLog(w, cfg.Log, level)
	history, log := openHistory(keepDir(), log)
	defer queue.Flush()
	defer history.Flush()
	klog.SetSlogLogger(component(log, "kubernetes"))
	return start(ctx, Options{
		ConfigFile: configFile, Config: cfg, Version: version, Log: log, Level: level,
		mounted: mount, hangup: hangup, restart: restart, queue: queue, history: history,
	})
}

// catch returns a channel that buffers one signal, so that the signal does not end the process, and one that arrives
// during startup is handled afterwards.
func catch(s os.Signal) chan os.Signal {
	c := make(chan os.Signal, 1)
	signal.Notify(c, s)
	return c
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
	o.history.Flush()
	o.queue.Flush()
	return execute()
}

// openLog returns a logger in the configured format, which never blocks, and the queue of its lines. It logs at level,
// which is set to the configured level. From then on, a pipe without a reader does not end the process.
func openLog(w io.Writer, c config.Log, level *slog.LevelVar) (*slog.Logger, *logqueue.Queue) {
	level.Set(c.Level)
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) // exec checks' programs would inherit signal.Ignore
	handler := func(to io.Writer) slog.Handler { return logHandler(to, c.Format, level) }
	if toJournal(w) {
		plain := handler
		handler = func(to io.Writer) slog.Handler { return newJournal(to, plain) }
	}
	queue := logqueue.New(w, func(w io.Writer, lines int) error {
		r := slog.NewRecord(time.Now(), slog.LevelWarn, "log incomplete", 0)
		r.Add("reason", logqueue.Lost(lines))
		return handler(w).Handle(context.Background(), r)
	})
	log := slog.New(handler(queue))
	// Otherwise net/http writes to stderr, for any number of frames from a server, and blocks while nobody reads it.
	stdlog.SetOutput(slog.NewLogLogger(component(log, "http").Handler(), slog.LevelDebug).Writer())
	return log, queue
}

// keepDir returns the state directory that survives a reboot (systemd.exec(5)), or else the runtime directory.
func keepDir() string { return cmp.Or(os.Getenv("STATE_DIRECTORY"), datapath.DefaultStateDir) }

// openHistory returns the history of events in a directory, and a logger that also writes to it.
func openHistory(dir string, log *slog.Logger) (*events.History, *slog.Logger) {
	h, err := events.Open(dir)
	log = slog.New(h.Handler(log.Handler()))
	if err != nil {
		log.Warn("previous events not read", "err", err)
	}
	return h, log
}

// keptIn lists the directories in which an agent may have stored its state: the systemd unit's, and the default.
var keptIn = []string{"/var/lib/steelyard", datapath.DefaultStateDir}

// Events returns the events that the last agent has stored, for use while none runs.
func Events(f events.Filter) (all []events.Event, err error) {
	for _, dir := range keptIn {
		if all, err = events.Read(dir, f); len(all) > 0 || err != nil {
			break
		}
	}
	return all, err
}

func logHandler(w io.Writer, format string, level slog.Leveler) slog.Handler {
	o := &slog.HandlerOptions{Level: level}
	if format == "json" {
		return slog.NewJSONHandler(w, o)
	}
	return slog.NewTextHandler(w, o)
}

// Cleanup is "steelyard cleanup": it removes programs, links, maps, filters and sysctl changes. It fails while an
// agent runs, and if no kube-proxy would serve the node's Services, unless withoutProxy is true.
func Cleanup(w io.Writer, withoutProxy bool) error {
	log := slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if !withoutProxy && inside.Serves(insidePins(datapath.DefaultPinPath)) {
		other, err := proxy.Present()
		if err == nil && other == "" {
			err = errors.New("no program would serve this node's Services, which the agent's programs serve: start " +
				"kube-proxy first, or add --without-proxy")
		}
		if err != nil {
			return err
		}
	}
	return datapath.Cleanup(datapath.DefaultPinPath, datapath.DefaultStateDir, log, func() error {
		err := inside.Cleanup(insidePins(datapath.DefaultPinPath), log)
		for _, dir := range keptIn {
			err = errors.Join(err, Options{KeepDir: dir}.orders().Remove())
		}
		return err
	})
}

// watchMemory is what Watch may use, in bytes, before it collects garbage more often: the runtime and the state of all
// packages take most of it.
const watchMemory = 16 << 20

// Watch is "steelyard proxy watch": while the agent is away, it attaches the service proxy's programs to the interfaces
// of new pods, until ctx ends.
func Watch(ctx context.Context, w io.Writer) {
	debug.SetMemoryLimit(watchMemory)
	debug.FreeOSMemory()
	path := cmp.Or(os.Getenv("PIN_DIRECTORY"), datapath.DefaultPinPath)
	inside.Watch(ctx, insidePins(path), slog.New(slog.NewTextHandler(w, nil)))
}

// Remains reports whether there is something for Cleanup to remove from the kernel.
func Remains() (bool, error) { return datapath.Remains(datapath.DefaultPinPath) }

// Left says what the programs of a stopped agent still do, and for how long routers will send packets here. It returns
// "" if no programs are left.
func Left() (string, error) {
	left, err := datapath.ReadRemainder(datapath.DefaultPinPath)
	if err != nil || left == nil {
		return "", err
	}
	vips := make([]string, len(left.VIPs))
	for i, vip := range left.VIPs {
		vips[i] = vip.String()
	}
	text := fmt.Sprintf("the last agent's programs have forwarded for %s without health checks for about %s",
		cmp.Or(admin.List(vips), "no address"), left.Away.Round(time.Second))
	for _, dir := range keptIn {
		last, found, err := historyOf(Options{KeepDir: dir}).Last()
		if err != nil || !found {
			continue
		}
		c, err := reload(nil, "the last file in force", []byte(last))
		if err != nil || c.BGP == nil {
			break
		}
		if rest := c.BGP.RestartTime - left.Away; rest > 0 {
			rest = rest.Round(time.Second)
			return fmt.Sprintf("%s; routers with graceful restart drop the routes in %s", text, rest), nil
		}
		return fmt.Sprintf("%s; restart_time has passed, so routers have dropped the routes", text), nil
	}
	return text, nil
}
