package cli

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"

	"github.com/steelyard-lb/steelyard/config"
	"github.com/steelyard-lb/steelyard/healthd"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube"
)

// leaseNamespace is where agents elect one of them when no pod says otherwise.
const leaseNamespace = "kube-system"

// kubernetes adds the source that is a cluster, and what it needs: its own health checks, and the giving of addresses.
func (a *agent) kubernetes() error {
	log := component(a.log, "kubernetes")
	client, err := a.client(0, patientDial(log))
	if err != nil {
		return fmt.Errorf("kubernetes: %w", err)
	}
	lease, err := a.client(leaseTimeout, nil)
	if err != nil {
		return fmt.Errorf("kubernetes: %w", err)
	}
	pools, err := poolsOf(a.cfg)
	if err != nil {
		return err
	}
	klog.SetSlogLogger(log)
	// Checks of the node's own health endpoints are apart from those of backends: other names, other listener.
	prober := healthd.New(healthd.Options{
		Report: func(h lb.Health) { a.kube.Health(h) }, Log: component(a.log, "health"),
	})
	p := a.cfg.Probe
	var ports kube.NodePorts
	if a.cfg.Kubernetes.Proxy != config.ProxyKubeProxy {
		served := healthd.NewNodePorts(func() bool { return a.alive() == nil }, component(a.log, "health"))
		a.parts = append(a.parts, part{"health check node ports", served.Run})
		ports = served
	}
	a.kube, err = kube.New(kube.Options{
		Client: client, Node: a.node.name, Class: a.cfg.Kubernetes.LoadBalancerClass, Address: a.nodeAddress(),
		Probe:   lb.CheckSpec{Interval: p.Interval, Timeout: p.Timeout, Rise: p.Rise, Fall: p.Fall},
		Forward: a.cfg.Kubernetes.Forward, Peers: a.datapath.SetTunnelSources, ProxyHealthz: p.ProxyHealthz, Pools: pools, Prober: prober, NodePorts: ports, Log: log,
		NotReady: slices.Contains(a.cfg.Kubernetes.ExcludeNodes, config.NodeNotReady), Unschedulable: slices.Contains(a.cfg.Kubernetes.ExcludeNodes, config.NodeUnschedulable),
		IsProxy: a.cfg.Kubernetes.Proxy == config.ProxyReplace,
	})
	if err != nil {
		return fmt.Errorf("kubernetes: %w", err)
	}
	if a.cfg.Kubernetes.Proxy == config.ProxyReplace {
		health := &healthd.ProxyHealth{Behind: a.behind, Eligible: a.kube.Eligible, Log: component(a.log, "health")}
		a.parts = append(a.parts, part{"health of the service proxy", health.Run})
	}
	a.parts = append(a.parts, part{"node health checks", prober.Run})
	if a.cfg.Kubernetes.Allocate && len(pools) > 0 {
		allocator := kube.NewAllocator(kube.AllocatorOptions{
			Client: client, Lease: lease, Node: a.node.name, Namespace: cmp.Or(os.Getenv("POD_NAMESPACE"), leaseNamespace),
			Class: a.cfg.Kubernetes.LoadBalancerClass, Pools: pools, Log: log,
		})
		a.parts = append(a.parts, part{"addresses", allocator.Run})
	}
	return nil
}

// leaseTimeout bounds a request about the lease, the last of which is on the way of our end.
const leaseTimeout = 2 * time.Second

// client returns a client of the API server whose requests end within timeout; 0: whenever. A nil dial is the usual one.
func (a *agent) client(timeout time.Duration, dial func(ctx context.Context, network, address string) (net.Conn, error)) (kubernetes.Interface, error) {
	var c *rest.Config
	var err error
	if name := a.cfg.Kubernetes.Kubeconfig; name != "" {
		c, err = clientcmd.BuildConfigFromFlags("", name)
	} else {
		c, err = rest.InClusterConfig()
	}
	if err != nil {
		return nil, err
	}
	c.Timeout, c.Dial = timeout, dial
	c.UserAgent = "steelyard/" + version
	c.ContentType = "application/vnd.kubernetes.protobuf"
	c.AcceptContentTypes = "application/vnd.kubernetes.protobuf,application/json"
	return kubernetes.NewForConfig(c)
}

// nodeAddress is where the node's own health check node ports are asked.
func (a *agent) nodeAddress() netip.Addr {
	if a.node.address4.IsValid() {
		return a.node.address4
	}
	return a.node.address6
}

// runKube runs the source of services that is a cluster, if there is one.
func (a *agent) runKube(ctx context.Context) error {
	if a.kube == nil {
		return nil
	}
	return a.kube.Run(ctx, a.engine)
}

func poolsOf(cfg *config.Config) (pools []kube.Pool, err error) {
	for _, p := range cfg.Pools {
		k := kube.Pool{
			Pool:       lb.Pool{Name: p.Name, AutoAssign: p.AutoAssign, Priority: p.Priority, AvoidBuggy: p.AvoidBuggyIPs, Announce: p.Announce},
			Namespaces: p.Namespaces,
		}
		for _, r := range p.Ranges {
			k.Ranges = append(k.Ranges, lb.AddrRange{From: r.From, To: r.To})
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
