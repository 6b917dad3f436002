package agent

import (
	"context"
	"log/slog"
	"path/filepath"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/file"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/state"
)

// reloader rereads the configuration file. Its reload may be called from any goroutine.
type reloader struct {
	file       string
	version    string
	started    time.Time
	running    *config.Config // as it was at startup; the sections that needRestart names stay active
	loaded     *config.Config // as last loaded
	servesSelf bool           // the loaded programs can serve a backend that is this machine
	services   *file.Source
	level      *slog.LevelVar
	log        *slog.Logger
	readiness  *readiness
	setKeys    func(datapath.TunnelKeys) error // set when the datapath is open
	drains     *drainStore                     // set when the engine runs
	configure  func(*config.Config) error      // of BGP; nil if it is off
	setPools   func([]kube.Pool)               // of the cluster, set when it is connected; may be nil
	setProbing func(kube.Probing)              // likewise
	// setMembers activates the members and the secrets of [l2].
	setMembers func(running, next *config.Config) error
	setAccess  func(admin.Access)                       // over TCP; nil until the API exists
	status     func(context.Context) (lb.Status, error) // with traffic; nil until the engine exists
	// flows lists flows. It is set when the datapath is open; if it is nil, flows are not counted.
	flows   func(context.Context, lb.FlowFilter) ([]lb.FlowStatus, bool, error)
	state   atomic.Pointer[loadState]
	history *state.History // of active files
	// kept is called with the error, or nil, of adding an active file to the history.
	kept func(error)
}

// loadState is the result of the last load of the configuration.
type loadState struct {
	at       time.Time // when the active configuration was loaded
	text     string    // of the active configuration
	refused  string    // why a later one was rejected, or ""
	restart  []string  // changed sections that are read only at startup
	warnings []string
	empty    bool // the active file is empty
	pools    []lb.Pool
	// refusedText is the text of the rejected file, as far as it could be read.
	refusedText string
	trial       *trial // nil if the active configuration is confirmed
}

func newReloader(o Options, services *file.Source, r *readiness) *reloader {
	running := *withoutServices(o.Config)
	l := &reloader{
		file: o.ConfigFile, version: o.Version, started: time.Now(), services: services,
		running: &running, loaded: o.Config,
		servesSelf: o.Config.Kubernetes != nil || servesItself(o.Config, true),
		level:      o.Level, log: o.Log, readiness: r, kept: o.problem("active files not stored"),
		history: historyOf(o),
	}
	now := &loadState{
		at: time.Now(), text: o.Config.Text, warnings: o.Config.Warnings, empty: o.Config.Empty,
		pools: file.Pools(o.Config),
	}
	l.state.Store(now)
	l.keep(now)
	return l
}

// historyOf returns the history of active files.
func historyOf(o Options) *state.History {
	return state.NewHistory(filepath.Join(o.KeepDir, "config"), ".toml")
}

// withoutServices returns a copy without Services and Text, which take most of the memory and are stored elsewhere.
func withoutServices(c *config.Config) *config.Config {
	sections := *c
	sections.Services, sections.Text = nil, ""
	return &sections
}

// reload reads the configuration file again and applies it. An invalid or unsupported configuration changes nothing;
// the error lists every problem. force is guard's word, or "".
func (l *reloader) reload(force string) (done admin.Reloaded, err error) {
	l.readiness.reloading(func() { done, err = l.apply(force) })
	releaseMemory()
	return done, err
}

func (l *reloader) apply(force string) (admin.Reloaded, error) {
	text, err := config.Read(l.file)
	var done admin.Reloaded
	if err == nil {
		done, err = l.activate(text, force, nil, nil)
	}
	if err != nil {
		l.reject(err, string(text))
		l.log.Error("configuration rejected; the running one stays active", "config", l.file, "err", err)
	}
	return done, err
}

// activate applies the text of a configuration, and ends a trial. If it begins a trial itself, the history and the
// drains wait until it is confirmed. If store is not nil, activate calls it with a text that can be applied. On an
// error, the running configuration stays active.
func (l *reloader) activate(text []byte, force string, begin *trial, store func([]byte) error) (admin.Reloaded, error) {
	cfg, err := reload(l.loaded, l.file, text)
	var plan *file.Plan
	if err == nil {
		plan, err = l.permit(cfg, force)
	}
	if err == nil && len(l.running.Datapath.TunnelKeys) > 0 && len(cfg.Datapath.TunnelKeys) > 0 {
		err = l.setKeys(*fileKeys(cfg))
	}
	if err == nil {
		err = l.usePools(cfg)
	}
	if err == nil && l.setMembers != nil {
		err = l.setMembers(l.running, cfg)
	}
	if err == nil && store != nil {
		err = store(text)
	}
	if err != nil {
		return admin.Reloaded{}, err
	}
	if l.setProbing != nil {
		l.setProbing(probing(cfg))
		l.running.Probe = cfg.Probe
	}
	changes := l.changes(plan, cfg) // before their connections end
	if l.drains != nil && begin == nil && !l.goesBack(cfg.Text) {
		plan.Then = func() { l.drains.after(changes) }
	}
	l.services.Apply(plan)
	l.loaded = cfg
	l.level.Set(cfg.Log.Level)
	if l.setAccess != nil {
		l.setAccess(accessOf(cfg))
	}
	if l.configure != nil && cfg.BGP != nil {
		if err := l.configure(cfg); err != nil { // the next change of the routes retries what failed
			l.log.Error("changed bgp options not applied", "err", err)
		}
	}
	changed := needRestart(l.running, cfg)
	for _, section := range changed {
		l.log.Warn("changed section takes effect at the next start", "section", section)
	}
	warnings := cfg.Warnings
	if cfg.Datapath.MaxFlows != l.running.Datapath.MaxFlows {
		warnings = append(slices.Clip(warnings), sizeKept)
		l.log.Warn(sizeKept)
	}
	next := &loadState{
		at: time.Now(), text: cfg.Text, warnings: warnings, restart: changed, empty: cfg.Empty, pools: file.Pools(cfg),
		trial: begin,
	}
	if earlier := l.state.Swap(next).trial; earlier != nil {
		earlier.timer.Stop()
	}
	if begin == nil {
		l.keep(next)
	}
	l.log.Info("configuration reloaded", "config", l.file, "services", len(cfg.Services))
	for _, c := range changes {
		l.log.Info("configuration changed", "change", c.String())
	}
	return admin.Reloaded{
		Config: l.file, Loaded: next.at, Changes: changes, Warnings: warnings, NeedRestart: changed,
	}, nil
}

// follow is reload without a force word.
func (l *reloader) follow() (admin.Reloaded, error) { return l.reload("") }

// reject makes the status report a rejected file.
func (l *reloader) reject(err error, text string) {
	next := *l.state.Load()
	next.refused, next.refusedText = err.Error(), text
	l.state.Store(&next)
}

// plan returns the plan for activating a configuration.
func (l *reloader) plan(cfg *config.Config) (*file.Plan, error) {
	if err := l.refuseEmpty(cfg); err != nil {
		return nil, err
	}
	if !l.servesSelf && servesItself(cfg, false) {
		return nil, config.Errors{{
			File: l.file, Problem: "a backend is this machine, which the loaded programs cannot serve",
			Hint: "run \"steelyard restart\"; no connection ends",
		}}
	}
	return l.services.Plan(cfg)
}

// sizeKept is the warning about a changed max_flows.
const sizeKept = "[datapath] max_flows: the flow tables in the kernel keep their size across a restart; a new size " +
	"needs \"steelyard cleanup\" while no agent runs, which ends all connections: drain the node first"

// refuseEmpty returns an error if an empty file replaces one that is not empty, because it would withdraw every
// address. An editor on a full disk can leave such a file.
func (l *reloader) refuseEmpty(next *config.Config) error {
	if !next.Empty || l.state.Load().empty {
		return nil
	}
	return config.Errors{{
		File: l.file, Problem: "the file is empty", Hint: "to remove all services, leave a comment in it",
	}}
}

// usePools activates a configuration's pools for the cluster's Services.
func (l *reloader) usePools(cfg *config.Config) error {
	if l.setPools == nil || cfg.Kubernetes == nil || len(cfg.Pools) == 0 ||
		reflect.DeepEqual(l.running.Pools, cfg.Pools) {
		return nil
	}
	pools, err := poolsOf(cfg)
	if err != nil {
		return err
	}
	l.setPools(pools)
	l.running.Pools = cfg.Pools
	return nil
}

// needRestart returns the sections that differ and that are read only at startup.
func needRestart(running, next *config.Config) []string {
	var changed []string
	for _, s := range []struct {
		name string
		a, b any
	}{
		{"node", running.Node, next.Node},
		{"datapath", atStart(running.Datapath), atStart(next.Datapath)},
		{"bgp", running.BGP != nil, next.BGP != nil},
		{"l2", l2AtStart(running.L2), l2AtStart(next.L2)},
		{"admin", adminAtStart(running.Admin), adminAtStart(next.Admin)},
		{"kubernetes", running.Kubernetes, next.Kubernetes},
		{"probe", running.Probe, next.Probe},
		{"pool, for Services of the cluster", clusterPools(running), clusterPools(next)},
	} {
		if !reflect.DeepEqual(s.a, s.b) {
			changed = append(changed, s.name)
		}
	}
	return changed
}

// atStart returns what is read only at startup. For the tunnel keys, that is whether there are any.
func atStart(c config.Datapath) config.Datapath {
	if len(c.TunnelKeys) > 0 {
		c.TunnelKeys = []config.Secret{}
	}
	return c
}

// adminAtStart returns what is read only at startup.
func adminAtStart(a config.Admin) config.Admin {
	a.Token, a.Allow = config.Secret{}, nil
	return a
}

// l2AtStart returns the settings that are read only at startup. For members and secrets it only matters whether there
// are any.
func l2AtStart(l *config.L2) any {
	if l == nil {
		return nil
	}
	c := *l
	c.Members, c.Secrets = nil, nil
	return []any{c, len(l.Members) > 0, len(l.Secrets) > 0}
}

// clusterPools returns the pools that the Kubernetes source reads.
func clusterPools(c *config.Config) []config.Pool {
	if c.Kubernetes == nil {
		return nil
	}
	return c.Pools
}
