package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/systemd"
)

// waitInterval is how often the agent checks for the network it waits for.
const waitInterval = 500 * time.Millisecond

// errRestart ends the wait because another agent follows.
var errRestart = errors.New("the agent is restarting")

// waiting is the agent while this node lacks a part of the network that the configuration leaves to be discovered: a
// default route, or an IPv4 address. It answers the API, and anything that a previous agent left in the kernel keeps
// working.
type waiting struct {
	log  *slog.Logger
	file string

	mu   sync.Mutex // guards all below
	cfg  *config.Config
	lack error
}

// waitForNetwork returns the configuration, possibly from a later reload, once the network that it needs exists. It
// fails when ctx ends.
func waitForNetwork(ctx context.Context, o Options) (*config.Config, error) {
	w := &waiting{log: o.Log, file: o.ConfigFile, cfg: o.Config}
	if w.ready() {
		return w.cfg, nil
	}
	w.log.Error("waiting for the network", "err", w.lack)
	notifier := systemd.New(o.Log)
	notifier.Ready() // systemd would end a start that takes longer than TimeoutStartSec
	notifier.Status("waiting for the network: " + w.lack.Error())
	up, stop := context.WithCancel(ctx)
	defer stop()
	g, up := errgroup.WithContext(up)
	g.Go(func() error { return w.serve(up, o) })
	g.Go(func() error { return notifier.Run(up, func() error { return nil }) })
	g.Go(func() error { w.reloadOnSignal(up, o.hangup); return nil })
	tick := time.NewTicker(waitInterval)
	defer tick.Stop()
	for ctx.Err() == nil && !w.ready() {
		select {
		case <-ctx.Done():
		case <-o.restart:
			return nil, errRestart
		case <-tick.C:
		}
	}
	stop()
	if err := errors.Join(ctx.Err(), g.Wait()); err != nil {
		return nil, err
	}
	w.checkAgain()
	w.log.Info("network available")
	notifier.Status("")
	return w.cfg, nil
}

// ready reports whether nothing is missing that may still appear. New reports other problems.
func (w *waiting) ready() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, err := describe(w.cfg, thisHost{})
	if !mayCome(err) {
		return true
	}
	w.lack = err
	return false
}

// checkAgain replaces the warnings, which were about the machine without its network. It does not activate changes of
// the file; only a reload does.
func (w *waiting) checkAgain() {
	if c, err := load(w.file); err == nil {
		w.cfg.Warnings = c.Warnings
	}
}

// serve answers the API.
func (w *waiting) serve(ctx context.Context, o Options) error {
	c, problems, started := o.Config, newProblems(w.log), time.Now()
	return admin.New(admin.Options{
		Socket: c.Admin.Socket, Listen: c.Admin.Listen, Hosts: c.Admin.Hosts, Problem: problems.set,
		Access: accessOf(c), TLSCert: c.Admin.TLSCert, TLSKey: c.Admin.TLSKey,
		Status:   func(context.Context) (lb.Status, error) { return lb.Status{}, nil },
		StatusOf: func(context.Context, netip.Addr) (lb.Status, error) { return lb.Status{}, nil },
		Peers:    func() []lb.PeerStatus { return nil },
		Sent:     func(netip.Addr) ([]lb.SentRoute, bool) { return nil, false },
		Flows: func(context.Context, lb.FlowFilter) ([]lb.FlowStatus, bool, error) {
			return nil, false, w.missing()
		},
		Explain: func(lb.Question) (lb.Explanation, error) { return lb.Explanation{}, w.missing() },
		Trace: func(context.Context, lb.TraceFilter, func([]lb.TraceEvent) error) error {
			return w.missing()
		},
		Drain:   func(context.Context, lb.DrainTarget, bool) (lb.Drains, error) { return lb.Drains{}, w.missing() },
		Reload:  func(string) (admin.Reloaded, error) { return w.reload() },
		Diff:    func(string, []byte) (admin.Reloaded, error) { return admin.Reloaded{}, w.missing() },
		Text:    w.text,
		Restart: w.missing, Events: o.history.After,
		Info: func() admin.Info {
			return admin.Info{
				Node: c.Node.Name, Version: o.Version, Started: started, Config: w.file, Loaded: started,
				Waiting: w.missing().Error(), Findings: problems.findings(),
			}
		},
		Metrics: http.NotFoundHandler(), Log: component(w.log, "admin"),
	}).Run(ctx)
}

// text returns the text of the file to be activated.
func (w *waiting) text() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cfg.Text
}

// missing returns what the agent waits for.
func (w *waiting) missing() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return fmt.Errorf("waiting for the network: %w", w.lack)
}

// reload reads the file again, because it may now name what was not found.
func (w *waiting) reload() (admin.Reloaded, error) {
	c, err := load(w.file)
	if err != nil {
		return admin.Reloaded{}, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cfg = c
	return admin.Reloaded{Config: w.file, Loaded: time.Now(), Warnings: c.Warnings}, nil
}

func (w *waiting) reloadOnSignal(ctx context.Context, hup <-chan os.Signal) {
	onHangup(ctx, hup, func() {
		if _, err := w.reload(); err != nil {
			w.log.Error("configuration rejected", "err", err)
		}
	})
}
