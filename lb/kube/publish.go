package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// Delays of the node table: changes within publishDelay are merged, and a failed write is retried after publishRetry.
const (
	publishDelay = 200 * time.Millisecond
	publishRetry = 2 * time.Second
)

// publishNodes maintains the node table until ctx ends. Without the rights to write it, there is no table, and agents
// watch all Nodes.
func (a *Allocator) publishNodes(ctx context.Context) {
	warn := func(err error) {
		a.o.Log.Warn("node table not written; every agent watches every Node", "err", err,
			"fix", `apply the allocator's Role that "steelyard manifest" prints`)
	}
	if !awaitTable(ctx, a.o.Client, a.o.Namespace, warn) {
		return
	}
	changed := make(chan struct{}, 1)
	touch := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	handler := cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { touch() }, DeleteFunc: func(any) { touch() },
		UpdateFunc: func(old, now any) {
			n, ok := now.(*core.Node)
			if !ok || a.tableEntry(old.(*core.Node)) != a.tableEntry(n) ||
				!poolNodeOf(old.(*core.Node)).equal(poolNodeOf(n)) {
				touch()
			}
		},
	}
	nodes := newInformer(a.o.Client, a.o.Client.CoreV1().Nodes(), &core.Node{}, slim, everyObject)
	table := tableInformer(a.o.Client, a.o.Namespace)
	for _, i := range []cache.SharedIndexInformer{nodes, table} {
		if _, err := i.AddEventHandler(handler); err != nil {
			a.o.Log.Error("nodes not watched", "err", err)
			return
		}
		go i.RunWithContext(ctx)
	}
	if !cache.WaitForCacheSync(ctx.Done(), nodes.HasSynced, table.HasSynced) {
		return
	}
	for {
		if err := a.writeTable(ctx, nodes.GetStore(), table.GetStore()); err != nil && ctx.Err() == nil {
			if !conflicting(err) { // otherwise the watch delivers the newer version
				a.o.Log.Warn("node table not written", "err", err)
			}
			time.AfterFunc(publishRetry, touch)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		if !sleep(ctx, publishDelay) {
			return
		}
	}
}

func conflicting(err error) bool { return apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) }

// writeTable writes the ConfigMaps that differ from the Nodes.
func (a *Allocator) writeTable(ctx context.Context, nodes, table cache.Store) error {
	want := make([]map[string]string, nodeShards)
	for i := range want {
		want[i] = map[string]string{}
	}
	usable, excluded, inPool := 0, 0, []poolNode{}
	for _, x := range nodes.List() {
		n := x.(*core.Node)
		if entry := a.tableEntry(n); entry != "" {
			want[shardOf(n.Name)][n.Name] = entry
			if strings.HasSuffix(entry, markExcluded) {
				excluded++
			} else {
				usable++
				inPool = append(inPool, poolNodeOf(n))
			}
		}
	}
	a.setNodes(usable, excluded)
	a.setPoolNodes(inPool)
	api := a.o.Client.CoreV1().ConfigMaps(a.o.Namespace)
	var failed error
	for i, data := range want {
		x, ok, err := table.GetByKey(a.o.Namespace + "/" + shardName(i))
		if err != nil {
			return err
		}
		if ok && maps.Equal(x.(*core.ConfigMap).Data, data) {
			continue
		}
		m := &core.ConfigMap{Data: data, ObjectMeta: meta.ObjectMeta{
			Name: shardName(i), Namespace: a.o.Namespace,
			Labels: map[string]string{labelNodeTable: "", "app.kubernetes.io/name": "steelyard"},
		}}
		if ok {
			m = x.(*core.ConfigMap).DeepCopy()
			m.Data = data
			_, err = api.Update(ctx, m, meta.UpdateOptions{FieldManager: fieldManager})
		} else {
			_, err = api.Create(ctx, m, meta.CreateOptions{FieldManager: fieldManager})
		}
		if err != nil {
			err = fmt.Errorf("ConfigMap %s: %w", m.Name, err)
			if !conflicting(err) {
				return errors.Join(failed, err)
			}
			failed = err
		}
	}
	return failed
}
