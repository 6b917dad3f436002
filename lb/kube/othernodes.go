package kube

import (
	"context"
	"sync"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"

	"github.com/steelyard-lb/steelyard/lb"
)

// otherNodes puts the other nodes into the Source's cache, from the node table or, while there is none, from all Nodes.
type otherNodes struct {
	*Source
	mu     sync.Mutex // guards all below, and writes to the cache
	shards map[string]map[string]*core.Node
	// complete is set once the table has all shards. From then on the table is used.
	complete  bool
	stopNodes context.CancelFunc // nil if not watching all Nodes
}

// watchOwn puts this node's Node into the cache.
func (s *Source) watchOwn(i cache.SharedIndexInformer) error {
	keep := func(x any) {
		if n := x.(*core.Node); n.Name == s.o.Node {
			s.keepNode(n)
		}
	}
	own, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: keep, UpdateFunc: func(_, x any) { keep(x) },
		DeleteFunc: func(x any) {
			if n := nodeOfEvent(x); n.Name == s.o.Node {
				s.dropNode(n)
			}
		},
	})
	if err == nil {
		s.synced = append(s.synced, own.HasSynced)
	}
	return err
}

// keepNode puts a node into the cache; dropNode removes one.
func (s *Source) keepNode(n *core.Node) {
	old, known, _ := s.nodes.Get(n) // the key is the name, so there is no error
	same := false
	if !s.o.Boundary.Do(lb.PartNode, n.Name, func() {
		if same = s.sameNode(n, n); known {
			same = s.sameNode(old.(*core.Node), n)
		}
	}) {
		return // the node stays as it was
	}
	if s.nodes.Update(n); !known || !same {
		s.queue.Add(anyNode)
	}
}

func (s *Source) dropNode(n *core.Node) {
	s.nodes.Delete(n)
	s.queue.Add(anyNode)
}

// nodeOfEvent returns the Node that an informer reports as deleted.
func nodeOfEvent(x any) *core.Node {
	if deleted, ok := x.(cache.DeletedFinalStateUnknown); ok {
		x = deleted.Obj
	}
	return x.(*core.Node)
}

// watchOthers fills the cache with the other nodes, and follows them until ctx ends.
func (s *Source) watchOthers(ctx context.Context) {
	o := &otherNodes{Source: s, shards: map[string]map[string]*core.Node{}}
	if s.o.Namespace != "" {
		refused := make(chan struct{})
		read := make(chan struct{})
		go func() {
			defer close(read)
			said := false
			for err := o.watchTable(ctx); err != nil; err = o.watchTable(ctx) {
				if !said {
					said = true
					s.o.Log.Warn("node table not read; watching every Node instead", "err", err,
						"fix", `apply the nodes' Role that "steelyard manifest" prints`)
					close(refused)
				}
				if !awaitTable(ctx, s.o.Client, s.o.Namespace, func(error) {}) {
					return
				}
			}
		}()
		select {
		case <-read:
		case <-refused: // watchTable keeps trying
		}
	}
	o.watchNodes(ctx)
}

// watchTable follows the node table until ctx ends, and returns once it has been read. It returns an error if the API
// server refuses access.
func (o *otherNodes) watchTable(ctx context.Context) error {
	informer := tableInformer(o.o.Client, o.o.Namespace)
	put := func(x any) { o.shard(x.(*core.ConfigMap)) }
	// A deleted ConfigMap stays in use, because the allocator creates it again.
	synced, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: put, UpdateFunc: func(_, x any) { put(x) },
	})
	if err != nil {
		o.o.Log.Error("node table not watched", "err", err)
		return nil
	}
	watch, end := context.WithCancelCause(ctx)
	err = informer.SetWatchErrorHandlerWithContext(func(ctx context.Context, r *cache.Reflector, err error) {
		if apierrors.IsForbidden(err) && !synced.HasSynced() {
			end(err)
			return
		}
		cache.DefaultWatchErrorHandler(ctx, r, err)
	})
	if err != nil {
		o.o.Log.Error("node table not watched", "err", err)
	}
	go informer.RunWithContext(watch)
	if cache.WaitForCacheSync(watch.Done(), synced.HasSynced) || ctx.Err() != nil {
		return nil
	}
	return context.Cause(watch)
}

// shard applies a ConfigMap of the table.
func (o *otherNodes) shard(m *core.ConfigMap) {
	if !isShard(m.Name) {
		return
	}
	nodes := map[string]*core.Node{}
	if !o.o.Boundary.Do(lb.PartConfigMap, m.Name, func() {
		for name, entry := range m.Data {
			nodes[name] = nodeOf(name, entry)
		}
	}) {
		return // the shard stays as it was
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.shards[m.Name] = nodes
	if len(o.shards) < nodeShards {
		return
	}
	if !o.complete {
		o.complete = true
		if o.stopNodes != nil {
			o.stopNodes()
		}
	}
	now := map[string]bool{o.o.Node: true}
	for _, nodes := range o.shards {
		for name, n := range nodes {
			if name != o.o.Node {
				o.keepNode(n)
			}
			now[name] = true
		}
	}
	for _, x := range o.nodes.List() {
		if n := x.(*core.Node); !now[n.Name] {
			o.dropNode(n)
		}
	}
}

// watchNodes watches all Nodes until the table is complete, and returns once they are in the cache.
func (o *otherNodes) watchNodes(ctx context.Context) {
	o.mu.Lock()
	if o.complete {
		o.mu.Unlock()
		return
	}
	ctx, o.stopNodes = context.WithCancel(ctx)
	o.mu.Unlock()
	informer := newInformer(o.o.Client, o.o.Client.CoreV1().Nodes(), &core.Node{}, slim, everyObject)
	unless := func(change func(*core.Node)) func(any) {
		return func(x any) {
			o.mu.Lock()
			defer o.mu.Unlock()
			if n := nodeOfEvent(x); !o.complete && n.Name != o.o.Node {
				change(n)
			}
		}
	}
	keep := unless(o.keepNode)
	synced, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: keep, UpdateFunc: func(_, x any) { keep(x) }, DeleteFunc: unless(o.dropNode),
	})
	if err != nil {
		o.o.Log.Error("nodes not watched", "err", err)
		return
	}
	go informer.RunWithContext(ctx)
	cache.WaitForCacheSync(ctx.Done(), synced.HasSynced)
}
