package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"reflect"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/agent/preflight"
	"github.com/steelyard-lb/steelyard/lb/kube"
)

// setKlog is a variable because tests run several agents, and klog allows one call while client-go runs.
var setKlog = klog.SetSlogLogger

// Allocate is "steelyard allocate": until ctx ends, it takes part in the election of the address allocator, and
// maintains the tunnel keys. It does not depend on the machine. It reads the configuration of the nodes, and rereads it
// at SIGHUP and, in a Kubernetes volume, at each change.
func Allocate(ctx context.Context, configFile, version string, w io.Writer) error {
	hangup := catch(syscall.SIGHUP)
	defer signal.Stop(hangup)
	mount := mountedVersion(configFile) // before it is read, so that no change is missed
	cfg, err := loadForCluster(configFile)
	if err != nil {
		return err
	}
	level := new(slog.LevelVar)
	log, queue := openLog(w, cfg.Log, level)
	defer queue.Flush()
	setKlog(log)
	away := new(reachability)
	api := &apiDialer{servers: cfg.Kubernetes.APIServers}
	client, err := newClient(cfg.Kubernetes.Kubeconfig, version, 0, retryingDial(log, away, api))
	if err != nil {
		return fmt.Errorf("kubernetes: %w", err)
	}
	a, err := newAllocation(cfg, client, version, log)
	if err != nil {
		return err
	}
	a.file, a.level, a.hangup, a.away = configFile, level, hangup, away
	a.info = admin.Info{
		Node: os.Getenv("NODE_NAME"), Version: version, Started: time.Now(), Config: configFile, Loaded: time.Now(),
	}
	keys := kube.NewKeyKeeper(kube.KeyOptions{
		Client: client, Namespace: ownNamespace(), Boundary: &lb.Boundary{Log: log, Before: before}, Log: log,
	}, nil)
	log.Info("started", "version", version, "config", configFile, "name", a.name)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return a.run(ctx) })
	if mount != "" {
		m := &mounted{configFile, mount, a.reload, self(client, "")}
		g.Go(func() error { return m.run(ctx) })
	}
	if len(cfg.Datapath.TunnelKeys) == 0 {
		g.Go(func() error { return keys.Run(ctx, func(kube.Keys) error { return nil }) })
	}
	if socket := os.Getenv("STEELYARD_SOCKET"); socket != "" { // where "steelyard status" looks
		server := admin.New(admin.Options{Socket: socket, Info: a.status, Problem: a.problems.set, Log: log})
		g.Go(func() error { return server.RunStatus(ctx) })
	}
	err = g.Wait()
	log.Info("stopped", "err", err)
	return err
}

// loadForCluster reads the configuration of a cluster's nodes on another machine.
func loadForCluster(configFile string) (*config.Config, error) {
	cfg, err := preflight.Load(configFile)
	if err == nil && cfg.Kubernetes == nil {
		err = errors.New("the configuration has no section [kubernetes]")
	}
	return cfg, err
}

// allocation is the allocator of Allocate and its configuration.
type allocation struct {
	name      string // identity in the election
	allocator *kube.Allocator
	away      *reachability
	problems  *problems
	file      string
	level     *slog.LevelVar
	hangup    <-chan os.Signal
	log       *slog.Logger

	mu      sync.Mutex // guards all below
	running *config.Config
	info    admin.Info // without what follows from the fields above
}

// status returns what "steelyard status" shows in the allocator's pod.
func (a *allocation) status() admin.Info {
	a.mu.Lock()
	i := a.info
	a.mu.Unlock()
	i.Findings = a.problems.findings()
	i.Cluster = &admin.Cluster{Away: a.away.awaySince(), Leader: a.allocator.Leader()}
	if i.Cluster.Leader == "" {
		i.Findings = append(i.Findings, lb.FoundStarting.About("", "starting: no allocator holds the Lease yet"))
	}
	i.Allocator = &admin.Allocator{Name: a.name}
	i.Allocator.Last, i.Allocator.At = a.allocator.Last()
	return i
}

func newAllocation(
	cfg *config.Config, client kubernetes.Interface, version string, log *slog.Logger,
) (*allocation, error) {
	pools, err := poolsOf(cfg)
	if err != nil {
		return nil, err
	}
	api := &apiDialer{servers: cfg.Kubernetes.APIServers}
	lease, err := newClient(cfg.Kubernetes.Kubeconfig, version, leaseTimeout, api.dial)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	a := &allocation{log: log, running: cfg, problems: newProblems(log)}
	if a.name, err = allocatorName(); err != nil {
		return nil, err
	}
	a.allocator = kube.NewAllocator(kube.AllocatorOptions{
		Client: client, Lease: lease, Node: a.name, Namespace: ownNamespace(),
		Classes: cfg.Kubernetes.LoadBalancerClasses, Pools: pools, PublishNodes: true,
		NoAnnouncer: cfg.BGP == nil && cfg.L2 == nil, IgnoreExclude: cfg.Kubernetes.IgnoreExcludeLabel,
		Boundary: &lb.Boundary{Log: log, Before: before}, Log: log,
		Problem: func(err error) { a.problems.set("addresses cannot be assigned", err) },
	})
	return a, nil
}

// run assigns addresses until ctx ends.
func (a *allocation) run(ctx context.Context) error {
	go onHangup(ctx, a.hangup, func() { a.reload() })
	return a.allocator.Run(ctx)
}

// reload reads the configuration again. An invalid one changes nothing.
func (a *allocation) reload() (admin.Reloaded, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	cfg, err := loadForCluster(a.file)
	if err == nil && len(cfg.Pools) == 0 && len(a.running.Pools) > 0 {
		err = errors.New("the configuration no longer has a [[pool]]")
	}
	var pools []kube.Pool
	if err == nil {
		pools, err = poolsOf(cfg)
	}
	if err != nil {
		a.log.Error("configuration rejected; the running one stays active", "config", a.file, "err", err)
		a.info.LoadError = err.Error()
		return admin.Reloaded{}, err
	}
	a.level.Set(cfg.Log.Level)
	if !reflect.DeepEqual(a.running.Pools, cfg.Pools) {
		a.allocator.SetPools(pools)
	}
	done := admin.Reloaded{Config: a.file, Loaded: time.Now(), Warnings: cfg.Warnings}
	if !reflect.DeepEqual(a.running.Kubernetes, cfg.Kubernetes) {
		done.NeedRestart = []string{"kubernetes"}
		a.log.Warn("changed section takes effect at the next start", "section", "kubernetes")
	}
	a.running.Pools, a.info.Loaded, a.info.LoadError = cfg.Pools, done.Loaded, ""
	a.log.Info("configuration reloaded", "config", a.file)
	return done, nil
}

// allocatorName returns the identity in the election. Two pods may run on one node.
func allocatorName() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("find the host name: %w", err)
	}
	return cmp.Or(os.Getenv("POD_NAME"), fmt.Sprintf("%s-%d", host, os.Getpid())), nil
}
