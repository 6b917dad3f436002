package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"reflect"
	"slices"
	"sync/atomic"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"

	"github.com/steelyard-lb/steelyard/lb"
)

// Name is the lb.Service.Source of every service of this package.
const Name = "kubernetes"

// Options configures a Source.
type Options struct {
	Client kubernetes.Interface
	Node   string // name of this node's Node object
	// Namespace contains the node table. If it is "", other nodes are read from their Nodes.
	Namespace string
	Classes   []string // spec.loadBalancerClass of Services to serve; "" for those without one; empty means "" only
	// Forward is how packets reach pods on other nodes: through a tunnel to the node, which delivers them, or with NAT.
	Forward lb.Method
	// TunnelSources sets the allowed sources of tunnel packets: the addresses of all nodes. It may be nil.
	TunnelSources func([]netip.Addr) error
	// SpreadLocal reports whether one node receives all packets to an address with these announcers and spreads them
	// over all nodes with endpoints, even under the policy Local. Nil means never.
	SpreadLocal func([]lb.AnnouncerKind) bool
	// FollowNodes calls TunnelSources even if packets to other nodes do not use tunnels.
	FollowNodes bool
	// NodeLabels is called with this node's labels when they become known and when they change. It may be nil.
	NodeLabels func(map[string]string)
	// Address is this node's address, for checks of its health check node ports.
	Address netip.Addr
	// Probe sets Interval, Timeout, Rise and Fall of the checks of this node's health endpoints.
	Probe lb.CheckSpec
	// ProxyHealthz is the URL of the service proxy's health endpoint, or "" if it is not checked.
	ProxyHealthz string
	// KeepLast keeps announcing with a lower preference while the service proxies of all nodes fail.
	KeepLast bool
	// Hold is the minimum time for which addresses stay withdrawn after a fault.
	Hold time.Duration
	// Pools lists the addresses that may be announced and their announcers. If empty, every announcer announces any
	// address.
	Pools []Pool
	// Prober runs the checks of this node's health endpoints. It reports to the Source's Health.
	Prober lb.Prober
	// NodePorts answers at health check node ports where no service proxy does. Nil means never.
	NodePorts NodePorts
	// NotReady and Unschedulable withhold all addresses while the node is in that state.
	NotReady, Unschedulable bool
	IgnoreExclude           bool // the label that excludes nodes from external load balancers has no effect
	NoAnnouncer             bool // this node announces no address
	// IsProxy is true if this agent is the node's service proxy.
	IsProxy bool
	// NodeRules gets what this node does as service proxy, or is nil if another program is the proxy. RulesProblem gets
	// the error of a call, and nil once all rules are applied. It may be nil.
	NodeRules    NodeRules
	RulesProblem func(error)
	RuleMetrics  *RuleMetrics // of NodeRules; may be nil
	// AnyExternalIP also gives NodeRules the externalIPs of a Service that are in no pool.
	AnyExternalIP bool
	// PortUser says what this node uses a port of its own address for, or returns "". Nil: all are free.
	PortUser func(netip.AddrPort, lb.Protocol) string
	// PanicHold is how long the last endpoints of a service are kept after an interruption. 0 means not at all.
	PanicHold time.Duration
	// NodeProbe is the interval at which other nodes are probed through the tunnel. 0 means not at all.
	NodeProbe time.Duration
	// MaxEndpoints limits the pairs of endpoint and port per Service. 0 means no limit.
	MaxEndpoints int
	// Held lists the frontends that a previous agent left in the kernel, or nil if unknown.
	Held []lb.Frontend
	// Boundary surrounds the handling of each object. It may be nil.
	Boundary *lb.Boundary
	// Booted is when the machine started. Zero means long ago.
	Booted time.Time
	Log    *slog.Logger
}

// Source implements lb.Source.
type Source struct {
	o          Options
	queue      workqueue.TypedRateLimitingInterface[string]
	services   cache.Indexer
	slices     cache.Indexer
	nodes      cache.Indexer // core.Node: this one and those of otherNodes
	synced     []cache.InformerSynced
	informers  []cache.SharedIndexInformer
	conditions *conditions
	probes     *nodeProbes
	events     record.EventRecorder                 // set by Run
	recorder   atomic.Pointer[record.EventRecorder] // the same, for Tell

	pools      atomic.Pointer[[]Pool]  // of New or the last SetPools; never nil
	excluded   atomic.Int64            // as allExcluded
	newPools   atomic.Pointer[[]Pool]  // set by SetPools, not yet taken over by Run, or nil
	newProbing atomic.Pointer[Probing] // set by SetProbing, like newPools

	interrupted atomic.Pointer[interruption] // the last one, or nil
	programming programming

	// Used only by Run's goroutine, like the fields of o that SetPools and SetProbing replace.
	put           map[string]*lb.Service
	targets       map[string]targets       // of services
	settings      map[string]settings      // of services
	held          map[string]time.Time     // since when a fault withholds the addresses of a service
	graceUntil    map[netip.Addr]time.Time // until when addresses that are in no pool are served
	endpoints     map[string]seen          // of services
	usable        map[string]lastUsable    // of services
	wide          map[string]int           // frontends of services with many, or 0 for one that does not fit
	external      map[string]int           // externalIPs of services that have or request some
	complete      bool                     // all Services that existed at the start have been put
	passed        passedRules
	own           *core.Node // this node, or nil if the API server has none
	top           topology
	tunnelSources []netip.Addr // currently set, sorted, or nil
}

// The keys in the queue that are not service names: all services, changes of any node, the pools, the probing, the
// nodes that are probed, the rules that were not applied, and the ports of this node.
const (
	everything   = ""
	anyNode      = "node"
	otherPools   = "pools"
	otherProbing = "probing"
	probedNodes  = "probed"
	failedRules  = "rules"
	usedPorts    = "ports"
)

// The indexes: EndpointSlices by their service, and Services by their addresses and ClusterIPs.
const (
	serviceOf     = "service"
	withAddress   = "address"
	withClusterIP = "cluster IP"
)

// nameOf returns the name of a Service in lb.
func nameOf(s *core.Service) string { return s.Namespace + "/" + s.Name }

// New returns a Source that watches nothing until Run.
func New(o Options) (*Source, error) {
	o.MaxEndpoints = cmp.Or(o.MaxEndpoints, math.MaxInt)
	s := &Source{
		o: o, put: map[string]*lb.Service{}, held: map[string]time.Time{},
		targets: map[string]targets{}, settings: map[string]settings{},
		endpoints: map[string]seen{}, usable: map[string]lastUsable{},
		wide: map[string]int{}, external: map[string]int{},
		queue: newQueue(workqueue.DefaultTypedControllerRateLimiter[string]()),
	}
	s.pools.Store(&o.Pools)
	s.programming.metrics, s.programming.started = cmp.Or(o.RuleMetrics, NewRuleMetrics()), time.Now()
	if o.RulesProblem == nil {
		s.o.RulesProblem = func(error) {}
	}
	s.conditions = newConditions(o, func(service string) { s.queue.Add(service) })
	s.probes = newNodeProbes(o, func() { s.queue.Add(anyNode) })
	if err := s.watchCluster(); err != nil {
		return nil, fmt.Errorf("watch the cluster: %w", err)
	}
	return s, nil
}

// watchCluster creates the informers of Services, EndpointSlices and this node's Node, which Run starts.
func (s *Source) watchCluster() error {
	ofUs := func(l *meta.ListOptions) { l.LabelSelector = "!" + labelProxyName + ",!" + labelHeadless }
	endpoints := newInformer(s.o.Client, s.o.Client.DiscoveryV1().EndpointSlices(meta.NamespaceAll),
		&discovery.EndpointSlice{}, s.slim, ofUs)
	services := newInformer(s.o.Client, s.o.Client.CoreV1().Services(meta.NamespaceAll), &core.Service{}, s.slim, ofUs)
	node := newInformer(s.o.Client, s.o.Client.CoreV1().Nodes(), &core.Node{}, slimOwn, named(s.o.Node))
	s.informers = []cache.SharedIndexInformer{endpoints, services, node}
	errs := []error{
		endpoints.AddIndexers(cache.Indexers{serviceOf: func(x any) ([]string, error) {
			return []string{sliceKey(x)}, nil
		}}),
		services.AddIndexers(cache.Indexers{withAddress: func(x any) (addrs []string, err error) {
			s.arrived(x, func() {
				service := x.(*core.Service)
				for _, a := range append(addressesOf(service), externalIPsOf(service)...) {
					addrs = append(addrs, a.String())
				}
			})
			return addrs, nil
		}, withClusterIP: func(x any) ([]string, error) { return x.(*core.Service).Spec.ClusterIPs, nil }}),
	}
	watch := func(i cache.SharedIndexInformer, key func(any) string) cache.Indexer {
		errs = append(errs, s.watch(i, key))
		return i.GetIndexer()
	}
	s.slices = watch(endpoints, sliceKey)
	s.services = watch(services, func(x any) string { return nameOf(x.(*core.Service)) })
	s.nodes = cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	return errors.Join(append(errs, s.watchOwn(node))...)
}

// Service returns the Service with this name in lb, or nil. It may be called from any goroutine.
func (s *Source) Service(name string) *core.Service {
	x, ok, err := s.services.GetByKey(name)
	if err != nil || !ok {
		return nil
	}
	return x.(*core.Service)
}

// Run implements lb.Source.
func (s *Source) Run(ctx context.Context, sink lb.Sink) error {
	for _, i := range s.informers {
		go i.RunWithContext(ctx)
	}
	stop := context.AfterFunc(ctx, s.queue.ShutDown)
	defer stop()
	s.watchOthers(ctx)
	if !cache.WaitForCacheSync(ctx.Done(), s.synced...) {
		return nil
	}
	var shutdown func()
	s.events, shutdown = newRecorder(ctx, s.o.Client, s.o.Node)
	defer shutdown()
	s.recorder.Store(&s.events)
	s.conditions.startProxyCheck(false)
	s.readNodes()
	s.setTunnelSources()
	s.keepHeld()
	s.passAll()
	s.queue.AddAfter(usedPorts, usedEvery)
	for _, x := range s.services.List() {
		service := x.(*core.Service)
		s.reconcile(nameOf(service), sink)
	}
	sink.Complete(Name)
	s.complete = true
	s.o.Log.Info("cluster caches synced", "services", len(s.services.List()), "served", len(s.put))
	for {
		key, down := s.queue.Get()
		if down {
			return nil
		}
		s.handle(key, sink)
		s.queue.Done(key)
	}
}

// handle reconciles everything that a key of the queue refers to.
func (s *Source) handle(key string, sink lb.Sink) {
	switch key {
	case anyNode:
		s.followNodes(sink)
	case everything:
		s.reconcileAll(sink)
	case otherPools:
		if pools := s.newPools.Swap(nil); pools != nil {
			s.usePools(*pools)
			s.passAll()
		}
		for _, x := range s.services.List() { // including those without an address from a pool
			s.reconcile(nameOf(x.(*core.Service)), sink)
		}
	case otherProbing:
		if p := s.newProbing.Swap(nil); p != nil {
			s.o.Probe, s.o.ProxyHealthz, s.o.KeepLast, s.o.Hold = p.Probe, p.ProxyHealthz, p.KeepLast, p.Hold
			s.conditions.setProbing(*p)
		}
		s.reconcileAll(sink)
	case probedNodes:
		s.probes.follow(s.put, s.targets)
	case failedRules:
		s.passFailed()
	case usedPorts:
		s.passUsed()
	default:
		s.reconcile(key, sink)
		s.passed.triggers = append(s.passed.triggers, s.programming.take(key)...)
		s.passChanged(key)
	}
	s.noteRules()
}

// reconcileOne sends the engine what this node does for a service.
func (s *Source) reconcileOne(name string, sink lb.Sink) {
	all := s.slicesOf(name)
	if slices.ContainsFunc(all, func(x *endpointSlice) bool { return x.unreadable }) {
		s.freeze(name, sink)
		return
	}
	v := s.viewOf(name)
	old := s.put[name]
	s.probeSoon(old, v)
	if v == nil {
		delete(s.targets, name)
		delete(s.settings, name)
		if old != nil {
			sink.Delete(name)
			delete(s.put, name)
			delete(s.endpoints, name)
			delete(s.usable, name)
			delete(s.held, name)
		}
		s.o.Boundary.Report(lb.PartEndpoints, name, "")
		s.o.Boundary.Report(lb.PartEndpoint, name, "")
		s.fits(name, 0)
		s.boundExternal(name, &addresses{})
		s.conditions.stop(name)
		s.portOfOther(name)
		return
	}
	s.o.Boundary.Report(lb.PartEndpoint, name, ignored(all))
	s.addStale(v)
	if old != nil {
		if reflect.DeepEqual(old.Ports, v.service.Ports) {
			v.service.Ports = old.Ports // old plans refer to it, so this saves a copy
		}
		if reflect.DeepEqual(old, v.service) {
			return
		}
	}
	s.put[name] = v.service
	sink.Put(v.service)
}

// viewOf returns this node's view of a service, or nil if the node does not serve it.
func (s *Source) viewOf(name string) *view {
	x, ok, err := s.services.GetByKey(name)
	if err != nil || !ok {
		return nil
	}
	service := x.(*core.Service)
	if !handled(service) {
		return nil
	}
	addrs := s.addressesFor(service)
	s.boundExternal(name, &addrs)
	if len(addrs.vips)+len(addrs.refused) == 0 {
		return nil
	}
	endpoints, kept := s.kept(name, s.slicesOf(name))
	set, _ := settingsOf(service, s.settings[name]) // term.complain reports the error
	s.settings[name] = set
	unranged := len(set.ranges) > 0 && s.sharesPorts(service, addrs.vips)
	if unranged {
		set.ranges = nil // they could contain another Service's port
	}
	service = withoutPorts(service, addrs.taken)
	v := translate(service, set, addrs.vips, endpoints, s.top, s.shares(service),
		s.spreads(service, addrs.vips), s.o.MaxEndpoints)
	if set.fromEndpoints && !isLocal(service) && v.readyLocal == 0 {
		v.service.LowerPreference = lb.NoEndpointHere
	}
	v.service.UnrestrictedVIPs, v.service.Refused = addrs.external, addrs.refused
	v.unranged = unranged
	s.bound(v)
	s.nodePort(service, v.readyLocal)
	v.announced, v.kept = announced(s.put[name]), kept
	v.service.WithholdReason = s.conditions.withhold(service, v, s.own)
	reason := v.service.WithholdReason
	v.service.WithholdIntended = reason == lb.NoLocalEndpoint || reason == lb.NoEndpoint ||
		s.own != nil && s.conditions.excluded(s.own) != ""
	s.lastAnnouncer(service, v, endpoints)
	s.hold(v.service)
	s.pooled(v.service)
	if kept {
		s.keep(v.service)
	}
	v.withholdFamilies()
	return v
}
