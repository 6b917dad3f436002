package kube

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"
)

// keyWatch watches the Secret with the tunnel keys.
type keyWatch struct {
	informer cache.SharedIndexInformer
	changed  chan struct{}
	refused  atomic.Pointer[error] // why the API server refuses the watch, or nil
	end      context.CancelFunc
}

// watch starts watching the Secret unless it is already watched.
func (k *KeyKeeper) watch() (*keyWatch, error) {
	if k.watched != nil {
		return k.watched, nil
	}
	// With a Role for this name only, the API server permits no other list.
	secret := newInformer(k.o.Client, k.o.Client.CoreV1().Secrets(k.o.Namespace), &core.Secret{}, nil, named(KeySecret))
	w := &keyWatch{informer: secret, changed: make(chan struct{}, 1)}
	touch := func(any) {
		select {
		case w.changed <- struct{}{}:
		default:
		}
	}
	_, err := w.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: touch, UpdateFunc: func(_, x any) { touch(x) }, DeleteFunc: touch,
	})
	err = errors.Join(err, w.informer.SetWatchErrorHandlerWithContext(
		func(ctx context.Context, r *cache.Reflector, err error) {
			if apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err) {
				w.refused.Store(&err)
				if k.Problem() == "" { // log once; the default handler logs each attempt
					k.report(err)
				}
				return
			}
			cache.DefaultWatchErrorHandler(ctx, r, err)
		}))
	if err != nil {
		return nil, fmt.Errorf("watch the tunnel keys: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	w.end, k.watched = cancel, w
	go secret.RunWithContext(ctx)
	return w, nil
}

// Close ends the watch of a KeyKeeper that is not running.
func (k *KeyKeeper) Close() {
	if k.watched != nil {
		k.watched.end()
		k.watched = nil
	}
}

// errNoAnswer is Resume's error if ctx ends first.
var errNoAnswer = errors.New("the API server has not answered")

// Resume is like First, for a node that has keys from a previous run. It neither creates the Secret nor waits for it.
// Run reuses its watch, so a restart asks the API server only once.
func (k *KeyKeeper) Resume(ctx context.Context) (Keys, error) {
	keys, err := k.resume(ctx)
	if err == nil {
		k.known = &keys
	}
	if !errors.Is(err, ErrNoKeys) {
		k.report(err)
	}
	return keys, err
}

func (k *KeyKeeper) resume(ctx context.Context) (Keys, error) {
	w, err := k.watch()
	if err != nil {
		return Keys{}, err
	}
	const poll = 10 * time.Millisecond
	for !w.informer.HasSynced() {
		if refused := w.refused.Load(); refused != nil {
			return Keys{}, *refused
		}
		if !sleep(ctx, poll) {
			return Keys{}, errNoAnswer
		}
	}
	x, ok, err := w.informer.GetStore().GetByKey(k.name())
	switch {
	case err != nil:
		return Keys{}, err
	case !ok:
		return Keys{}, ErrNoKeys
	}
	return k.parse(x.(*core.Secret))
}
