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

// Leader election does not prevent two leaders: one that was suspended for a minute, or whose clock is slow, may
// believe that it still leads, and its requests may arrive late. A status write requires a version of its own Service,
// so it does not conflict with a write to another Service. A leader therefore first records what it is about to write
// in one object, the ledger, which only its owner can change. A new leader begins by making itself the owner. The
// previous leader's last writes may still arrive until their Services have other versions. Until then the new owner
// assigns their addresses to no other Service. The same applies to its own writes with an unknown outcome.

// intent is an address assignment that is about to be written.
type intent struct {
	Service   string // namespace/name
	UID       string
	Version   string // of the Service that the write requires
	Addresses []string
	Ports     []string `json:",omitempty"` // recorded ports, if they may be shared
	// Also holds the addresses of earlier writes that require this version and may still be applied.
	Also []string `json:",omitempty"`

	before *intent // earlier writes, or nil
}

// ledgerMax bounds the ledger, in bytes, because the API server accepts only 256 KiB of annotations. An entry takes
// some 200 bytes and stays only while the outcome of its write is unknown.
const ledgerMax = 128 << 10

// ledgerPending is the ledger annotation that lists the intents. The Lease's holder is the owner.
const ledgerPending = "steelyard.dev/pending"

// errDeposed is returned when another leader owns the ledger.
var errDeposed = errors.New("another agent is assigning addresses")

// errLedgerFull is returned when too many writes have an unknown outcome.
var errLedgerFull = errors.New("too many writes with unknown outcome")

// ledger records what a leader is about to write, in a Lease that does not expire. Its methods may be called from
// several goroutines.
type ledger struct {
	client          kubernetes.Interface
	namespace, name string
	owner           string // unique for each term

	mu       sync.Mutex // guards the three below
	pending  map[string]intent
	recorded int  // number of changes to store
	full     bool // the last new intent did not fit

	writing chan struct{} // full during requests; guards object and written
	object  *coordination.Lease
	written int // value of recorded when object was written
}

func newLedger(client kubernetes.Interface, namespace, name, node string) *ledger {
	return &ledger{
		client: client, namespace: namespace, name: name, owner: node + " " + rand.Text(),
		pending: map[string]intent{}, writing: make(chan struct{}, 1),
	}
}

// take makes this leader the owner. The previous leader's intents become pending.
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

// record returns once the intent is stored. On failure the Service's previous intent stays.
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

// store returns once everything pending is stored. Concurrent calls share a request.
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

// write stores everything pending; l.writing is full.
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
	// The outcome is unknown, or somebody has changed another field.
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

// isFull reports whether the last new intent did not fit.
func (l *ledger) isFull() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.full
}

// refused removes a Service's last intent, because its write was not applied. Earlier intents that may still be applied
// stay.
func (l *ledger) refused(service string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if i := l.pending[service]; i.before != nil {
		l.pending[service] = *i.before
	} else {
		delete(l.pending, service)
	}
}

// done removes the intents of a Service that has another version. The next request stores this.
func (l *ledger) done(service string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.pending, service)
}

// keep removes the intents of Services that are not in known.
func (l *ledger) keep(known map[string]version) {
	l.mu.Lock()
	defer l.mu.Unlock()
	maps.DeleteFunc(l.pending, func(name string, _ intent) bool {
		_, ok := known[name]
		return !ok
	})
}

// pendingFor returns what may still be written to this version of a Service. It removes an intent for another version,
// because that write has succeeded or will fail.
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
