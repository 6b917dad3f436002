package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"net/netip"
	"slices"
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

// finalizer keeps a Service until its addresses are taken back (k8s.io/cloud-provider/service/helpers).
const finalizer = "service.kubernetes.io/load-balancer-cleanup"

// Allocator gives addresses to Services while this agent is the leader.
type Allocator struct {
	o      AllocatorOptions
	events record.EventRecorder
}

// term is the time from one election to the next.
type term struct {
	*Allocator
	services cache.Store
	queue    workqueue.TypedRateLimitingInterface[string]
	assigner *assigner
}

// AllocatorOptions is everything an Allocator needs.
type AllocatorOptions struct {
	Client kubernetes.Interface
	// Lease is a client for the election, whose requests end within a few seconds: else an API server that is silent when we
	// end would keep us.
	Lease     kubernetes.Interface
	Node      string // who we are in the election
	Namespace string // of the lease
	Class     string
	Pools     []Pool
	Log       *slog.Logger
}

// NewAllocator returns an Allocator that does nothing until Run.
func NewAllocator(o AllocatorOptions) *Allocator { return &Allocator{o: o} }

// How long a leader that is silent stays one, and so for how long nobody may be given an address.
const (
	leaseFor   = 15 * time.Second
	renewFor   = 10 * time.Second
	leaseRetry = 2 * time.Second
)

// Run takes part in the election until ctx ends.
func (a *Allocator) Run(ctx context.Context) error {
	var shutdown func()
	a.events, shutdown = newRecorder(ctx, a.o.Client, a.o.Node)
	defer shutdown()
	for ctx.Err() == nil { // an election ends when the lease is lost; then comes the next
		leaderelection.RunOrDie(ctx, leaderelection.LeaderElectionConfig{
			Lock: &resourcelock.LeaseLock{
				LeaseMeta: meta.ObjectMeta{Name: "steelyard", Namespace: a.o.Namespace}, Client: a.o.Lease.CoordinationV1(),
				LockConfig: resourcelock.ResourceLockConfig{Identity: a.o.Node},
			},
			LeaseDuration: leaseFor, RenewDeadline: renewFor, RetryPeriod: leaseRetry, ReleaseOnCancel: true, Name: "steelyard",
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: a.lead,
				OnStoppedLeading: func() { a.o.Log.Info("another agent gives addresses now") },
			},
		})
	}
	return nil
}

// lead gives addresses until ctx ends. What is given is read first, and only then anything new is.
func (a *Allocator) lead(ctx context.Context) {
	t := &term{
		Allocator: a, assigner: newAssigner(a.o.Pools),
		queue: workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]()),
	}
	factory := informers.NewSharedInformerFactoryWithOptions(a.o.Client, 0, informers.WithTransform(slim))
	informer := factory.Core().V1().Services().Informer()
	t.services = informer.GetStore()
	touch := func(x any) {
		if gone, ok := x.(cache.DeletedFinalStateUnknown); ok {
			x = gone.Obj
		}
		t.queue.Add(nameOf(x.(*core.Service)))
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: touch, UpdateFunc: func(_, x any) { touch(x) }, DeleteFunc: touch,
	})
	if err != nil {
		a.o.Log.Error("Services not watched", "err", err)
		return
	}
	factory.Start(ctx.Done())
	if !cache.WaitForCacheSync(ctx.Done(), informer.HasSynced) {
		return
	}
	a.o.Log.Info("this agent gives addresses now")
	t.adopt()
	stop := context.AfterFunc(ctx, t.queue.ShutDown)
	defer stop()
	for {
		key, down := t.queue.Get()
		if down {
			return
		}
		if err := t.reconcile(ctx, key); err != nil {
			a.o.Log.Warn("address not given", "service", key, "err", err)
			t.queue.AddRateLimited(key)
		} else {
			t.queue.Forget(key)
		}
		t.queue.Done(key)
	}
}

// adopt takes note of what Services have, the oldest first: it was there before who came to have the same.
func (t *term) adopt() {
	var all []*core.Service
	for _, x := range t.services.List() {
		all = append(all, x.(*core.Service))
	}
	slices.SortFunc(all, func(a, b *core.Service) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(nameOf(a), nameOf(b)))
	})
	for _, s := range all {
		t.assigner.reserve(s)
		if ours(s, t.o.Class) {
			t.assigner.adopt(s)
		}
	}
}

// reconcile makes finalizer and status of a Service what they should be. It fails when the API server does.
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
	if !ours(s, t.o.Class) || s.DeletionTimestamp != nil {
		return t.takeBack(ctx, s)
	}
	addrs, err := t.assigner.assign(s)
	if err != nil {
		t.events.Event(s, core.EventTypeWarning, "AllocationFailed", err.Error())
		t.o.Log.Warn("no address for service", "service", key, "reason", err)
		return nil // a change of the Service, of another one, or of the pools is needed
	}
	if err := t.setFinalizer(ctx, s, true); err != nil {
		return err
	}
	given, err := t.setStatus(ctx, s, addrs)
	if err == nil && given {
		t.events.Eventf(s, core.EventTypeNormal, "IPAllocated", "assigned %v", addrs)
		t.o.Log.Info("address given", "service", key, "addresses", addrs)
	}
	return err
}

// takeBack clears the status of a Service that is no longer ours to serve, and lets it go.
func (t *term) takeBack(ctx context.Context, s *core.Service) error {
	had := t.assigner.holds(nameOf(s))
	others := s.Spec.Type == core.ServiceTypeLoadBalancer && !ours(s, t.o.Class)
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
		t.o.Log.Info("address taken back", "service", nameOf(s))
		t.retryOthers()
	}
	return nil
}

// retryOthers looks again at Services without an address: one has become free.
func (t *term) retryOthers() {
	for _, x := range t.services.List() {
		if s := x.(*core.Service); ours(s, t.o.Class) && len(s.Status.LoadBalancer.Ingress) == 0 {
			t.queue.Add(nameOf(s))
		}
	}
}

func (a *Allocator) setFinalizer(ctx context.Context, s *core.Service, on bool) error {
	has := slices.Contains(s.Finalizers, finalizer)
	if has == on {
		return nil
	}
	list := slices.DeleteFunc(slices.Clone(s.Finalizers), func(f string) bool { return f == finalizer })
	if on {
		list = append(list, finalizer)
	}
	return a.patch(ctx, s, map[string]any{"metadata": map[string]any{"resourceVersion": s.ResourceVersion, "finalizers": list}})
}

// setStatus writes the addresses, if they are others than before.
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
	return true, a.patch(ctx, s, map[string]any{"status": map[string]any{"loadBalancer": map[string]any{"ingress": ingress}}}, "status")
}

func (a *Allocator) patch(ctx context.Context, s *core.Service, change map[string]any, subresource ...string) error {
	text, err := json.Marshal(change)
	if err != nil {
		return err
	}
	_, err = a.o.Client.CoreV1().Services(s.Namespace).Patch(ctx, s.Name, types.MergePatchType, text, meta.PatchOptions{FieldManager: "steelyard"}, subresource...)
	return err
}
