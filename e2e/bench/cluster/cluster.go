// Package cluster measures an agent in a large Kubernetes cluster: a real API server, Nodes with kubelet-like
// heartbeats, Services and endpoints. One node runs the agent, which announces to BIRD; the allocator, another process,
// assigns the addresses. For comparison, kube-proxy's requests to the API server are measured in the same way.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"net/url"
	"strings"
	"sync/atomic"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/kube"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
)

// Options are the size of the cluster and the programs to run.
type Options struct {
	Binary       string // steelyard
	ControlPlane string // directory of Kubernetes' programs
	Nodes        int
	Services     int
	Endpoints    int // per Service
	Changes      int // measured endpoint changes
	Restarts     int // of each program
	Log          io.Writer
}

type Result struct {
	Nodes, Services, Endpoints int
	Assigned                   time.Duration // from the allocator's start until the last Service has an address
	Start                      time.Duration // from the agent's start until it serves the last Service
	// P50 and P99 are the times from a request that changes an EndpointSlice until the endpoint is active, Request50
	// and Request99 until the API server has responded, and Answered50 and Answered99 from the response on.
	P50, P99, Request50, Request99, Answered50, Answered99 time.Duration
	// CPU is the agent's CPU time per change, without heartbeats and while nobody queries the agent.
	CPU      time.Duration
	Idle     float64 // share of one CPU while only heartbeats are sent
	Beats    float64 // share of the due heartbeats that the API server accepted then
	Resident uint64  // the agent's memory, in bytes
	// Requests are the average requests per restart, by program, then by verb and resource.
	Requests map[string]map[string]float64
	Restarts int
}

type bench struct {
	Options
	*lab.Topology
	control    *kube.ControlPlane
	api        kubernetes.Interface
	agent      *lab.Agent
	kubeconfig string
	vip        string     // of the last Service
	last       netip.Addr // its only endpoint after the changes
	beats      atomic.Int64
}

const (
	class     = "steelyard.dev/bench"
	namespace = "default"

	asn, routerASN = 64512, 64500
)

// Run starts a cluster and measures it.
func Run(o Options) (r Result, err error) {
	r = Result{Nodes: o.Nodes, Services: o.Services, Endpoints: o.Services * o.Endpoints, Restarts: o.Restarts,
		Requests: map[string]map[string]float64{}}
	for what, n := range map[string]int{"nodes": o.Nodes, "services": o.Services, "endpoints": o.Endpoints,
		"changes": o.Changes, "restarts": o.Restarts} {
		if n < 1 {
			return r, fmt.Errorf("%s: %d; want at least 1", what, n)
		}
	}
	if err := kube.Available(o.ControlPlane); err != nil {
		return r, err
	}
	b := &bench{Options: o}
	if b.Topology, err = lab.NewTopology(lab.Shape{Clients: 1, Balancers: 1, Servers: 1}); err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, b.Close()) }()
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	err = b.step(ctx, "create nodes, services and endpoints", 10*time.Minute, b.start)
	if err != nil {
		return r, err
	}
	beats := make(chan struct{})
	go func() {
		defer close(beats)
		if err := b.heartbeats(ctx); err != nil {
			cancel(fmt.Errorf("heartbeats: %w", err)) // results without heartbeats would be meaningless
		}
	}()
	defer func() {
		cancel(nil)
		<-beats
	}()
	for _, step := range []struct {
		what  string
		limit time.Duration
		run   func(context.Context, *Result) error
	}{
		{"assign addresses", 10 * time.Minute, b.assign},
		{"start the agent", 2 * time.Minute, b.startAgent},
		{"idle", 2 * time.Minute, b.idle},
		{"change endpoints", 10 * time.Minute, b.change},
		{"restart the agent and kube-proxy", 15 * time.Minute, b.restart},
	} {
		err := b.step(ctx, step.what, step.limit, func(ctx context.Context) error { return step.run(ctx, &r) })
		if err != nil {
			return r, err
		}
	}
	return r, nil
}

// step runs f for at most this time. If the time is over or ctx ends, the error says so.
func (b *bench) step(
	ctx context.Context, what string, limit time.Duration, f func(context.Context) error,
) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done within %s", limit))
	defer cancel()
	start := time.Now()
	fmt.Fprintf(b.Log, "cluster: %s\n", what)
	err := f(ctx)
	took := time.Since(start).Round(100 * time.Millisecond)
	switch {
	case err != nil && ctx.Err() != nil:
		return fmt.Errorf("%s: %w: %w", what, context.Cause(ctx), err)
	case err != nil:
		return fmt.Errorf("%s, after %s: %w", what, took, err)
	}
	fmt.Fprintf(b.Log, "cluster: %s: done after %s\n", what, took)
	return nil
}

// start starts the control plane and creates the objects.
func (b *bench) start(ctx context.Context) (err error) {
	h := b.Servers[0]
	if b.control, err = kube.StartControlPlane(ctx, h.Host, h.V4, b.ControlPlane); err != nil {
		return err
	}
	_, err = peers.StartRouter(ctx, b.Router, peers.BIRD, peers.RouterConfig{
		ID: b.Balancers[0].Gateway4, ASN: routerASN,
		Neighbors: []peers.Neighbor{{Address: b.Balancers[0].V4, ASN: asn}},
	})
	if err != nil {
		return err
	}
	b.kubeconfig = b.control.Kubeconfig()
	config, err := clientcmd.RESTConfigFromKubeConfig([]byte(b.kubeconfig))
	if err != nil {
		return err
	}
	config.Dial, config.QPS, config.Burst = b.control.Dial, 5000, 5000
	if b.api, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	ns := &core.Namespace{ObjectMeta: meta.ObjectMeta{Name: "steelyard"}}
	if _, err := b.api.CoreV1().Namespaces().Create(ctx, ns, meta.CreateOptions{}); err != nil {
		return err
	}
	fmt.Fprintf(b.Log, "cluster: %d nodes, %d services of %d endpoints\n", b.Nodes, b.Services, b.Endpoints)
	if err := each(ctx, b.Nodes, b.createNode); err != nil {
		return err
	}
	return each(ctx, b.Services, b.createService)
}

// nodeName returns the name of a node. The first node runs the agent; the others exist only as objects.
func (b *bench) nodeName(i int) string {
	if i == 0 {
		return b.Balancers[0].Name()
	}
	return fmt.Sprintf("node-%d", i)
}

func serviceName(i int) string { return fmt.Sprintf("service-%d", i) }

// endpoint returns the address of endpoint i. Changes use new numbers.
func endpoint(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 128 + byte(i>>16), byte(i >> 8), byte(i)})
}

func (b *bench) slice(service int, first netip.Addr) *discovery.EndpointSlice {
	ready, port, protocol := true, int32(8080), core.ProtocolTCP
	s := &discovery.EndpointSlice{
		ObjectMeta: meta.ObjectMeta{
			Name: serviceName(service), Labels: map[string]string{discovery.LabelServiceName: serviceName(service)},
		},
		AddressType: discovery.AddressTypeIPv4,
		Ports:       []discovery.EndpointPort{{Port: &port, Protocol: &protocol}},
	}
	for k := range b.Endpoints {
		// The last Service's endpoints are on the agent's node, which then delivers to them itself.
		node, at := b.nodeName((service*b.Endpoints+k)%b.Nodes), endpoint(service*b.Endpoints+k)
		if service == b.Services-1 {
			node = b.nodeName(0)
		}
		if k == 0 && first.IsValid() {
			at = first
		}
		s.Endpoints = append(s.Endpoints, discovery.Endpoint{
			Addresses: []string{at.String()}, NodeName: &node,
			Conditions: discovery.EndpointConditions{Ready: &ready, Serving: &ready},
			TargetRef:  &core.ObjectReference{Kind: "Pod", Namespace: namespace, Name: fmt.Sprintf("pod-%s", at)},
		})
	}
	return s
}

func (b *bench) createService(ctx context.Context, i int) error {
	policy, ports, of := core.IPFamilyPolicySingleStack, false, class
	_, err := b.api.CoreV1().Services(namespace).Create(ctx, &core.Service{
		ObjectMeta: meta.ObjectMeta{Name: serviceName(i)},
		Spec: core.ServiceSpec{
			Type: core.ServiceTypeLoadBalancer, LoadBalancerClass: &of, AllocateLoadBalancerNodePorts: &ports,
			IPFamilyPolicy: &policy, IPFamilies: []core.IPFamily{core.IPv4Protocol},
			Ports: []core.ServicePort{{Port: 80, Protocol: core.ProtocolTCP}},
		},
	}, meta.CreateOptions{})
	if err == nil {
		s := b.slice(i, netip.Addr{})
		_, err = b.api.DiscoveryV1().EndpointSlices(namespace).Create(ctx, s, meta.CreateOptions{})
	}
	return err
}

// toml returns the configuration of the agent and the allocator.
func (b *bench) toml() string {
	return fmt.Sprintf(`
[datapath]
mode = "tc"
interfaces = ["eth0"]
[kubernetes]
kubeconfig = %q
load_balancer_class = %q
allocate = false
proxy = "kube-proxy"
[bgp]
asn = %d
max_routes = 100000
peers = [{ address = %q, asn = %d }]
[node]
name = %q
address = %q
[[pool]]
name = "public"
addresses = ["100.64.0.0/15"]
`, kube.KubeconfigPath, class, asn, b.Balancers[0].Gateway4, routerASN, b.nodeName(0), b.Balancers[0].V4)
}

// assign starts the allocator, and waits until all Services have an address.
func (b *bench) assign(ctx context.Context, r *Result) error {
	h := b.Servers[0]
	err := errors.Join(h.WriteFile(kube.KubeconfigPath, b.kubeconfig, 0o600),
		h.WriteFile(lab.AgentConfigPath, b.toml(), 0o600))
	if err != nil {
		return err
	}
	start := time.Now()
	p, err := h.Start(lab.Command{
		Path: b.Binary, Args: []string{"allocate", "-c", lab.AgentConfigPath}, Env: []string{"POD_NAMESPACE=steelyard"},
	})
	if err != nil {
		return err
	}
	_, err = lab.Until(ctx, 10*time.Minute, "every Service has an address", func() error {
		if !p.Running() {
			return lab.Permanent(fmt.Errorf("steelyard allocate exited: %s", p.Log.Tail(5)))
		}
		time.Sleep(200 * time.Millisecond) // listing all Services is expensive
		o := meta.ListOptions{ResourceVersion: "0"}
		list, err := b.api.CoreV1().Services(namespace).List(ctx, o)
		if err != nil {
			return err
		}
		without := 0
		for i := range list.Items {
			s := &list.Items[i]
			if strings.HasPrefix(s.Name, "service-") && len(s.Status.LoadBalancer.Ingress) == 0 {
				without++
			}
		}
		if without > 0 {
			return fmt.Errorf("%d Services have no address: %s", without, p.Log.Tail(3))
		}
		return nil
	})
	r.Assigned = time.Since(start)
	return err
}

// startAgent starts the agent and waits until it serves the last Service.
func (b *bench) startAgent(ctx context.Context, r *Result) (err error) {
	if err := b.Balancers[0].WriteFile(kube.KubeconfigPath, b.kubeconfig, 0o600); err != nil {
		return err
	}
	start := time.Now()
	b.agent, err = lab.StartAgent(b.Balancers[0].Host, lab.AgentOptions{
		Binary: b.Binary, Config: b.toml(), Env: []string{"POD_NAMESPACE=steelyard"},
	})
	if err != nil {
		return err
	}
	err = b.inForce(ctx, netip.Addr{})
	r.Start = time.Since(start)
	return err
}

// pollEvery is the pause between requests to the agent, which also cost it CPU time.
const pollEvery = time.Millisecond

// inForce waits until the agent delivers packets to the last Service, to the endpoint want if it is valid.
func (b *bench) inForce(ctx context.Context, want netip.Addr) error {
	if b.vip == "" {
		s, err := b.api.CoreV1().Services(namespace).Get(ctx, serviceName(b.Services-1), meta.GetOptions{})
		if err != nil {
			return err
		}
		b.vip = s.Status.LoadBalancer.Ingress[0].IP
	}
	question := url.Values{"client": {"198.51.100.1:1000"}, "to": {b.vip + ":80"}}
	for {
		var got struct{ Backend string }
		time.Sleep(pollEvery)
		err := b.agent.Get(ctx, "/v1/explain?"+question.Encode(), &got)
		if err == nil && (strings.HasPrefix(got.Backend, want.String()+":") || !want.IsValid() && got.Backend != "") {
			return nil
		}
		if ctx.Err() != nil || !b.agent.Process().Running() {
			return fmt.Errorf("the agent uses %q; want %s: %v\n%s", got.Backend, want, err,
				b.agent.Process().Log.Tail(10))
		}
	}
}
