package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// watch starts following the Services, which are queued when they change.
func (t *term) watch(ctx context.Context) error {
	all := t.o.Client.CoreV1().Services(meta.NamespaceAll)
	informer := newInformer(t.o.Client, all, &core.Service{}, slim, everyObject)
	t.services = informer.GetStore()
	touch := func(x any) { t.queue.Add(nameOf(x.(*core.Service))) }
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: touch, UpdateFunc: func(_, x any) { touch(x) },
		DeleteFunc: func(x any) {
			if deleted, ok := x.(cache.DeletedFinalStateUnknown); ok {
				x = deleted.Obj
			}
			t.deleted(x.(*core.Service))
			touch(x)
		},
	})
	if err != nil {
		return fmt.Errorf("watch the Services: %w", err)
	}
	go informer.RunWithContext(ctx)
	cache.WaitForCacheSync(ctx.Done(), informer.HasSynced)
	return nil
}

// deleted records that a Service was deleted. A lagging watch may report an earlier Service of the same name.
func (t *term) deleted(s *core.Service) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if known, ok := t.known[nameOf(s)]; !ok || known.uid == s.UID {
		t.gone[nameOf(s)] = true
	}
}

// work reconciles queued Services until the queue is shut down.
func (t *term) work(ctx context.Context) {
	for {
		key, down := t.queue.Get()
		if down {
			return
		}
		switch err := t.handle(ctx, key); {
		case errors.Is(err, errDeposed):
			t.deposed()
		case errors.Is(err, errLedgerFull):
			t.setFull(err)
			t.queue.AddAfter(key, leaseRetry)
		case err != nil:
			t.o.Log.Warn("address not assigned", "service", key, "err", err)
			t.queue.AddRateLimited(key)
		default:
			t.queue.Forget(key)
		}
		t.queue.Done(key)
	}
}

// current returns a Service from the cache, or nil if it does not exist or a newer version is known.
func (t *term) current(key string) (*core.Service, error) {
	x, ok, err := t.services.GetByKey(key)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !ok {
		if t.gone[key] {
			t.forget(key)
		}
		return nil, nil
	}
	s := x.(*core.Service)
	v := versionOf(s)
	known, ok := t.known[key]
	if v.number < known.number || !ok && v.number < t.read {
		return nil, nil // the watch will deliver newer changes
	}
	t.know(s)
	delete(t.gone, key)
	return s, nil
}

// reconcile sets the finalizer and status of a Service. It fails if a request fails.
func (t *term) reconcile(ctx context.Context, key string) error {
	s, err := t.current(key)
	if s == nil || err != nil {
		return err
	}
	t.ledger.pendingFor(s) // drops intents that required an older version
	t.complainExternal(s)
	t.complainClass(s)
	if !matchesClass(s, t.o.Classes...) || s.DeletionTimestamp != nil {
		return t.withdraw(ctx, s)
	}
	if t.isCleared(s) || t.isOfOthers(s) {
		return nil
	}
	d := t.decide(s)
	t.complain(s, d)
	conditions, text := t.conditionsFor(s, d)
	if d.warning != "" && !said(s, d) {
		t.events.Event(s, core.EventTypeWarning, d.reason, d.warning)
		t.o.Log.Warn("problem with the addresses of a service", "service", key, "reason", d.warning)
		t.decided(key, "%s", d.warning)
	}
	if d.write { // even without addresses, because an agent that no longer leads must not revoke any
		i := intent{Service: key, UID: string(s.UID), Version: s.ResourceVersion, Addresses: d.addrs}
		if d.record != "" {
			i.Ports = []string{d.record}
		}
		if err := t.ledger.record(ctx, i); err != nil {
			return err
		}
		if !t.ledger.isFull() {
			t.setFull(nil)
		}
	}
	if d.warning != "" && !d.write { // only a change of this Service, another one, or the pools can help
		err := t.put(ctx, s, hasFinalizer(s), statusOf(s), conditions)
		if err == nil {
			t.wroteCondition(s, d, text)
		}
		return err
	}
	if err := t.put(ctx, s, true, d.addrs, conditions); err != nil {
		if d.write {
			t.failed(ctx, s, err)
		}
		return err
	}
	t.wroteCondition(s, d, text)
	if !d.write {
		return nil
	}
	changed := !slices.Equal(d.addrs, statusOf(s))
	t.locked(func() {
		delete(t.refused, key)
		switch {
		case changed && len(d.addrs) > 0:
			if t.gave[key] = s.UID; !isOurs(s) {
				t.extended[key] = s.UID
			}
		case changed:
			delete(t.gave, key)
		}
		t.assigner.settle(s, d)
		t.queueOthers()
	})
	if !changed {
		return nil
	}
	if len(d.addrs) > 0 {
		t.events.Eventf(s, core.EventTypeNormal, "IPAllocated", "assigned %v", d.addrs)
	}
	t.moved(s, d.addrs, whyMoved(s, d))
	t.o.Log.Info("address assigned", "service", key, "addresses", d.addrs)
	t.decided(key, "assigned %v", d.addrs)
	return nil
}

// decide returns the decision about a Service's status, and queues the Services that wait for what it frees.
func (t *term) decide(s *core.Service) decision {
	t.mu.Lock()
	defer t.mu.Unlock()
	d := t.assigner.decide(s, t.ledger.pendingFor(s), t.extended[nameOf(s)] == s.UID)
	d.warning = note(d.warning)
	delete(t.waiting, nameOf(s)) // this decision already considers what it frees
	t.queueOthers()
	if d.waits {
		t.waiting[nameOf(s)] = true
	}
	if t.perNode[nameOf(s)] = isPerNode(s); !isPerNode(s) {
		delete(t.perNode, nameOf(s))
	}
	return d
}

// setNodes sets how many nodes may and may not have addresses.
func (t *term) setNodes(usable, excluded int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := usable == 0 || t.assigner.nodes == 0 // the result of unannounced may have changed
	t.assigner.nodes, t.excluded = usable, excluded
	for name := range t.perNode {
		t.queue.Add(name)
	}
	if all {
		t.queueAll()
	}
}

// queueAll queues every Service; t.mu is held.
func (t *term) queueAll() {
	for name := range t.known {
		t.queue.Add(name)
	}
}

// Delays before addresses that somebody has removed from a status are written again.
const clearedDelay, clearedDelayMax = time.Second, 5 * time.Minute

// isCleared reports whether a status from which somebody has removed our addresses stays empty for now.
func (t *term) isCleared(s *core.Service) bool {
	key := nameOf(s)
	t.mu.Lock()
	c := t.cleared[key]
	uid, gave := t.gave[key]
	gave = gave && uid == s.UID
	switch {
	case len(s.Status.LoadBalancer.Ingress) > 0:
		t.mu.Unlock()
		return false
	case gave:
		delete(t.gave, key)
		if time.Since(c.until) > clearedDelayMax {
			c.times = 0
		}
		c.until = time.Now().Add(min(clearedDelay<<c.times, clearedDelayMax))
		c.times = min(c.times+1, 10)
		t.cleared[key] = c
	}
	t.mu.Unlock()
	left := time.Until(c.until)
	if left <= 0 {
		return false
	}
	if gave {
		t.events.Eventf(s, core.EventTypeWarning, "StatusCleared",
			"something has removed the addresses from status.loadBalancer; they will be written again in %s",
			left.Round(time.Second))
	}
	t.queue.AddAfter(key, left)
	return true
}

// forget drops the state and the addresses of a deleted Service; t.mu is held.
func (t *term) forget(key string) {
	delete(t.gone, key)
	delete(t.known, key)
	delete(t.waiting, key)
	delete(t.perNode, key)
	delete(t.cleared, key)
	delete(t.gave, key)
	delete(t.extended, key)
	delete(t.complaints, key)
	delete(t.refused, key)
	delete(t.wrote, key)
	t.ledger.done(key)
	t.assigner.unreserve(key)
	t.assigner.release(key)
	t.queueOthers()
}

// withdraw clears the status of a Service that is being deleted or no longer of our class, removes our finalizer and
// releases the addresses. It keeps what another implementation or another class's allocator has written.
func (t *term) withdraw(ctx context.Context, s *core.Service) error {
	t.mu.Lock()
	given := t.assigner.given(s)
	had := len(given) > 0
	waited := t.waiting[nameOf(s)]
	t.mu.Unlock()
	status, final := takesBack(s, t.o.Classes, given)
	addrs, conditions := statusOf(s), s.Status.Conditions
	if status {
		addrs = nil
	}
	if status || had || waited || !isOfOtherClass(s, t.o.Classes) { // otherwise they are from that class's allocator
		conditions = conditionsOfOthers(s)
	}
	if err := t.put(ctx, s, hasFinalizer(s) && !final, addrs, conditions); err != nil {
		return err
	}
	t.locked(func() {
		t.assigner.reserve(s, nil)
		t.assigner.release(nameOf(s))
		delete(t.waiting, nameOf(s))
		delete(t.perNode, nameOf(s))
		delete(t.gave, nameOf(s))
		t.queueOthers()
	})
	if status && s.DeletionTimestamp == nil {
		t.moved(s, nil, "its type or class has changed")
	}
	if had {
		t.o.Log.Info("address released", "service", nameOf(s))
		t.decided(nameOf(s), "released %v", given)
	}
	return nil
}

// queueOthers queues the Services that wait for an address or a port if one may be free; t.mu is held.
func (t *term) queueOthers() {
	if t.assigner.alloc.Freed() {
		for name := range t.waiting {
			t.queue.Add(name)
		}
	}
}

// put writes a Service like write, and remembers its version.
func (t *term) put(
	ctx context.Context, s *core.Service, finalized bool, addrs []string, conditions []meta.Condition,
) error {
	now, err := t.write(ctx, s, finalized, addrs, conditions)
	if err != nil || now == nil {
		return err
	}
	t.ledger.done(nameOf(s)) // writes that require an older version fail
	t.mu.Lock()
	defer t.mu.Unlock()
	t.know(now)
	return nil
}

// write sets whether a Service has our finalizer, the addresses in status.loadBalancer, and the conditions. It sends
// one request, to the status subresource. The API server also accepts metadata there, so the agent needs no right to
// change the spec. write fails if the Service has changed in the meantime. It returns the updated Service, or nil if
// there was nothing to write.
func (a *Allocator) write(
	ctx context.Context, s *core.Service, finalized bool, addrs []string, conditions []meta.Condition,
) (*core.Service, error) {
	metadata := map[string]any{"resourceVersion": s.ResourceVersion}
	change, status := map[string]any{}, map[string]any{}
	if hasFinalizer(s) != finalized {
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
		status["loadBalancer"] = map[string]any{"ingress": ingress}
	}
	if !reflect.DeepEqual(conditions, s.Status.Conditions) && len(conditions)+len(s.Status.Conditions) > 0 {
		status["conditions"] = conditions
	}
	if len(status) > 0 {
		change["metadata"], change["status"] = metadata, status
	}
	if len(change) == 0 {
		return nil, nil
	}
	text, err := json.Marshal(change)
	if err != nil {
		return nil, err
	}
	o := meta.PatchOptions{FieldManager: managerOf(a.class())}
	services := a.o.Client.CoreV1().Services(s.Namespace)
	return services.Patch(ctx, s.Name, types.MergePatchType, text, o, "status")
}
