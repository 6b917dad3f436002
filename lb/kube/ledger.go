package kube

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
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
// before was about to write may still arrive, until the Service has another version. Until then the new owner gives
// these addresses to no other Service. That also applies to its own writes whose result it does not know.

// intent is an address assignment that is about to be written.
type intent struct {
	Service   string // namespace/name
	UID       string
	Version   string // of the Service that the write requires
	Addresses []string
	Ports     []string `json:",omitempty"` // recorded ones, if they may be shared
	// Also are the addresses of earlier writes that require this version and may still be applied.
	Also []string `json:",omitempty"`

	before *intent // the earlier writes; nil: none
}

// ledgerMax bounds the ledger, in bytes: the API server accepts 256 KiB of annotations. An entry has some 200 bytes,
// and stays only while the result of the write is not known.
const ledgerMax = 128 << 10

// ledgerPending is the annotation of the ledger with the intents. Its holder is the owner.
const ledgerPending = "steelyard.dev/pending"

// errDeposed is returned when another leader is the owner of the ledger.
var errDeposed = errors.New("another agent assigns addresses")

// errLedgerFull is returned when the results of too many writes are not known.
var errLedgerFull = errors.New("the results of too many writes are not known")

// ledger is the record of what a leader is about to write, as a Lease that does not expire. Its methods can be called
// from several goroutines.
type ledger struct {
	client          kubernetes.Interface
	namespace, name string
	owner           string // unique for each term

	mu       sync.Mutex // guards the three below
	pending  map[string]intent
	recorded int  // number of changes that are to be stored
	full     bool // the last new entry had no room

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

// take makes this leader the owner. What the one before was about to write is pending.
func (l *ledger) take(ctx context.Context) error {
	api := l.client.CoordinationV1().Leases(l.namespace)
	object, err := api.Get(ctx, l.name, meta.GetOptions{})
	if apierrors.IsNotFound(err) {
		object = &coordination.Lease{ObjectMeta: meta.ObjectMeta{
			Name: l.name, Namespace: l.namespace, Labels: map[string]string{"app.kubernetes.io/name": "steelyard"},
		}}
		object.Spec.HolderIdentity = &l.owner
		l.object, err = api.Create(ctx, object, meta.CreateOptions{FieldManager: fieldManager})
		return err
	}
	if err != nil {
		return err
	}
	var before []intent
	if text := object.Annotations[ledgerPending]; text != "" {
		if err := json.Unmarshal([]byte(text), &before); err != nil {
			return fmt.Errorf("the Lease %s/%s: %s: %w; delete it when no agent assigns addresses",
				l.namespace, l.name, ledgerPending, err)
		}
	}
	for _, i := range before {
		l.pending[i.Service] = i
	}
	object = object.DeepCopy()
	object.Spec.HolderIdentity = &l.owner
	l.object, err = api.Update(ctx, object, meta.UpdateOptions{FieldManager: fieldManager})
	return err
}

// record returns once the ledger has the intent. If it fails, the Service has what was pending before.
func (l *ledger) record(ctx context.Context, i intent) error {
	l.mu.Lock()
	before, had := l.pending[i.Service]
	if had && before.UID == i.UID && before.Version == i.Version {
		before.before = nil
		i.before, i.Also = &before, union(before.Addresses, before.Also)
		i.Ports = union(i.Ports, before.Ports)
	}
	l.pending[i.Service] = i
	if i.before == nil {
		text, err := json.Marshal(sortedIntents(l.pending))
		if l.full = len(text) > ledgerMax; l.full {
			err = fmt.Errorf("%w: %d in the Lease %s/%s; the API server must answer writes of the status of Services",
				errLedgerFull, len(l.pending)-1, l.namespace, l.name)
		}
		if err != nil {
			delete(l.pending, i.Service)
			l.mu.Unlock()
			return err
		}
	}
	l.mu.Unlock()
	if err := l.store(ctx); err != nil {
		l.refused(i.Service)
		return err
	}
	return nil
}

// store returns once the ledger has what is pending. Calls at the same time share a request.
func (l *ledger) store(ctx context.Context) error {
	l.mu.Lock()
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

// isFull reports whether the last new intent had no room.
func (l *ledger) isFull() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.full
}

// refused removes the last intent of a Service: its write was not applied. Earlier ones stay that may still be.
func (l *ledger) refused(service string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := l.pending[service]; i.before != nil {
		l.pending[service] = *i.before
	} else {
		delete(l.pending, service)
	}
}

// done removes the intents of a Service: it has another version. The next request stores that.
func (l *ledger) done(service string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.pending, service)
}

// keep removes the intents of Services that are not among those known.
func (l *ledger) keep(known map[string]version) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.pending, func(name string, _ intent) bool {
		_, ok := known[name]
		return !ok
	})
}

// pendingFor returns what may still be written to this version of a Service. An intent for another version is removed:
// its write has succeeded or will fail.
func (l *ledger) pendingFor(s *core.Service) (p pending) {
	l.mu.Lock()
	defer l.mu.Unlock()
	i, ok := l.pending[nameOf(s)]
	if !ok {
		return pending{}
	}
	if i.UID != string(s.UID) || i.Version != s.ResourceVersion {
		delete(l.pending, nameOf(s))
		return pending{}
	}
	for _, text := range i.Ports {
		p.ports = append(p.ports, portsOf(text)...)
	}
	p.addrs = parsed(union(i.Addresses, i.Also))
	return p
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
