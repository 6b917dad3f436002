package kube

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"

	coordination "k8s.io/api/coordination/v1"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// An election does not prevent two leaders: one that was stopped for a minute, or whose clock is slow, may believe that
// it leads, and a request of it may arrive late. Each write of a status requires the version of that Service, but two
// Services have two versions. So what a leader is about to write is first recorded in one object, the ledger, which
// only its owner can change: a leader begins by making itself the owner, after which the others fail. What the one
// before was about to write may still arrive. The new owner completes it before it reads what is assigned.

// intent is an address assignment that is about to be written.
type intent struct {
	Service   string // namespace/name
	UID       string
	Version   string // of the Service that the write requires
	Addresses []string
}

// ledgerPending is the annotation of the ledger with the intents. Its holder is the owner.
const ledgerPending = "steelyard.dev/pending"

// errDeposed is returned when another leader is the owner of the ledger.
var errDeposed = errors.New("another agent assigns addresses")

// ledger is the record of what a leader is about to write, as a Lease that does not expire. Its methods can be called
// from several goroutines.
type ledger struct {
	client          kubernetes.Interface
	namespace, name string
	owner           string // unique for each term

	mu       sync.Mutex // guards pending and recorded
	pending  map[string]intent
	recorded int // number of calls of record

	writing chan struct{} // full during requests; guards object and written
	object  *coordination.Lease
	written int // recorded, when object was written
}

func newLedger(client kubernetes.Interface, namespace, name, node string) *ledger {
	return &ledger{
		client: client, namespace: namespace, name: name, owner: node + " " + rand.Text(),
		pending: map[string]intent{}, writing: make(chan struct{}, 1),
	}
}

// take makes this leader the owner, and returns what the one before was about to write.
func (l *ledger) take(ctx context.Context) ([]intent, error) {
	api := l.client.CoordinationV1().Leases(l.namespace)
	object, err := api.Get(ctx, l.name, meta.GetOptions{})
	if apierrors.IsNotFound(err) {
		object = &coordination.Lease{ObjectMeta: meta.ObjectMeta{
			Name: l.name, Namespace: l.namespace, Labels: map[string]string{"app.kubernetes.io/name": "steelyard"},
		}}
		object.Spec.HolderIdentity = &l.owner
		l.object, err = api.Create(ctx, object, meta.CreateOptions{FieldManager: fieldManager})
		return nil, err
	}
	if err != nil {
		return nil, err
	}
	var before []intent
	if text := object.Annotations[ledgerPending]; text != "" {
		if err := json.Unmarshal([]byte(text), &before); err != nil {
			return nil, fmt.Errorf("the Lease %s/%s: %s: %w; delete it when no agent assigns addresses",
				l.namespace, l.name, ledgerPending, err)
		}
	}
	for _, i := range before {
		l.pending[i.Service] = i
	}
	object = object.DeepCopy()
	object.Spec.HolderIdentity = &l.owner
	l.object, err = api.Update(ctx, object, meta.UpdateOptions{FieldManager: fieldManager})
	return before, err
}

// record returns once the ledger has the intent. Calls at the same time share a request.
func (l *ledger) record(ctx context.Context, i intent) error {
	l.mu.Lock()
	l.pending[i.Service] = i
	l.recorded++
	mine := l.recorded
	l.mu.Unlock()
	select {
	case l.writing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-l.writing }()
	for l.written < mine {
		if err := l.write(ctx); err != nil {
			return err
		}
	}
	return nil
}

// write stores what is pending; l.writing is full.
func (l *ledger) write(ctx context.Context) error {
	l.mu.Lock()
	now := l.recorded
	text, err := json.Marshal(sortedIntents(l.pending))
	l.mu.Unlock()
	if err != nil {
		return err
	}
	api := l.client.CoordinationV1().Leases(l.namespace)
	next := l.object.DeepCopy()
	next.Annotations = map[string]string{ledgerPending: string(text)}
	stored, err := api.Update(ctx, next, meta.UpdateOptions{FieldManager: fieldManager})
	if err == nil {
		l.object, l.written = stored, now
		return nil
	}
	// Whether it was written is not known, or somebody has changed another field.
	current, readErr := api.Get(ctx, l.name, meta.GetOptions{})
	switch {
	case apierrors.IsNotFound(readErr):
		return errDeposed
	case readErr != nil:
		return err
	case holderOf(current) != l.owner:
		return errDeposed
	}
	if l.object = current; apierrors.IsConflict(err) {
		return nil // the caller tries again
	}
	return err
}

func sortedIntents(pending map[string]intent) []intent {
	list := make([]intent, 0, len(pending))
	for _, name := range sortedKeys(pending) {
		list = append(list, pending[name])
	}
	return list
}

// done removes the intent of a Service: the result of its write is known. The next record stores that.
func (l *ledger) done(service string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.pending, service)
}

// pendingFor returns the addresses that may still be written to this version of a Service. An intent for another
// version is removed: its write has succeeded or will fail.
func (l *ledger) pendingFor(s *core.Service) (addrs []netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i, ok := l.pending[nameOf(s)]
	if !ok {
		return nil
	}
	if i.UID != string(s.UID) || i.Version != s.ResourceVersion {
		delete(l.pending, nameOf(s))
		return nil
	}
	for _, text := range i.Addresses {
		if a, err := netip.ParseAddr(text); err == nil {
			addrs = append(addrs, a)
		}
	}
	return addrs
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
