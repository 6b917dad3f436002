package kube

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
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
	assigner *assigner
}

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
	Log       *slog.Logger
}

// NewAllocator returns an Allocator that does nothing until Run.
func NewAllocator(o AllocatorOptions) *Allocator { return &Allocator{o: o} }

// The timing of the election. No address is assigned for up to leaseDuration after a leader has failed.
const (
	leaseDuration = 15 * time.Second
	renewDeadline = 10 * time.Second
	leaseRetry    = 2 * time.Second
)

// Run takes part in the election until ctx ends.
func (a *Allocator) Run(ctx context.Context) error {
	var shutdown func()
	a.events, shutdown = newRecorder(ctx, a.o.Client, a.o.Node)
	defer shutdown()
	lock := &resourcelock.LeaseLock{
		LeaseMeta:  meta.ObjectMeta{Name: "steelyard", Namespace: a.o.Namespace},
		Client:     a.o.Lease.CoordinationV1(),
		LockConfig: resourcelock.ResourceLockConfig{Identity: a.o.Node},
	}
	for ctx.Err() == nil { // RunOrDie returns when the lease is lost
		leaderelection.RunOrDie(ctx, leaderelection.LeaderElectionConfig{
			Lock: lock, LeaseDuration: leaseDuration, RenewDeadline: renewDeadline, RetryPeriod: leaseRetry,
			ReleaseOnCancel: true, Name: "steelyard",
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: a.lead,
				OnNewLeader:      func(node string) { a.leader.Store(node) },
				OnStoppedLeading: func() { a.o.Log.Info("this agent does not assign addresses") },
			},
		})
	}
	return nil
}

// lead assigns addresses until ctx ends. It reads what is assigned before it assigns anything new.
func (a *Allocator) lead(ctx context.Context) {
	t := &term{
		Allocator: a, assigner: newAssigner(a.o.Pools),
		queue: workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]()),
	}
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
	stop := context.AfterFunc(ctx, t.queue.ShutDown)
	defer stop()
	for {
		key, down := t.queue.Get()
		if down {
			return
		}
		if err := t.reconcile(ctx, key); err != nil {
			a.o.Log.Warn("address not assigned", "service", key, "err", err)
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
		t.assigner.unreserve(key)
		if t.assigner.holds(key) {
			t.assigner.release(key)
			t.retryOthers()
		}
		return nil
	}
	s := x.(*core.Service)
	t.assigner.reserve(s)
	if !matchesClass(s, t.o.Class) || s.DeletionTimestamp != nil {
		return t.withdraw(ctx, s)
	}
	addrs, err := t.assigner.assign(s)
	if err != nil {
		t.events.Event(s, core.EventTypeWarning, "AllocationFailed", err.Error())
		t.o.Log.Warn("no address for service", "service", key, "reason", err)
		return nil // only a change of the Service, of another one or of the pools can help
	}
	if err := t.setFinalizer(ctx, s, true); err != nil {
		return err
	}
	changed, err := t.setStatus(ctx, s, addrs)
	if err == nil && changed {
		t.events.Eventf(s, core.EventTypeNormal, "IPAllocated", "assigned %v", addrs)
		t.o.Log.Info("address assigned", "service", key, "addresses", addrs)
	}
	return err
}

// withdraw clears the status of a Service that is no longer of our class or is being deleted, removes the finalizer
// and releases the addresses.
func (t *term) withdraw(ctx context.Context, s *core.Service) error {
	had := t.assigner.holds(nameOf(s))
	others := s.Spec.Type == core.ServiceTypeLoadBalancer && !matchesClass(s, t.o.Class)
	if !had && (others || !slices.Contains(s.Finalizers, finalizer)) {
		return nil
	}
	if s.DeletionTimestamp == nil {
		if _, err := t.setStatus(ctx, s, nil); err != nil {
			return err
		}
	}
	if err := t.setFinalizer(ctx, s, false); err != nil {
		return err
	}
	t.assigner.release(nameOf(s))
	if had {
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

// setFinalizer adds or removes our finalizer.
func (a *Allocator) setFinalizer(ctx context.Context, s *core.Service, on bool) error {
	has := slices.Contains(s.Finalizers, finalizer)
	if has == on {
		return nil
	}
	list := slices.DeleteFunc(slices.Clone(s.Finalizers), func(f string) bool { return f == finalizer })
	if on {
		list = append(list, finalizer)
	}
	metadata := map[string]any{"resourceVersion": s.ResourceVersion, "finalizers": list}
	return a.patch(ctx, s, map[string]any{"metadata": metadata})
}

// setStatus writes the addresses to status.loadBalancer if they changed.
func (a *Allocator) setStatus(ctx context.Context, s *core.Service, addrs []netip.Addr) (changed bool, err error) {
	mode := core.LoadBalancerIPModeVIP
	ingress := []core.LoadBalancerIngress{}
	same := len(addrs) == len(s.Status.LoadBalancer.Ingress)
	for i, addr := range addrs {
		ingress = append(ingress, core.LoadBalancerIngress{IP: addr.String(), IPMode: &mode})
		same = same && s.Status.LoadBalancer.Ingress[i].IP == addr.String()
	}
	if same {
		return false, nil
	}
	status := map[string]any{"loadBalancer": map[string]any{"ingress": ingress}}
	return true, a.patch(ctx, s, map[string]any{"status": status}, "status")
}

// patch merges a change into a Service or a subresource of it.
func (a *Allocator) patch(ctx context.Context, s *core.Service, change map[string]any, subresource ...string) error {
	text, err := json.Marshal(change)
	if err != nil {
		return err
	}
	o := meta.PatchOptions{FieldManager: "steelyard"}
	_, err = a.o.Client.CoreV1().Services(s.Namespace).Patch(ctx, s.Name, types.MergePatchType, text, o, subresource...)
	return err
}
