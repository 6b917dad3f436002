package kube

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
)

// workers is the number of Services that are written concurrently. A request takes some milliseconds.
const workers = 16

// Delays before a Service is retried after a failed request. Other Services do not wait.
const failedDelay, failedDelayMax = 100 * time.Millisecond, time.Minute

// term is the state of one period of leadership.
type term struct {
	*Allocator
	services cache.Store
	queue    workqueue.TypedRateLimitingInterface[string]
	ledger   *ledger
	deposed  context.CancelFunc // ends the term: another leader owns the ledger
	skipped  map[string]bool    // Services whose addresses are only reserved; read-only while workers run

	mu       sync.Mutex // guards all below
	assigner *assigner
	known    map[string]version   // the newest version of each Service that was read or written; caches may be older
	read     uint64               // version of the first list: a Service that is older and was not in it does not exist
	gone     map[string]bool      // Services whose deletion was seen
	waiting  map[string]bool      // Services to decide again when an address is free …
	perNode  map[string]bool      // … and when there are more nodes
	cleared  map[string]cleared   // Services whose status somebody else has emptied
	gave     map[string]types.UID // Services to whose status this term has written addresses
	extended map[string]types.UID // Services to whose addresses from others this term has added some
	excluded int                  // like Allocator.excluded
	refused  map[string]told      // Services whose status the API server refuses
	wrote    map[string]told      // texts written to conditions about addresses

	complaints map[string]map[string]string // the texts of the last Events about each Service, by reason
}

// version identifies a version of a Service. An unknown number is 0.
type version struct {
	uid    types.UID
	number uint64 // grows with each change
}

func versionOf(s *core.Service) version {
	n, _ := strconv.ParseUint(s.ResourceVersion, 10, 64)
	return version{s.UID, n}
}

// adopt takes over the addresses that a Service has; t.mu is held.
func (t *term) adopt(s *core.Service) {
	slim(s)
	pending := t.ledger.pendingFor(s)
	if matchesClass(s, t.o.Classes...) && !isReleased(s) {
		t.assigner.adopt(s, pending)
	} else {
		t.assigner.reserve(s, nil)
	}
}

// locked calls f with t.mu held.
func (t *term) locked(f func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f()
}

// know records this version of a Service as the newest known; t.mu is held.
func (t *term) know(s *core.Service) {
	t.known[nameOf(s)] = versionOf(s)
}

// cleared is how often somebody has emptied a Service's status, and until when it stays empty.
type cleared struct {
	times int
	until time.Time
}

func newTerm(a *Allocator, pools []Pool) *term {
	delays := workqueue.NewTypedItemExponentialFailureRateLimiter[string](failedDelay, failedDelayMax)
	return &term{
		Allocator: a, assigner: newAssigner(a.o.Classes, pools),
		queue:  newQueue(delays),
		ledger: newLedger(a.o.Client, a.o.Namespace, a.leaseName()+"-addresses", a.o.Node),
		known:  map[string]version{}, gone: map[string]bool{}, waiting: map[string]bool{}, perNode: map[string]bool{},
		cleared: map[string]cleared{}, gave: map[string]types.UID{}, extended: map[string]types.UID{},
		refused: map[string]told{}, wrote: map[string]told{}, complaints: map[string]map[string]string{},
		skipped: map[string]bool{}, deposed: func() {},
	}
}

// run assigns addresses until ctx ends. First it takes the ledger, so that only this term may assign, and reads all
// assignments from the API server's storage, because a cache may lack the last writes. It reserves what the previous
// leader was about to write. Each Service's worker settles that, so one Service does not delay others.
func (t *term) run(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	t.deposed = func() { cancel(errDeposed) }
	stop := context.AfterFunc(ctx, t.queue.ShutDown)
	defer func() {
		stop()
		t.queue.ShutDown()
	}()
	if err := t.ledger.take(ctx); err != nil {
		return fmt.Errorf("ledger %s/%s: %w", t.o.Namespace, t.ledger.name, err)
	}
	t.avoidClusterIPs(ctx)
	if err := t.readAll(ctx); err != nil {
		return fmt.Errorf("read the Services: %w", err)
	}
	if err := t.watch(ctx); err != nil {
		return err
	}
	if hasNodes(t.assigner.pools) {
		if err := t.watchReady(ctx); err != nil {
			return err
		}
	}
	t.o.Log.Info("this agent assigns addresses")
	var all sync.WaitGroup
	for range workers {
		all.Go(func() { t.work(ctx) })
	}
	all.Wait()
	if errors.Is(context.Cause(ctx), errDeposed) {
		return errDeposed
	}
	return nil
}

// readAll adopts the addresses of all Services, oldest first, and those that may still be written to them.
func (t *term) readAll(ctx context.Context) error {
	o := meta.ListOptions{Limit: 500} // without a version: what is stored now
	for {
		list, err := t.o.Client.CoreV1().Services(meta.NamespaceAll).List(ctx, o)
		if err != nil {
			return err
		}
		t.mu.Lock()
		for i := range list.Items {
			s := &list.Items[i]
			if err := t.take(s); err != nil {
				t.mu.Unlock()
				return err
			}
			t.know(s)
		}
		t.mu.Unlock()
		if o.Continue = list.Continue; o.Continue == "" {
			t.read, _ = strconv.ParseUint(list.ResourceVersion, 10, 64)
			t.ledger.keep(t.known)
			return nil
		}
	}
}
