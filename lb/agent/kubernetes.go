package agent

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"
	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/healthd"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/state"
)

// defaultNamespace is used if POD_NAMESPACE is not set. It is the manifest's namespace, so that host services and a
// DaemonSet elect one leader and share the same keys.
const defaultNamespace = "steelyard"

// ownNamespace returns the namespace of the leader election's Lease and the tunnel keys' Secret.
func ownNamespace() string { return cmp.Or(os.Getenv("POD_NAMESPACE"), defaultNamespace) }

// leaseTimeout bounds a request about the Lease. The last such request delays the agent's shutdown.
const leaseTimeout = 2 * time.Second

// cluster is the Kubernetes cluster as a source, with its own health checks and address allocation.
type cluster struct {
	source task
	tasks  []task
	away   *reachability
	// setPools and setProbing replace the Services' pools, and how the nodes' health endpoints are checked.
	setPools   func([]kube.Pool)
	setProbing func(kube.Probing)
	leader     func() string   // nil if this agent takes no part in the election
	checks     *healthd.Prober // of the node
	client     kubernetes.Interface
	known      func(service string) *core.Service
	waiting    func() []lb.ServiceStatus // for an address
	findings   func() []lb.Finding
	proxyDiff  func() ([]lb.Change, error)
	// servesProxyHealth reports whether the agent has the port of a service proxy's health.
	servesProxyHealth func() bool
	metrics           prometheus.Collector // of the service proxy, or nil if another program is the proxy
}

// emitRoutes returns the task that emits Events about this node's routes, and the function to call after each change of
// a route. The task ends before the agent withdraws its routes, so a restart emits no Events.
func (c *cluster) emitRoutes(
	node, stateDir string, judge func([]lb.RouteStatus) []lb.RouteStatus, log *slog.Logger,
) (task, func(lb.RouteStatus)) {
	file := state.New(stateDir, "announced", 1)
	var earlier []kube.AnnouncedRoute
	if _, err := file.Load(&earlier); err != nil {
		log.Warn("announced addresses of the previous run not read; Events will report them again", "err", err)
		earlier = nil
	}
	events := kube.NewRouteEvents(kube.RouteEventsOptions{
		Client: c.client, Node: node, Service: c.known, Judge: judge, Earlier: earlier,
		Keep: func(all []kube.AnnouncedRoute) {
			if err := file.Save(all); err != nil {
				log.Warn("announced addresses not stored; after a restart Events will report them again", "err", err)
			}
		},
	})
	return task{"events about routes", events.Run}, events.Changed
}

// state returns what the status shows.
func (c cluster) state() *admin.Cluster {
	s := &admin.Cluster{Away: c.away.awaySince()}
	if c.leader != nil {
		s.Leader = c.leader()
	}
	return s
}

func newCluster(
	o Options, facts node, engine *lb.Engine, sink lb.Sink, held []lb.Frontend,
	setTunnelSources func([]netip.Addr) error, way func(lb.Check) (healthd.Way, error),
) (cluster, error) {
	k := o.Config.Kubernetes
	log := component(o.Log, "kubernetes")
	c := cluster{away: new(reachability), servesProxyHealth: func() bool { return false }}
	client, err := newClient(k.Kubeconfig, o.Version, 0, retryingDial(log, c.away, o.api))
	if err != nil {
		return cluster{}, fmt.Errorf("kubernetes: %w", err)
	}
	lease, err := newClient(k.Kubeconfig, o.Version, leaseTimeout, o.api.dial)
	if err != nil {
		return cluster{}, fmt.Errorf("kubernetes: %w", err)
	}
	pools, err := poolsOf(o.Config)
	if err != nil {
		return cluster{}, err
	}
	known := newLastKnown(sink, setTunnelSources, o.KeepDir, log)
	known.away = c.away.awaySince
	endpoints := known.endpoints
	o.api.endpoints.Store(&endpoints)
	c.tasks = append(c.tasks, task{"last known state of the cluster", known.run})
	options := kubeOptions(o.Config, facts)
	options.IsProxy = o.isProxy()
	options.Booted, options.Namespace = booted(), ownNamespace()
	options.NodeLabels, options.Held, options.Boundary = o.setLabels, held, o.boundary
	options.Client, options.TunnelSources, options.Pools, options.Log = client, known.tunnelSources, pools, log
	// The cluster source has its own prober, which reports to the source instead of the engine.
	relay := new(healthRelay)
	prober := healthd.New(healthd.Options{
		Report: relay.report, Way: way, Boundary: o.boundary, Log: component(o.Log, "health"),
	})
	options.Prober, c.checks = prober, prober
	health := &engineHealth{engine: engine}
	if o.inside != nil {
		options.PortUser = healthd.PortUser
		options.NodeRules, options.RulesProblem = o.inside, o.problem("Services not updated for this node and its pods")
		options.RuleMetrics = kube.NewRuleMetrics()
		c.metrics = options.RuleMetrics
		local := &healthd.ProxyMetrics{
			Metrics: proxyMetrics(options.RuleMetrics), Boundary: o.boundary, Log: component(o.Log, "health"),
		}
		c.tasks = append(c.tasks, task{"metrics of the service proxy", local.Run})
	}
	if k.Proxy != config.ProxyKubeProxy {
		ports := healthd.NewNodePorts(health.behind, health.inForce, component(o.Log, "health"))
		ports.Addresses, ports.Boundary, options.NodePorts = k.HealthAddresses, o.boundary, ports
		c.tasks = append(c.tasks, task{"health check node ports", ports.Run})
	}
	source, err := kube.New(options)
	if err != nil {
		return cluster{}, fmt.Errorf("kubernetes: %w", err)
	}
	if o.inside != nil {
		health.rules = source
	}
	relay.deliverTo(source.Health)
	c.away.returned = source.Interrupted
	if o.boundary != nil {
		o.boundary.Changed = source.Tell
	}
	c.setPools, c.setProbing = source.SetPools, source.SetProbing
	c.client, c.known, c.waiting, c.findings = client, source.Service, source.Waiting, source.Findings
	c.proxyDiff = source.ProxyDiff
	c.source = sourceTask("kubernetes", source, known)
	if o.isProxy() {
		proxy := &healthd.ProxyHealth{
			Behind: health.behind, Applied: health.applied, Eligible: source.Eligible,
			Addresses: k.HealthAddresses, Boundary: o.boundary,
			Log: component(o.Log, "health"),
		}
		c.tasks = append(c.tasks, task{"health of the service proxy", proxy.Run})
		c.servesProxyHealth = proxy.Serves
	}
	c.tasks = append(c.tasks, task{"node health checks", prober.Run})
	if k.Allocate {
		allocator := kube.NewAllocator(kube.AllocatorOptions{
			Client: client, Lease: lease, Node: facts.name,
			Namespace: ownNamespace(), Classes: k.LoadBalancerClasses, Pools: pools, PublishNodes: true, Log: log,
			NoAnnouncer: options.NoAnnouncer, IgnoreExclude: k.IgnoreExcludeLabel,
			Boundary: o.boundary, Problem: o.problem("this node cannot be elected to assign addresses"),
		})
		c.setPools = func(pools []kube.Pool) {
			source.SetPools(pools)
			allocator.SetPools(pools)
		}
		c.tasks, c.leader = append(c.tasks, task{"addresses", allocator.Run}), allocator.Leader
	}
	return c, nil
}

// kubeOptions returns the source's options that depend only on the configuration and the node.
func kubeOptions(cfg *config.Config, facts node) kube.Options {
	k, p := cfg.Kubernetes, probing(cfg)
	var spread func([]lb.AnnouncerKind) bool
	if cfg.L2 != nil && cfg.L2.SpreadLocal {
		spread = func(by []lb.AnnouncerKind) bool {
			return len(by) == 0 && cfg.BGP == nil || slices.Equal(by, []lb.AnnouncerKind{lb.AnnounceL2})
		}
	}
	return kube.Options{
		Node: facts.name, Classes: k.LoadBalancerClasses, Address: facts.address(),
		Probe:   p.Probe,
		Forward: k.Forward, ProxyHealthz: p.ProxyHealthz,
		NotReady:      slices.Contains(k.ExcludeNodes, config.NodeNotReady),
		Unschedulable: slices.Contains(k.ExcludeNodes, config.NodeUnschedulable),
		KeepLast:      p.KeepLast,
		Hold:          p.Hold,
		IgnoreExclude: k.IgnoreExcludeLabel, AnyExternalIP: k.AnyExternalIP,
		NoAnnouncer:  cfg.BGP == nil && cfg.L2 == nil,
		FollowNodes:  cfg.L2 != nil,
		PanicHold:    k.PanicHold,
		NodeProbe:    k.NodeProbe,
		MaxEndpoints: k.MaxEndpointsPerService,
		SpreadLocal:  spread,
	}
}

// probing returns the part of the configuration that SetProbing takes.
func probing(cfg *config.Config) kube.Probing {
	p := cfg.Probe
	return kube.Probing{
		Probe:        lb.CheckSpec{Interval: p.Interval, Timeout: p.Timeout, Rise: p.Rise, Fall: p.Fall},
		ProxyHealthz: p.ProxyHealthz, KeepLast: p.OnAllDown == config.OnAllDownKeep, Hold: p.Hold,
	}
}

// booted returns when this machine was booted, or zero if that is unknown.
func booted() time.Time {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return time.Time{}
	}
	return time.Now().Add(-time.Duration(info.Uptime) * time.Second)
}

// Limits on a client's requests. The leader writes an address and an Event for each new Service: for 5,000 of them that
// takes half a minute. The API server protects itself with its own priorities.
const clientQPS, clientBurst = 400, 800

// newClient returns a client of the API server. With kubeconfig "" it uses the pod's. timeout bounds each request; 0
// means no bound.
func newClient(
	kubeconfig, version string, timeout time.Duration,
	dial func(ctx context.Context, network, address string) (net.Conn, error),
) (kubernetes.Interface, error) {
	c, err := restConfig(kubeconfig)
	if err != nil {
		return nil, err
	}
	c.Timeout, c.Dial = timeout, dial
	c.UserAgent = "steelyard/" + version
	c.ContentType = "application/vnd.kubernetes.protobuf"
	c.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	c.QPS, c.Burst = clientQPS, clientBurst
	return kubernetes.NewForConfig(c)
}

// restConfig returns the configuration to reach the API server. It reads files and connects to nothing.
func restConfig(kubeconfig string) (*rest.Config, error) {
	if kubeconfig != "" {
		return clientcmd.BuildConfigFromFlags("", kubeconfig)
	}
	return rest.InClusterConfig()
}

func poolsOf(cfg *config.Config) (pools []kube.Pool, err error) {
	for _, p := range cfg.Pools {
		k := kube.Pool{
			Pool: lb.Pool{
				Name: p.Name, AutoAssign: p.AutoAssign, Priority: p.Priority, AvoidBuggy: p.AvoidBuggyIPs,
				AvoidAnycast: cfg.AnnouncesL2(p.Announce), Announce: p.Announce, ShareAcross: p.ShareAcross,
			},
			Class: p.Class, Namespaces: p.Namespaces, ExternalIPs: p.ExternalIPs, Grace: p.Grace,
		}
		if k.Ranges = p.Ranges; p.Nodes {
			k.Nodes, k.Ranges, k.ShareAcross = true, kube.NodeRanges, true
		}
		if p.ServiceSelector != "" {
			if k.Selector, err = labels.Parse(p.ServiceSelector); err != nil {
				return nil, fmt.Errorf("pool %q: service_selector: %w", p.Name, err)
			}
		}
		pools = append(pools, k)
	}
	return pools, nil
}
