package cli

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/steelyard-lb/steelyard/announce"
	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/announce/l2"
	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/healthd"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/file"
	"github.com/steelyard-lb/steelyard/lb/kube"
)

// agent is everything that runs, wired.
type agent struct {
	name     string // of the configuration file
	cfg      *config.Config
	log      *slog.Logger
	level    *slog.LevelVar
	node     node
	engine   *lb.Engine
	file     *file.Source
	kube     *kube.Source // nil: no cluster
	datapath *datapath.Datapath
	parts    []part
	started  time.Time
	loaded   atomic.Pointer[loadState]
}

// part is one thing that runs as long as the agent does.
type part struct {
	name string
	run  func(context.Context) error
}

// loadState is how the last loading of the configuration went.
type loadState struct {
	at       time.Time // of the configuration in force
	err      string    // why a newer one was refused
	warnings []string
}

// Bounds of the engine's patience: for the first answers of checks, between tries, and for the routes to go at the end.
const (
	settleWithin   = 10 * time.Second
	retryAfter     = 500 * time.Millisecond
	withdrawWithin = 5 * time.Second
)

// newAgent builds everything and starts nothing but the kernel programs, which go on with what an earlier run left.
func newAgent(name string, cfg *config.Config, level *slog.LevelVar, log *slog.Logger) (_ *agent, err error) {
	a := &agent{name: name, cfg: cfg, log: log, level: level, started: time.Now(), file: file.New()}
	a.loaded.Store(&loadState{at: a.started, warnings: cfg.Warnings})
	for _, w := range cfg.Warnings {
		log.Warn("configuration is legal but surely not meant", "reason", w)
	}
	if a.node, err = describe(cfg); err != nil {
		return nil, err
	}
	if err := a.file.Use(cfg); err != nil {
		return nil, err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))

	announcers, peers, err := a.announcers(registry)
	if err != nil {
		return nil, err
	}
	if a.datapath, err = a.openDatapath(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			a.close()
		}
	}()
	registry.MustRegister(a.datapath)

	report := func(h lb.Health) { a.engine.Health(h) }
	prober := healthd.New(healthd.Options{Report: report, Way: a.wayOfCheck, Log: component(log, "health"), Registerer: registry})
	status := func(ctx context.Context) (lb.Status, error) { return a.engine.Status(ctx) }
	metrics := admin.NewMetrics(status)
	registry.MustRegister(metrics)
	sources := []string{file.Name}
	if cfg.Kubernetes != nil {
		if err := a.kubernetes(); err != nil {
			return nil, err
		}
		sources = append(sources, kube.Name)
	}
	a.engine, err = lb.NewEngine(lb.EngineOptions{
		Datapath: a.datapath, Announcer: announcers, Prober: prober, Sources: sources,
		Settle: settleWithin, Retry: retryAfter, Withdraw: withdrawWithin,
		Log: component(log, "engine"), Observe: metrics.Observe,
	})
	if err != nil {
		return nil, err
	}
	drains, err := openDrainer(datapath.DefaultStateDir, a.engine)
	if err != nil {
		return nil, err
	}
	api := admin.New(admin.Options{
		Socket: cfg.Admin.Socket, Listen: cfg.Admin.Listen, Status: status, Peers: peers, Flows: a.datapath.Flows, Explain: a.datapath.Explain, Drain: drains.set, Info: a.info,
		Metrics: metricsHandler(registry), Log: component(log, "admin"),
	})
	a.parts = append(a.parts, part{"datapath", a.datapath.Run}, part{"health checks", prober.Run}, part{"admin API", api.Run})
	return a, nil
}

func component(log *slog.Logger, name string) *slog.Logger { return log.With("component", name) }

func metricsHandler(r *prometheus.Registry) http.Handler {
	return promhttp.HandlerFor(r, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})
}

// announcers returns what is on, as one, and the state of BGP neighbours.
func (a *agent) announcers(registry *prometheus.Registry) (lb.Announcer, func() []lb.PeerStatus, error) {
	on := map[lb.AnnouncerKind]lb.Announcer{}
	peers := func() []lb.PeerStatus { return nil }
	if a.cfg.BGP != nil {
		speaker, err := bgp.New(a.bgpOptions())
		if err != nil {
			return nil, nil, fmt.Errorf("bgp: %w", err)
		}
		registry.MustRegister(speaker)
		on[lb.AnnounceBGP], peers = speaker, speaker.Peers
		a.parts = append(a.parts, part{"bgp", speaker.Run})
	}
	if a.cfg.L2 != nil {
		responder, err := l2.New(l2.Options{Interfaces: a.node.l2Interfaces, Log: component(a.log, "l2")})
		if err != nil {
			return nil, nil, fmt.Errorf("l2: %w", err)
		}
		registry.MustRegister(responder)
		on[lb.AnnounceL2] = responder
		a.parts = append(a.parts, part{"l2", responder.Run})
	}
	return announce.NewMux(on), peers, nil
}

func (a *agent) bgpOptions() bgp.Options {
	c := a.cfg.BGP
	o := bgp.Options{
		ASN: c.ASN, RouterID: a.node.routerID, ListenPort: c.ListenPort, LocalPref: c.LocalPref,
		AggregateV4: c.AggregateV4, AggregateV6: c.AggregateV6, Weighted: c.Weighted,
		NextHopV4: a.node.address4, NextHopV6: a.node.address6, Log: component(a.log, "bgp"),
	}
	for _, x := range c.Communities {
		if standard, ok := x.Standard(); ok {
			o.Communities = append(o.Communities, standard)
		} else if large, ok := x.Large(); ok {
			o.LargeCommunities = append(o.LargeCommunities, large)
		}
	}
	for _, p := range c.Peers {
		o.Peers = append(o.Peers, bgp.Peer{
			Address: p.Address, ASN: p.ASN, Port: p.Port, Password: p.Password.Reveal(), HoldTime: p.HoldTime,
			Multihop: p.Multihop, TTLSecurity: p.TTLSecurity, Source: p.Source, GracefulRestart: p.GracefulRestart,
		})
	}
	return o
}

func (a *agent) openDatapath() (*datapath.Datapath, error) {
	var mode datapath.Mode
	if err := mode.UnmarshalText([]byte(a.cfg.Datapath.Mode)); err != nil {
		return nil, err
	}
	return datapath.Open(datapath.Options{
		Interfaces: a.node.interfaces, Mode: mode, MaxFlows: a.cfg.Datapath.MaxFlows, SNATPorts: a.cfg.Datapath.SNATPorts,
		TunnelPort: a.cfg.Datapath.TunnelPort, TunnelSources: a.cfg.Datapath.TunnelSources,
		Timeouts: datapath.Timeouts(a.cfg.Datapath.Timeouts), Delivers: a.cfg.Kubernetes != nil,
		PinPath: datapath.DefaultPinPath, StateDir: datapath.DefaultStateDir, Log: component(a.log, "datapath"),
	})
}

// wayOfCheck is how a check of a server that has the VIP itself gets there.
func (a *agent) wayOfCheck(c lb.Check) (healthd.Way, error) {
	mark, from, err := a.datapath.ProbeWay(c.VIP, c.Target.Addr(), c.Method, c.Encap)
	return healthd.Way{Mark: mark, From: from}, err
}

// close gives back what newAgent took; the kernel goes on forwarding.
func (a *agent) close() {
	if err := a.datapath.Close(); err != nil {
		a.log.Warn("datapath not closed", "err", err)
	}
}

// info is what the API says of the agent beside the engine's status.
func (a *agent) info() admin.Info {
	l := a.loaded.Load()
	i := admin.Info{
		Node: a.node.name, Version: version, Started: a.started, Config: a.name,
		Loaded: l.at, LoadError: l.err, Warnings: l.warnings,
	}
	for _, x := range a.datapath.Interfaces() {
		state := admin.Interface{Name: x.Name, Mode: string(x.Mode), Hook: x.Hook}
		if x.Mode == "" {
			state.Err = "gone; it is attached again when it comes back"
		}
		i.Interfaces = append(i.Interfaces, state)
	}
	return i
}

// unsupported returns what a valid configuration asks for and this version cannot do: nothing is left out silently.
func unsupported(cfg *config.Config) error {
	var errs []error
	missing := func(format string, args ...any) {
		errs = append(errs, fmt.Errorf("not in this version: "+format, args...))
	}
	if cfg.L2 != nil && len(cfg.L2.Members) > 0 {
		missing("l2.members: every appliance with [l2] answers for all of its addresses, so only one may have them")
	}
	if cfg.BGP != nil {
		for _, p := range cfg.BGP.Peers {
			if p.BFD {
				missing("bgp.peers: bfd (peer %s)", p.Address)
			}
		}
	}
	return errors.Join(errs...)
}
