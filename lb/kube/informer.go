package kube

import (
	"context"

	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// collection is a typed client of one kind of object, such as kubernetes.Interface.CoreV1().Nodes().
type collection[List runtime.Object] interface {
	List(context.Context, meta.ListOptions) (List, error)
	Watch(context.Context, meta.ListOptions) (watch.Interface, error)
}

// newInformer returns an informer of the selected objects of a collection, which it stores as slim returns them. Those
// of client-go's package informers do the same, but make each build compile informers of all types of Kubernetes.
func newInformer[List runtime.Object](
	client kubernetes.Interface, of collection[List], object runtime.Object, slim cache.TransformFunc,
	selects func(*meta.ListOptions),
) cache.SharedIndexInformer {
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o meta.ListOptions) (runtime.Object, error) {
			selects(&o)
			return of.List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o meta.ListOptions) (watch.Interface, error) {
			selects(&o)
			return of.Watch(ctx, o)
		},
	}
	i := cache.NewSharedIndexInformer(
		cache.ToListWatcherWithWatchListSemantics(lw, client), object, 0, cache.Indexers{})
	_ = i.SetTransform(slim) // fails only after a start
	return i
}

func everyObject(*meta.ListOptions) {}

func named(name string) func(*meta.ListOptions) {
	selector := fields.OneTermEqualSelector("metadata.name", name).String()
	return func(o *meta.ListOptions) { o.FieldSelector = selector }
}

// watch queues the key of each object that changes, and the Services that share an address with it.
func (s *Source) watch(i cache.SharedIndexInformer, key func(any) string) error {
	touch := func(x any) {
		if deleted, ok := x.(cache.DeletedFinalStateUnknown); ok {
			x = deleted.Obj
		}
		s.queue.Add(key(x))
		s.programming.changed()
		s.arrived(x, func() { s.touchSharing(x) })
	}
	_, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(x any) {
			s.programming.triggered(nil, x)
			touch(x)
		},
		DeleteFunc: touch, // its time would be that of the last change
		UpdateFunc: func(old, x any) {
			if sameVersion(old, x) {
				return
			}
			s.programming.triggered(old, x)
			touch(x)
			s.arrived(old, func() { s.touchSharing(old) })
		},
	})
	s.synced = append(s.synced, i.HasSynced)
	return err
}
