package kube

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
)

// finalizer keeps a deleted Service until its addresses are released (k8s.io/cloud-provider/service/helpers).
const finalizer = "service.kubernetes.io/load-balancer-cleanup"

// Allocator assigns addresses to Services while this agent is the leader.
type Allocator struct {
	o      AllocatorOptions
	events record.EventRecorder
	leader atomic.Value // string: the node that assigns addresses
}

// Leader returns the node that assigns addresses; "": none, or it is not known yet.
func (a *Allocator) Leader() string {
	name, _ := a.leader.Load().(string)
	return name
}

// term is the state of one period as the leader.
type term struct {
	*Allocator
	services cache.Store
	queue    workqueue.TypedRateLimitingInterface[string]

	mu       sync.Mutex // guards assigner
	assigner *assigner
}

// workers is the number of Services that are written at a time. A request takes some milliseconds.
const workers = 16

// AllocatorOptions configures an Allocator.
type AllocatorOptions struct {
	Client kubernetes.Interface
	// Lease is a client for the election whose requests have a timeout of a few seconds, because the last one delays
	// the shutdown while the API server does not answer.
	Lease     kubernetes.Interface
	Node      string // the identity in the election
	Namespace string // of the lease
	Class     string
	Pools     []Pool
	// Problem is called with the error of a request about the Lease that the API server refuses, and with nil after one
	// that it accepts. Nil: not called.
	Problem func(error)
	Log     *slog.Logger
}

// NewAllocator returns an Allocator that does nothing until Run.
func NewAllocator(o AllocatorOptions) *Allocator { return &Allocator{o: o} }

// Run takes part in the election until ctx ends.
func (a *Allocator) Run(ctx context.Context) error {
	var shutdown func()
	a.events, shutdown = newRecorder(ctx, a.o.Client, a.o.Node)
	defer shutdown()
	for a.awaitLease(ctx) {
		a.campaign(ctx)
	}
	return nil
}

// lead assigns addresses until ctx ends. It reads what is assigned before it assigns anything new.
func (a *Allocator) lead(ctx context.Context) {
	t := &term{
		Allocator: a, assigner: newAssigner(a.o.Pools),
		queue: workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]()),
	}
	stop := context.AfterFunc(ctx, t.queue.ShutDown)
	defer func() {
		stop()
		t.queue.ShutDown()
	}()
	factory := informers.NewSharedInformerFactoryWithOptions(a.o.Client, 0, informers.WithTransform(slim))
	informer := factory.Core().V1().Services().Informer()
	t.services = informer.GetStore()
	touch := func(x any) {
		if deleted, ok := x.(cache.DeletedFinalStateUnknown); ok {
			x = deleted.Obj
		}
		t.queue.Add(nameOf(x.(*core.Service)))
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: touch, UpdateFunc: func(_, x any) { touch(x) }, DeleteFunc: touch,
	})
	if err != nil {
		a.o.Log.Error("services not watched", "err", err)
		return
	}
	factory.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		return
	}
	a.o.Log.Info("this agent assigns addresses")
	t.adopt()
	var all sync.WaitGroup
	for range workers {
		all.Go(func() { t.work(ctx) })
	}
	all.Wait()
}

// work reconciles what is queued until the queue is shut down.
func (t *term) work(ctx context.Context) {
	for {
		key, down := t.queue.Get()
		if down {
			return
		}
		if err := t.reconcile(ctx, key); err != nil {
			t.o.Log.Warn("address not assigned", "service", key, "err", err)
			t.queue.AddRateLimited(key)
		} else {
			t.queue.Forget(key)
		}
		t.queue.Done(key)
	}
}

// adopt records the addresses in the status of the Services of our class, and the externalIPs of all.
func (t *term) adopt() {
	for _, x := range t.services.List() {
		s := x.(*core.Service)
		t.assigner.reserve(s)
		if matchesClass(s, t.o.Class) {
			t.assigner.adopt(s)
		}
	}
}

// reconcile sets finalizer and status of a Service. It fails when the API server does.
func (t *term) reconcile(ctx context.Context, key string) error {
	x, ok, err := t.services.GetByKey(key)
	if err != nil {
		return err
	}
	if !ok {
		t.forget(key)
		return nil
	}
	s := x.(*core.Service)
	if t.reserve(s); !matchesClass(s, t.o.Class) || s.DeletionTimestamp != nil {
		return t.withdraw(ctx, s)
	}
	addrs, err := t.assign(s)
	if err != nil {
		t.events.Event(s, core.EventTypeWarning, "AllocationFailed", err.Error())
		t.o.Log.Warn("no address for service", "service", key, "reason", err)
		return nil // only a change of the Service, of another one or of the pools can help
	}
	var list []string
	for _, addr := range addrs {
		list = append(list, addr.String())
	}
	if err := t.write(ctx, s, true, list); err != nil {
		return err
	}
	if !slices.Equal(list, statusOf(s)) {
		t.events.Eventf(s, core.EventTypeNormal, "IPAllocated", "assigned %v", addrs)
		t.o.Log.Info("address assigned", "service", key, "addresses", addrs)
	}
	return nil
}

func (t *term) reserve(s *core.Service) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.assigner.reserve(s)
}

func (t *term) assign(s *core.Service) ([]netip.Addr, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.assigner.assign(s)
}

// release takes back the addresses of a service, and reports whether it had any.
func (t *term) release(key string) (had bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	had = t.assigner.holds(key)
	t.assigner.release(key)
	return had
}

// forget takes back what a deleted Service had.
func (t *term) forget(key string) {
	t.mu.Lock()
	t.assigner.unreserve(key)
	t.mu.Unlock()
	if t.release(key) {
		t.retryOthers()
	}
}

// withdraw clears the status of a Service that is no longer of our class or is being deleted, removes the finalizer
// and releases the addresses.
func (t *term) withdraw(ctx context.Context, s *core.Service) error {
	t.mu.Lock()
	had := t.assigner.holds(nameOf(s))
	t.mu.Unlock()
	others := s.Spec.Type == core.ServiceTypeLoadBalancer && !matchesClass(s, t.o.Class)
	if !had && (others || !slices.Contains(s.Finalizers, finalizer)) {
		return nil
	}
	addrs := statusOf(s)
	if s.DeletionTimestamp == nil {
		addrs = nil
	}
	if err := t.write(ctx, s, false, addrs); err != nil {
		return err
	}
	if t.release(nameOf(s)) {
		t.o.Log.Info("address released", "service", nameOf(s))
		t.retryOthers()
	}
	return nil
}

// retryOthers adds to the queue the Services without an address, because one is free now.
func (t *term) retryOthers() {
	for _, x := range t.services.List() {
		if s := x.(*core.Service); matchesClass(s, t.o.Class) && len(s.Status.LoadBalancer.Ingress) == 0 {
			t.queue.Add(nameOf(s))
		}
	}
}

// statusOf returns the addresses in the status of a Service, as text.
func statusOf(s *core.Service) (addrs []string) {
	for _, i := range s.Status.LoadBalancer.Ingress {
		addrs = append(addrs, i.IP)
	}
	return addrs
}

// write sets whether a Service has our finalizer, and the addresses in status.loadBalancer. It is one request, to the
// status, through which the API server takes metadata, too: so agents need no right to change the spec of a Service. It
// fails if the Service was changed meanwhile.
func (a *Allocator) write(ctx context.Context, s *core.Service, finalized bool, addrs []string) error {
	metadata := map[string]any{"resourceVersion": s.ResourceVersion}
	change := map[string]any{}
	if slices.Contains(s.Finalizers, finalizer) != finalized {
		list := slices.DeleteFunc(slices.Clone(s.Finalizers), func(f string) bool { return f == finalizer })
		if finalized {
			list = append(list, finalizer)
		}
		metadata["finalizers"], change["metadata"] = list, metadata
	}
	if !slices.Equal(addrs, statusOf(s)) {
		mode, ingress := core.LoadBalancerIPModeVIP, []core.LoadBalancerIngress{}
		for _, addr := range addrs {
			ingress = append(ingress, core.LoadBalancerIngress{IP: addr, IPMode: &mode})
		}
		change["metadata"] = metadata
		change["status"] = map[string]any{"loadBalancer": map[string]any{"ingress": ingress}}
	}
	if len(change) == 0 {
		return nil
	}
	text, err := json.Marshal(change)
	if err != nil {
		return err
	}
	o := meta.PatchOptions{FieldManager: "steelyard"}
	services := a.o.Client.CoreV1().Services(s.Namespace)
	_, err = services.Patch(ctx, s.Name, types.MergePatchType, text, o, "status")
	return err
}
