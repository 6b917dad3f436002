package kube

import (
	"context"
	"fmt"
	"maps"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// readyWait bounds the wait for the endpoints at the start of a term. Without the right to read them, an allocator
// assigns addresses as if no Service had endpoints.
const readyWait = 10 * time.Second

// watchReady follows the endpoints of Services, for those under Local at the nodes' addresses.
func (t *term) watchReady(ctx context.Context) error {
	endpoints := t.o.Client.DiscoveryV1().EndpointSlices(meta.NamespaceAll)
	informer := newInformer(t.o.Client, endpoints, &discovery.EndpointSlice{}, slim, func(l *meta.ListOptions) {
		l.LabelSelector = "!" + labelProxyName + ",!" + labelHeadless
	})
	of := func(x any) ([]string, error) { return []string{sliceKey(x)}, nil }
	if err := informer.AddIndexers(cache.Indexers{serviceOf: of}); err != nil {
		return fmt.Errorf("watch the endpoints: %w", err)
	}
	touch := func(x any) {
		if deleted, ok := x.(cache.DeletedFinalStateUnknown); ok {
			x = deleted.Obj
		}
		key := sliceKey(x)
		if s, ok, _ := t.services.GetByKey(key); ok && isLocal(s.(*core.Service)) {
			t.queue.Add(key)
		}
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: touch, DeleteFunc: touch,
		UpdateFunc: func(old, now any) {
			if !maps.Equal(readyOn(slicesFrom(old)), readyOn(slicesFrom(now))) {
				touch(now)
			}
		},
	})
	if err != nil {
		return fmt.Errorf("watch the endpoints: %w", err)
	}
	t.assigner.readyOn = func(service string) map[string]bool {
		found, _ := informer.GetIndexer().ByIndex(serviceOf, service) // the index exists
		return readyOn(slicesFrom(found...))
	}
	go informer.RunWithContext(ctx)
	wait, cancel := context.WithTimeout(ctx, readyWait)
	defer cancel()
	if !cache.WaitForCacheSync(wait.Done(), informer.HasSynced) && ctx.Err() == nil {
		t.o.Log.Warn("endpoints not known; Services under Local get the addresses of all nodes",
			"fix", `apply the allocator's ClusterRole that "steelyard manifest" prints`)
	}
	return nil
}

func slicesFrom(objects ...any) (all []*endpointSlice) {
	for _, x := range objects {
		all = append(all, x.(*endpointSlice))
	}
	return all
}
