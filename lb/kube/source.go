package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"reflect"
	"slices"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"

	"github.com/steelyard-lb/steelyard/lb"
)

// Name is the Source of every service that comes from here.
const Name = "kubernetes"

// Options is everything a Source needs. Pools may be empty.
type Options struct {
	Client kubernetes.Interface
	Node   string // our own, as the API server knows it
	Class  string // spec.loadBalancerClass of the Services that are ours; "": those without one
	// Forward is how packets get to pods on other nodes: by tunnel, to be delivered there, or by nat.
	Forward lb.Method
	// Peers is told the addresses of all nodes, whose tunnels may end here; nil: nobody wants to know.
	Peers func([]netip.Addr) error
	// Address is ours, where health check node ports are asked.
	Address netip.Addr
	// Probe is how the node's own health endpoints are asked: Interval, Timeout, Rise and Fall.
	Probe lb.CheckSpec
	// ProxyHealthz is the URL of the service proxy's health endpoint; "": it is not asked.
	ProxyHealthz string
	// Pools have the addresses that may be announced, and say by what; none: any address, by whatever is on.
	Pools []Pool
	// Prober asks them. It reports to the Source's Health.
	Prober lb.Prober
	// NodePorts answers at health check node ports where no service proxy does; nil: that is never to be.
	NodePorts NodePorts
	// NotReady and Unschedulable say that a node in that state announces nothing.
	NotReady, Unschedulable bool
	// IsProxy says that this agent is the service proxy of the node.
	IsProxy bool
	Log     *slog.Logger
}

// NodePorts is who answers at health check node ports, by service, "namespace/name".
type NodePorts interface {
	Serve(service string, port uint16, readyHere int) error
	Stop(service string)
}

// Source implements lb.Source.
type Source struct {
	o        Options
	queue    workqueue.TypedRateLimitingInterface[string]
	services cache.Indexer
	slices   cache.Indexer
	nodes    cache.Indexer
	synced   []cache.InformerSynced
	start    []func(stop <-chan struct{})
	gates    *gates
	events   record.EventRecorder

	// Of Run's goroutine.
	put  map[string]*lb.Service
	gone map[string]map[netip.AddrPort]time.Time // endpoints that were there until then, by service
}

// everything is the key in the queue that stands for all services: something changed that concerns each.
const everything = ""

// The indexes: of EndpointSlices by their service, and of Services by their addresses.
const (
	serviceOf   = "service"
	withAddress = "address"
)

func nameOf(s *core.Service) string { return s.Namespace + "/" + s.Name }

// New returns a Source that watches nothing until Run.
func New(o Options) (*Source, error) {
	s := &Source{
		o: o, put: map[string]*lb.Service{}, gone: map[string]map[netip.AddrPort]time.Time{},
		queue: workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]()),
	}
	s.gates = newGates(o, func(service string) { s.queue.Add(service) })
	unlabelled := func(l *meta.ListOptions) {
		l.LabelSelector = "!" + labelProxyName + ",!" + labelHeadless
	}
	objects := informers.NewSharedInformerFactoryWithOptions(o.Client, 0, informers.WithTweakListOptions(unlabelled), informers.WithTransform(slim))
	nodes := informers.NewSharedInformerFactoryWithOptions(o.Client, 0, informers.WithTransform(slim), informers.WithTweakListOptions(func(l *meta.ListOptions) {
		if o.Forward != lb.MethodTunnel { // else the others are of concern, too
			l.FieldSelector = fields.OneTermEqualSelector("metadata.name", o.Node).String()
		}
	}))
	s.start = append(s.start, objects.Start, nodes.Start)

	var errs []error
	watch := func(i cache.SharedIndexInformer, key func(any) string) cache.Indexer {
		touch := func(x any) {
			if gone, ok := x.(cache.DeletedFinalStateUnknown); ok {
				x = gone.Obj
			}
			s.queue.Add(key(x))
			s.touchSharing(x)
		}
		_, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: touch, DeleteFunc: touch,
			UpdateFunc: func(old, x any) {
				if !s.insignificant(old, x) {
					touch(x)
				}
				s.touchSharing(old)
			},
		})
		errs = append(errs, err)
		s.synced = append(s.synced, i.HasSynced)
		return i.GetIndexer()
	}
	bySlice := objects.Discovery().V1().EndpointSlices().Informer()
	errs = append(errs, bySlice.AddIndexers(cache.Indexers{serviceOf: func(x any) ([]string, error) { return []string{sliceKey(x)}, nil }}))
	s.slices = watch(bySlice, sliceKey)
	services := objects.Core().V1().Services().Informer()
	errs = append(errs, services.AddIndexers(cache.Indexers{withAddress: func(x any) (addrs []string, err error) {
		service := x.(*core.Service)
		for _, a := range append(addressesOf(service), externalsOf(service)...) {
			addrs = append(addrs, a.String())
		}
		return addrs, nil
	}}))
	s.services = watch(services, func(x any) string { return nameOf(x.(*core.Service)) })
	s.nodes = watch(nodes.Core().V1().Nodes().Informer(), func(any) string { return everything })
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("watch the cluster: %w", err)
	}
	return s, nil
}

// slim drops what nobody here reads and what is a large part of every object.
func slim(x any) (any, error) {
	if o, ok := x.(meta.Object); ok {
		o.SetManagedFields(nil)
	}
	if n, ok := x.(*core.Node); ok {
		n.Status.Images = nil
	}
	return x, nil
}

// sliceKey is the service that an EndpointSlice belongs to.
func sliceKey(x any) string {
	s := x.(*discovery.EndpointSlice)
	return s.Namespace + "/" + s.Labels[discovery.LabelServiceName]
}

// Health takes what a check of one of the node's health endpoints found. It is what Options.Prober reports to.
func (s *Source) Health(h lb.Health) { s.gates.health(h) }

// Run implements lb.Source.
func (s *Source) Run(ctx context.Context, sink lb.Sink) error {
	for _, start := range s.start {
		start(ctx.Done())
	}
	stop := context.AfterFunc(ctx, s.queue.ShutDown)
	defer stop()
	if !cache.WaitForCacheSync(ctx.Done(), s.synced...) {
		return nil
	}
	var shutdown func()
	s.events, shutdown = newRecorder(ctx, s.o.Client, s.o.Node)
	defer shutdown()
	s.gates.proxy()
	s.tellPeers()
	for _, x := range s.services.List() {
		service := x.(*core.Service)
		s.reconcile(nameOf(service), sink)
	}
	sink.Complete(Name)
	s.o.Log.Info("cluster known", "services", len(s.services.List()), "served", len(s.put))
	for {
		key, down := s.queue.Get()
		if down {
			return nil
		}
		if key == everything {
			s.tellPeers()
			for name := range s.put {
				s.reconcile(name, sink)
			}
		} else {
			s.reconcile(key, sink)
		}
		s.queue.Done(key)
	}
}

// reconcile tells the engine what this node is to do for a service now.
func (s *Source) reconcile(name string, sink lb.Sink) {
	v := s.viewOf(name)
	old := s.put[name]
	if v == nil {
		if old != nil {
			sink.Delete(name)
			delete(s.put, name)
			delete(s.gone, name)
		}
		s.gates.forget(name)
		s.closePort(name)
		return
	}
	s.bury(name, old, v.service)
	if old != nil && reflect.DeepEqual(old, v.service) {
		return
	}
	s.put[name] = v.service
	sink.Put(v.service)
}

// viewOf returns what this node makes of a service; nil when nothing.
func (s *Source) viewOf(name string) *view {
	x, ok, err := s.services.GetByKey(name)
	if err != nil || !ok {
		return nil
	}
	service := x.(*core.Service)
	if !handled(service) {
		return nil
	}
	vips, external := s.vipsOf(service)
	if len(vips) == 0 {
		return nil
	}
	found, err := s.slices.ByIndex(serviceOf, name)
	if err != nil {
		s.o.Log.Error("endpoints not found", "service", name, "err", err)
	}
	endpoints := make([]*discovery.EndpointSlice, 0, len(found))
	for _, x := range found {
		endpoints = append(endpoints, x.(*discovery.EndpointSlice))
	}
	node := s.node()
	v := translate(service, vips, endpoints, s.place(node), s.shares(service))
	v.service.UnrestrictedVIPs = external
	s.nodePort(service, v)
	v.service.WithholdReason = s.gates.hold(service, v, node)
	s.pooled(v.service)
	return v
}

// portRetry is when a health check node port that somebody has is tried again.
const portRetry = 10 * time.Second

// nodePort answers at the health check node port of a service if the node has no service proxy that does.
func (s *Source) nodePort(service *core.Service, v *view) {
	port := uint16(service.Spec.HealthCheckNodePort)
	if s.o.NodePorts == nil || !isLocal(service) || port == 0 || !s.o.IsProxy && !s.gates.proxyless() {
		s.closePort(v.service.Name)
		return
	}
	if err := s.o.NodePorts.Serve(v.service.Name, port, v.readyHere); err != nil {
		// The words are kube-proxy's (pkg/proxy/healthcheck/service_health.go).
		s.events.Eventf(service, core.EventTypeWarning, "FailedToStartServiceHealthcheck",
			"node %s failed to start healthcheck %q on port %d: %v", s.o.Node, v.service.Name, port, err)
		s.queue.AddAfter(v.service.Name, portRetry)
	}
}

func (s *Source) closePort(service string) {
	if s.o.NodePorts != nil {
		s.o.NodePorts.Stop(service)
	}
}

// node returns our own; nil when the API server does not know it.
func (s *Source) node() *core.Node {
	x, ok, err := s.nodes.GetByKey(s.o.Node)
	if err != nil || !ok {
		return nil
	}
	return x.(*core.Node)
}

// Eligible reports whether balancers outside the cluster may send traffic to this node (pkg/proxy/node.go): it exists, is not
// being deleted, and no autoscaler is about to take it away. It may be called from any goroutine.
func (s *Source) Eligible() bool {
	n := s.node()
	return n != nil && going(n) == ""
}

func (s *Source) place(own *core.Node) place {
	p := place{node: s.o.Node}
	if own != nil {
		p.zone = labels.Set(own.Labels).Get(core.LabelTopologyZone)
	}
	if s.o.Forward != lb.MethodTunnel {
		return p
	}
	p.nodes = map[string]netip.Addr{}
	for _, x := range s.nodes.List() {
		n := x.(*core.Node)
		if addrs := nodeAddresses(n); len(addrs) > 0 {
			p.nodes[n.Name] = addrs[0]
		}
	}
	return p
}

// nodeAddresses returns where a node is reached by others, the first as all of them see it.
func nodeAddresses(n *core.Node) (addrs []netip.Addr) {
	for _, a := range n.Status.Addresses {
		if addr, err := netip.ParseAddr(a.Address); err == nil && a.Type == core.NodeInternalIP {
			addrs = append(addrs, addr)
		}
	}
	return addrs
}

// insignificant reports whether a change of a node is no concern of ours: most are signs of life of others.
func (s *Source) insignificant(old, now any) bool {
	o, isNode := old.(*core.Node)
	if !isNode || o.Name == s.o.Node {
		return false
	}
	return slices.Equal(nodeAddresses(o), nodeAddresses(now.(*core.Node)))
}

// tellPeers says whose tunnels may end here.
func (s *Source) tellPeers() {
	if s.o.Peers == nil || s.o.Forward != lb.MethodTunnel {
		return
	}
	var addrs []netip.Addr
	for _, x := range s.nodes.List() {
		addrs = append(addrs, nodeAddresses(x.(*core.Node))...)
	}
	if err := s.o.Peers(addrs); err != nil {
		s.o.Log.Error("tunnels of other nodes not allowed", "err", err)
	}
}
