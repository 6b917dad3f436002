package agent

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/datapath"
	"github.com/steelyard-lb/steelyard/healthd"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/agent/machine"
	"github.com/steelyard-lb/steelyard/lb/events"
	"github.com/steelyard-lb/steelyard/lb/file"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/kube/proxy"
	"github.com/steelyard-lb/steelyard/lb/logqueue"
	"github.com/steelyard-lb/steelyard/lb/state"
	"github.com/steelyard-lb/steelyard/systemd"
)

// Options are the inputs of an agent.
type Options struct {
	ConfigFile string         // read by New when Config is nil, and by each reload
	Config     *config.Config // if nil, New reads ConfigFile
	Version    string         // reported by the API
	Log        *slog.Logger   // required
	Level      *slog.LevelVar // Log's level, set by each reload if not nil
	PinPath    string         // directory of the pinned BPF objects; default: PIN_DIRECTORY or datapath.DefaultPinPath
	StateDir   string         // state that outlives the agent but not a reboot; default: datapath.DefaultStateDir
	KeepDir    string         // state that survives a reboot; default: STATE_DIRECTORY (systemd.exec(5)) or StateDir

	queue    *logqueue.Queue  // Log's queue; may be nil
	history  *events.History  // which Log fills; set by complete if nil
	mounted  string           // mountedVersion of ConfigFile before it was read
	hangup   chan os.Signal   // SIGHUP: reload; set by New if nil
	restart  chan os.Signal   // SIGUSR1: a supervisor starts another agent; may be nil
	network  *machine.Network // read by New
	problems *problems        // set by New
	api      *apiDialer       // set by complete
	boundary *lb.Boundary     // set by complete, unless a test has set it
	// setLabels is called with this node's labels; set by New.
	setLabels func(map[string]string)

	open func(datapath.Options) (forwarder, error) // openDatapath if nil; tests use one in memory
	// openInside is called if the agent shall be the service proxy or drain one. Tests without one leave it nil.
	openInside func(o Options, uplinks func() []datapath.InterfaceStatus, drain bool) (insider, error)
	// Set by connect.
	inside   insider // nil if the agent neither is nor drains the service proxy
	draining bool    // inside has given back
	notProxy bool    // the configuration wants the agent as service proxy, but it is not
}

// before is the Before hook of each Boundary. It is nil except in programs built with the tag "faults" (faults.go).
var before func(lb.Part, string)

// complete fills in the defaults, and reads the configuration if Config is nil.
func (o Options) complete() (Options, error) {
	o.PinPath = cmp.Or(o.PinPath, os.Getenv("PIN_DIRECTORY"), datapath.DefaultPinPath)
	o.StateDir = cmp.Or(o.StateDir, datapath.DefaultStateDir)
	o.KeepDir = cmp.Or(o.KeepDir, os.Getenv("STATE_DIRECTORY"), o.StateDir)
	o.api = new(apiDialer)
	if o.boundary == nil {
		o.boundary = &lb.Boundary{Before: before}
	}
	if o.history == nil {
		o.history, o.Log = openHistory(o.KeepDir, o.Log)
	}
	o.boundary.Log = o.Log
	if o.open == nil {
		o.open, o.openInside = openDatapath, openInside
	}
	if o.hangup == nil {
		o.hangup = catch(syscall.SIGHUP)
	}
	if o.Level == nil {
		o.Level = new(slog.LevelVar)
	}
	if o.Config == nil {
		var err error
		o.mounted, o.restart = mountedVersion(o.ConfigFile), catch(syscall.SIGUSR1)
		if o.Config, err = load(o.ConfigFile); err != nil {
			return o, err
		}
	}
	if o.Config.Kubernetes != nil {
		o.api.servers = o.Config.Kubernetes.APIServers
	}
	return o, nil
}

// Agent is the daemon with all its parts, created by New.
type Agent struct {
	log      *slog.Logger
	engine   *lb.Engine
	datapath io.Closer
	inside   io.Closer // nil if another program is the service proxy
	reloader *reloader
	keys     *clusterKeys // nil without a cluster, or with keys from a file
	// configured is the number of services in the file at startup.
	configured int
	sources    []task // run until the routes are about to be withdrawn
	tasks      []task // run until the routes are withdrawn
	problems   *problems
	queue      *logqueue.Queue
	keepRoutes func() // before a restart
	restarts   chan struct{}
	hangup     chan os.Signal // to reload
	announced  chan os.Signal // a supervisor restarts the agent
	anew       atomic.Bool    // another agent will follow in this process
}

// task is a component that runs for the life of the agent.
type task struct {
	name string
	run  func(context.Context) error
}

// Times of the engine: how long the first announcement waits for the first result of every check, the delay between
// retries, and how long shutdown waits for the routes to be withdrawn.
const (
	settleTimeout   = 10 * time.Second
	retryDelay      = 500 * time.Millisecond
	withdrawTimeout = 5 * time.Second
)

// New creates an agent. It loads and attaches the kernel programs, which continue with the state of the previous run,
// and starts nothing else.
func New(o Options) (*Agent, error) {
	o, err := o.complete()
	if err != nil {
		return nil, err
	}
	for _, w := range o.Config.Warnings {
		o.Log.Warn("configuration warning", "reason", w)
	}
	for _, dir := range []string{o.StateDir, o.KeepDir} {
		if err := state.Private(dir); err != nil {
			return nil, err
		}
	}
	o.problems = newProblems(o.Log)
	services, keep := openFileSource(o)
	offered := o.Config.Text
	var refused error
	if o.Config, refused, err = chooseStart(o, services); err != nil {
		return nil, err
	}
	facts, err := describe(o.Config, thisHost{})
	if err != nil {
		return nil, err
	}
	if o.network, err = machine.Read(); err != nil {
		return nil, err
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	announcers, err := newAnnouncers(o.Config, facts, o.KeepDir, registry, o.boundary, o.Log)
	if err != nil {
		return nil, err
	}
	a := &Agent{log: o.Log, configured: len(o.Config.Services), tasks: append(announcers.tasks, keep),
		problems: o.problems, queue: o.queue, keepRoutes: announcers.keepRoutes,
		restarts: make(chan struct{}, 1), announced: o.restart, hangup: o.hangup}
	a.reloader = newReloader(o, services, newReadiness(systemd.New(o.Log)))
	if refused != nil {
		a.reloader.reject(refused, offered)
	}
	a.reloader.configure = announcers.configure
	dpOptions := datapathOptions(o, facts)
	if a.keys, err = openClusterKeys(o); err != nil {
		return nil, err
	}
	if a.keys != nil {
		dpOptions.TunnelKeys, dpOptions.HashSeed = a.keys.keys, a.keys.seed
		a.keys.changed = func(k kube.Keys) { announcers.members.setClusterKeys(o.Config, k) }
		if a.keys.known != nil {
			a.keys.changed(*a.keys.known)
		}
	}
	dp, err := o.open(dpOptions)
	if err != nil {
		a.keys.close()
		return nil, err
	}
	a.datapath, a.reloader.setKeys = dp, dp.SetTunnelKeys
	a.reloader.setMembers, a.reloader.flows = announcers.members.reload, dp.Flows
	announcers.require(func(name string) bool { return forwards(dp.Interfaces(), name) })
	registry.MustRegister(dp)
	if a.keys != nil {
		a.tasks = append(a.tasks, a.keys.task(dp.SetTunnelKeys))
	}
	if err := a.connect(o, facts, services, announcers, dp, registry); err != nil {
		a.close()
		return nil, err
	}
	return a, nil
}

// connect creates the engine and everything that reads from it: the drain store, the cluster and the admin API.
func (a *Agent) connect(
	o Options, facts node, services *file.Source, announcers announcers, dp forwarder,
	registry *prometheus.Registry,
) error {
	relay := new(healthRelay)
	verdicts := openVerdictStore(o.StateDir, component(o.Log, "health"), a.problems)
	prober := healthd.New(healthd.Options{
		Report: relay.report, Way: checkPath(dp), Log: component(o.Log, "health"), Registerer: registry,
		Earlier: verdicts.health, Boundary: o.boundary,
	})
	calls := admin.NewCallMetrics()
	sources := []string{file.Name}
	if o.Config.Kubernetes != nil {
		sources = append(sources, kube.Name)
	}
	routeChanged := func(lb.RouteStatus) {}
	var err error
	a.engine, err = lb.NewEngine(lb.EngineOptions{
		Datapath: dp, Announcer: announcers.all, Prober: prober, Sources: sources,
		Settle: settleTimeout, Retry: retryDelay, Withdraw: withdrawTimeout,
		Grace: announcers.grace,
		Log:   o.Log, Observe: calls.Observe, InEffect: calls.InEffect,
		RouteChanged: func(r lb.RouteStatus) { routeChanged(r) },
		Boundary:     o.boundary,
	})
	if err != nil {
		return err
	}
	dp.OnFault(a.engine.Faults)
	rates := &rates{read: dp.Traffic, readHandshakes: dp.Handshakes, log: component(o.Log, "datapath")}
	status := func(ctx context.Context) (lb.Status, error) {
		st, err := a.engine.Status(ctx)
		rates.mark(&st, time.Now(), prober.Times)
		return announcers.seen(st), err
	}
	statusOf := func(ctx context.Context, vip netip.Addr) (lb.Status, error) {
		st, err := a.engine.StatusOf(ctx, vip)
		if len(st.Backends) > 0 {
			rates.mark(&st, time.Now(), prober.Times)
		}
		return announcers.seen(st), err
	}
	registry.MustRegister(calls, admin.NewStateMetrics(status, a.reloader.pools), admin.NewPanicMetrics(o.boundary))
	sink := newRefuser(a.engine, o.network, o.boundary, component(o.Log, "addresses"))
	a.sources = append(a.sources, sourceTask("services of the file", services, sink))
	trusted := openCaution(sink, o.StateDir, a.problems, component(o.Log, "agent"))
	relay.deliverTo(func(h lb.Health) { a.engine.Health(trusted.health(h)) })
	a.tasks = append(a.tasks, task{"addresses of the machine", sink.watch})
	drains, err := openDrainStore(o.StateDir, a.engine, a.problems)
	if err != nil {
		a.problems.set("drains of the previous run not restored", err)
	}
	a.reloader.drains = drains
	var inCluster func() *admin.Cluster
	var waiting func() []lb.ServiceStatus
	var nodeProxy admin.Proxy
	var rules func() []lb.NodeRule
	var permissions, policies func(context.Context) ([]lb.Finding, error)
	findings := []func() []lb.Finding{
		a.keys.findings, a.problems.findings, prober.Findings, announcers.findings,
		announcers.members.findings, announcers.conflicts.findings, // the latter may follow from the former
		dp.Findings,
		func() []lb.Finding { return lb.FoundLogIncomplete.Each(o.queue.Problems()) },
		func() []lb.Finding { return lb.FoundInputRefused.Each(o.boundary.Troubles()) },
	}
	if err := o.connectInside(dp.Interfaces); err != nil {
		a.problems.set(proxyProblem, err)
	}
	if o.Config.Kubernetes != nil {
		o.setLabels = announcers.setLabels
		held, err := dp.Held()
		if err != nil {
			return err
		}
		if a.inside = o.inside; o.inside != nil {
			a.tasks = append(a.tasks, task{"service proxy", o.inside.Run})
			findings = append(findings, func() []lb.Finding { return insideFindings(o.inside) })
		}
		c, err := newCluster(o, facts, a.engine, trusted, held, func(nodes []netip.Addr) error {
			sink.setNodes(nodes)
			announcers.members.setNodes(nodes)
			if o.Config.Kubernetes.Forward != lb.MethodTunnel {
				return nil
			}
			return dp.SetTunnelSources(nodes)
		}, checkPath(dp))
		if err != nil {
			return err
		}
		if o.inside != nil {
			registry.MustRegister(o.inside, c.metrics)
			rules = o.inside.Rules
		}
		events, changed := c.emitRoutes(facts.name, o.StateDir, announcers.judge, component(o.Log, "kubernetes"))
		routeChanged = changed
		a.sources = append(a.sources, c.source, events)
		a.tasks = append(a.tasks, c.tasks...)
		inCluster, a.reloader.setPools, a.reloader.setProbing = c.state, c.setPools, c.setProbing
		waiting, drains.waiting = c.waiting, c.waiting
		nodeProxy = &serviceProxy{
			diff: c.proxyDiff, wanted: o.Config.Kubernetes.Proxy == config.ProxyReplace,
			inside: o.inside, draining: o.draining, serves: c.servesProxyHealth,
			orders: o.orders(), restart: a.restart, present: proxy.Present, permit: permitBeside,
			watched: o.watched,
		}
		if o.mounted != "" {
			m := &mounted{o.ConfigFile, o.mounted, a.reloader.follow, self(c.client, facts.name)}
			a.tasks = append(a.tasks, task{"mounted configuration", m.run})
		}
		findings = append(findings, c.checks.Findings, c.findings)
		permissions = func(ctx context.Context) ([]lb.Finding, error) {
			return kube.Permissions(ctx, c.client, kube.Role{
				Namespace: ownNamespace(), Assigns: c.leader != nil, Keys: a.keys != nil,
			})
		}
		policies = func(ctx context.Context) ([]lb.Finding, error) {
			return kube.Policies(ctx, c.client, o.Config.Kubernetes.LoadBalancerClasses)
		}
	}
	all := scopes{dp, o.inside}
	info := describer{
		node: facts.name, version: o.Version, started: time.Now(), reloader: a.reloader, datapath: dp,
		findings: findings, drained: drains.now, cluster: inCluster, l2: o.Config.L2 != nil,
	}
	api := admin.New(admin.Options{
		Socket: o.Config.Admin.Socket, Listen: o.Config.Admin.Listen,
		Hosts:  append([]string{facts.name}, o.Config.Admin.Hosts...),
		Access: accessOf(o.Config), TLSCert: o.Config.Admin.TLSCert, TLSKey: o.Config.Admin.TLSKey,
		Problem: a.problems.set,
		Status:  status, StatusOf: statusOf, Peers: announcers.peers, Sent: announcers.sent,
		Members: announcers.members.status,
		Flows:   all.flows, EndFlows: dp.EndFlows, Explain: all.explain, Rules: rules, Trace: all.trace,
		Drain: drains.set, SetWeight: drains.setWeight,
		Reload: a.reloader.reload, Diff: a.reloader.diff, Text: a.reloader.text,
		Apply: a.reloader.applyText, Confirm: a.reloader.confirm,
		Proxy:   nodeProxy,
		Examine: examiner{announcers, o.Config, permissions, policies}.examine,
		Restart: a.restart, Info: info.info, Waiting: waiting, Events: o.history.After,
		Metrics: promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError}),
		Log:     component(o.Log, "admin"), Boundary: o.boundary,
	})
	a.reloader.setAccess, a.reloader.status = api.SetAccess, status
	registry.MustRegister(admin.NewFindingMetrics(api.CurrentInfo))
	verdict := verdictLog{api.CurrentInfo, a.reloader.readiness.notifier.Status, component(o.Log, "agent")}
	a.tasks = append(a.tasks,
		task{"datapath", dp.Run}, task{"verdict", verdict.run}, task{"rates", rates.run},
		task{"health checks", prober.Run},
		task{"health check results", func(ctx context.Context) error { return verdicts.run(ctx, prober) }},
		task{"panics of the agent", trusted.run},
		task{"drains to store", drains.kept.run}, task{"admin API", api.Run},
		task{"events", func(ctx context.Context) error {
			o.history.Run(ctx, o.problem("events not stored"))
			return nil
		}})
	return nil
}

// accessOf returns who may use the API over TCP.
func accessOf(c *config.Config) admin.Access {
	return admin.Access{Token: c.Admin.Token.Reveal(), Allow: c.Admin.Allow}
}

func sourceTask(name string, s lb.Source, sink lb.Sink) task {
	return task{name, func(ctx context.Context) error { return s.Run(ctx, sink) }}
}

func component(log *slog.Logger, name string) *slog.Logger { return log.With("component", name) }
