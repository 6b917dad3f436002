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

// workers is the number of Services that are written at a time. A request takes some milliseconds.
const workers = 16

// Delays before a Service is tried again after a failed request. No other one waits.
const failedDelay, failedDelayMax = 100 * time.Millisecond, time.Minute

// term is the state of one period as the leader.
type term struct {
	*Allocator
	services cache.Store
	queue    workqueue.TypedRateLimitingInterface[string]
	ledger   *ledger
	deposed  context.CancelFunc // ends the term: another leader is the owner of the ledger
	skipped  map[string]bool    // Services whose addresses it has only reserved; not changed while it works

	mu       sync.Mutex // guards all below
	assigner *assigner
	known    map[string]version   // the newest one of a Service that was read or written; caches may be older
	read     uint64               // when all were read: a Service that did not exist then and is older does not exist
	gone     map[string]bool      // Services whose deletion was seen
	waiting  map[string]bool      // Services that need a decision again when an address is free …
	perNode  map[string]bool      // … and when there are more nodes
	cleared  map[string]cleared   // Services whose status somebody else has emptied
	gave     map[string]types.UID // Services to whose status this term has written addresses
	extended map[string]types.UID // Services to whose addresses of others this term has added some
	excluded int                  // as Allocator.excluded
	refused  map[string]told      // Services whose status the API server refuses
	wrote    map[string]told      // what the conditions say that were written about addresses

	complaints map[string]map[string]string // the texts of the last Events about a Service, by reason
}

// version is that of a Service. A number that is not known is 0.
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
	if matchesClass(s, t.o.Class) && !isReleased(s) {
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

// know records that this version of a Service is the newest that is known; t.mu is held.
func (t *term) know(s *core.Service) {
	t.known[nameOf(s)] = versionOf(s)
}

// cleared is how often somebody has emptied the status of a Service, and until when it stays empty.
type cleared struct {
	times int
	until time.Time
}

func newTerm(a *Allocator, pools []Pool) *term {
	delays := workqueue.NewTypedItemExponentialFailureRateLimiter[string](failedDelay, failedDelayMax)
	return &term{
		Allocator: a, assigner: newAssigner(a.o.Class, pools),
		queue:  workqueue.NewTypedRateLimitingQueue(delays),
		ledger: newLedger(a.o.Client, a.o.Namespace, a.leaseName()+"-addresses", a.o.Node),
		known:  map[string]version{}, gone: map[string]bool{}, waiting: map[string]bool{}, perNode: map[string]bool{},
		cleared: map[string]cleared{}, gave: map[string]types.UID{}, extended: map[string]types.UID{},
		refused: map[string]told{}, wrote: map[string]told{}, complaints: map[string]map[string]string{},
		skipped: map[string]bool{}, deposed: func() {},
	}
}

// run assigns addresses until ctx ends. Before it assigns anything it makes itself the only one that may, and reads
// what is assigned from the storage of the API server: a cache may not have what was written last. What the leader
// before was about to write is reserved, and settled by the worker that has the Service: one Service delays no other.
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
	if err := t.readAll(ctx); err != nil {
		return fmt.Errorf("read the Services: %w", err)
	}
	if err := t.watch(ctx); err != nil {
		return err
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

// readAll adopts the addresses of all Services, older Services first, and those that may be written to them yet.
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
