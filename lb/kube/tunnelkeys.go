package kube

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"sync/atomic"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/steelyard-lb/steelyard/lb"
)

// KeySecret is the name of the Secret with the Keys.
const KeySecret = "steelyard-tunnel-keys"

// Keys are the secrets that all nodes of a cluster share.
type Keys struct {
	// Seed is the seed of the hashes that choose a node or a pod. It never changes, because flows would move.
	Seed [32]byte
	// Current is the key of sent packets. Previous and Next are also accepted, so that nodes need not change keys at
	// the same time. There is no Previous before the first rotation.
	Previous, Current, Next []byte
	Rotated                 time.Time
	// Required is false for a while after the keys were created, until all nodes have them.
	Required bool
}

// The lifetime of keys. A node that cannot reach the API server can use its keys for one more period.
const (
	keyPeriod    = 24 * time.Hour
	requireAfter = 10 * time.Minute
	// keyJitter is the upper bound of a random delay that keeps nodes from all writing at the same time.
	keyJitter = 10 * time.Minute
	keyCheck  = time.Minute
)

const keySize = 32 // bytes of new keys

// newKeys returns random keys.
func newKeys(now time.Time) Keys {
	k := Keys{Current: randomKey(), Next: randomKey(), Rotated: now}
	copy(k.Seed[:], randomKey())
	return k
}

func randomKey() []byte {
	b := make([]byte, keySize)
	rand.Read(b) // never fails
	return b
}

// after returns the keys that follow k if a change is due.
func (k Keys) after(now time.Time, jitter time.Duration) (next Keys, due bool) {
	next, age := k, now.Sub(k.Rotated)
	if !k.Required && age >= requireAfter+jitter {
		next.Required, due = true, true
	}
	if age >= keyPeriod+jitter {
		next.Previous, next.Current, next.Next, next.Rotated = k.Current, k.Next, randomKey(), now
		due = true
	}
	return next, due
}

func (k Keys) equal(l Keys) bool {
	return k.Seed == l.Seed && bytes.Equal(k.Previous, l.Previous) && bytes.Equal(k.Current, l.Current) &&
		bytes.Equal(k.Next, l.Next) && k.Required == l.Required && k.Rotated.Equal(l.Rotated)
}

// Data returns the keys as Secret data.
func (k Keys) Data() map[string][]byte {
	data := map[string][]byte{
		"seed": k.Seed[:], "current": k.Current, "next": k.Next,
		"rotated": []byte(k.Rotated.UTC().Format(time.RFC3339)), "required": fmt.Append(nil, k.Required),
	}
	if len(k.Previous) > 0 {
		data["previous"] = k.Previous
	}
	return data
}

// ParseKeys is the inverse of Keys.Data. Without a time of the last rotation, the next one is due.
func ParseKeys(data map[string][]byte) (Keys, error) {
	k := Keys{
		Previous: data["previous"], Current: data["current"], Next: data["next"],
		Required: string(data["required"]) == "true",
	}
	if len(data["seed"]) != len(k.Seed) {
		return k, fmt.Errorf("seed has %d bytes; want %d", len(data["seed"]), len(k.Seed))
	}
	copy(k.Seed[:], data["seed"])
	const least = 16
	for name, key := range map[string][]byte{"previous": k.Previous, "current": k.Current, "next": k.Next} {
		if len(key) < least && (name != "previous" || len(key) > 0) {
			return k, fmt.Errorf("%s has %d bytes; want at least %d", name, len(key), least)
		}
	}
	if text, ok := data["rotated"]; ok {
		var err error
		if k.Rotated, err = time.Parse(time.RFC3339, string(text)); err != nil {
			return k, fmt.Errorf("rotated: %w", err)
		}
	}
	return k, nil
}

// KeyOptions configures a KeyKeeper.
type KeyOptions struct {
	Client    kubernetes.Interface
	Namespace string // of the Secret
	// Boundary surrounds the parsing of the Secret. It may be nil.
	Boundary *lb.Boundary
	Log      *slog.Logger
}

// KeyKeeper creates the Secret if there is none, follows it, and rotates the keys. Every agent has one. It needs no
// leader, because the resourceVersion lets only one of several writers succeed. An agent without the right to write the
// Secret, like the manifest's nodes, leaves that to others.
type KeyKeeper struct {
	o       KeyOptions
	reader  bool // the API server has refused a write
	jitter  time.Duration
	known   *Keys // the last ones used; a deleted Secret is created again from them
	problem atomic.Pointer[string]
	watched *keyWatch // nil if the Secret is not watched
}

// NewKeyKeeper returns a KeyKeeper. known are the keys that this node has from a previous run, or nil.
func NewKeyKeeper(o KeyOptions, known *Keys) *KeyKeeper {
	return &KeyKeeper{o: o, known: known, jitter: mathrand.N(keyJitter)}
}

// Problem says why the keys differ from the Secret's, or returns "" if they match.
func (k *KeyKeeper) Problem() string {
	if p := k.problem.Load(); p != nil {
		return *p
	}
	return ""
}

// report records the result of a step, and logs a changed error.
func (k *KeyKeeper) report(err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if text == k.Problem() {
		return
	}
	k.problem.Store(&text)
	if err != nil {
		k.o.Log.Warn("tunnel keys not watched; forwarding continues with the known ones",
			"secret", k.name(), "err", err, "fix", `give the agents the Role that "steelyard manifest" prints`)
	}
}

func (k *KeyKeeper) name() string { return k.o.Namespace + "/" + KeySecret }

// First returns the Secret's keys. It retries until ctx ends, unless the API server refuses the request.
func (k *KeyKeeper) First(ctx context.Context) (Keys, error) {
	const retry = 500 * time.Millisecond
	var last error
	for {
		keys, err := k.read(ctx)
		if err == nil {
			k.known = &keys
		}
		if ctx.Err() != nil && last != nil { // err only says that the time is up
			return keys, last
		}
		if !errors.Is(err, ErrNoKeys) { // expected at the first start
			k.report(err)
		}
		if err == nil || !transient(err) {
			return keys, err
		}
		last = err
		select {
		case <-ctx.Done():
			return keys, err
		case <-time.After(retry):
		}
	}
}

// ErrNoKeys means that there is no Secret and this node may not create it.
var ErrNoKeys = errors.New("the Secret does not exist yet; the agent that assigns addresses creates it")

// errKeysInvalid is the error for a Secret that someone has changed.
var errKeysInvalid = errors.New("not valid")

// transient reports whether a request may succeed later without any change to the cluster.
func transient(err error) bool {
	switch {
	case errors.Is(err, errKeysInvalid):
		return false
	case errors.Is(err, ErrNoKeys):
		return true
	}
	switch apierrors.ReasonForError(err) {
	case meta.StatusReasonUnknown, meta.StatusReasonServerTimeout, meta.StatusReasonTimeout,
		meta.StatusReasonTooManyRequests, meta.StatusReasonInternalError, meta.StatusReasonServiceUnavailable,
		meta.StatusReasonConflict, meta.StatusReasonAlreadyExists:
		return true
	}
	return false
}

// read returns the Secret's keys, and creates them if there are none.
func (k *KeyKeeper) read(ctx context.Context) (Keys, error) {
	secret, err := k.o.Client.CoreV1().Secrets(k.o.Namespace).Get(ctx, KeySecret, meta.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return k.create(ctx, nil)
	case err != nil:
		return Keys{}, err
	case len(secret.Data) == 0:
		return k.create(ctx, secret)
	}
	return k.parse(secret)
}

// parse calls parseSecret inside a boundary.
func (k *KeyKeeper) parse(s *core.Secret) (keys Keys, err error) {
	err = errKeysInvalid
	k.o.Boundary.Do(lb.PartSecret, k.name(), func() { keys, err = parseSecret(s) })
	return keys, err
}

func parseSecret(s *core.Secret) (Keys, error) {
	keys, err := ParseKeys(s.Data)
	if err != nil {
		err = fmt.Errorf("%w: %w", errKeysInvalid, err)
	}
	return keys, err
}

// create writes new keys, or the keys in use, to the empty Secret of the manifest, or to a new one if empty is nil.
func (k *KeyKeeper) create(ctx context.Context, empty *core.Secret) (Keys, error) {
	keys := newKeys(time.Now().Truncate(time.Second))
	if k.known != nil {
		keys = *k.known
	}
	api := k.o.Client.CoreV1().Secrets(k.o.Namespace)
	var err error
	if empty != nil {
		secret := empty.DeepCopy()
		secret.Data = keys.Data()
		_, err = api.Update(ctx, secret, meta.UpdateOptions{FieldManager: "steelyard"})
	} else {
		_, err = api.Create(ctx, &core.Secret{
			ObjectMeta: meta.ObjectMeta{
				Name: KeySecret, Namespace: k.o.Namespace,
				Labels: map[string]string{"app.kubernetes.io/name": "steelyard"},
			},
			Data: keys.Data(),
		}, meta.CreateOptions{FieldManager: "steelyard"})
	}
	if apierrors.IsForbidden(err) {
		k.reader = true
		return Keys{}, ErrNoKeys
	}
	if err != nil {
		return Keys{}, err
	}
	k.o.Log.Info("tunnel keys created", "secret", k.name())
	return keys, nil
}

// Run follows the Secret until ctx ends. It calls use for each change, to activate the keys.
func (k *KeyKeeper) Run(ctx context.Context, use func(Keys) error) error {
	w, err := k.watch()
	if err != nil {
		return err
	}
	defer k.Close()
	if !cache.WaitForCacheSync(ctx.Done(), w.informer.HasSynced) {
		return nil
	}
	check := time.NewTicker(keyCheck)
	defer check.Stop()
	for {
		k.report(k.follow(ctx, w.informer.GetStore(), use))
		select {
		case <-ctx.Done():
			return nil
		case <-w.changed:
		case <-check.C:
		}
	}
}

// follow activates the Secret's keys, and rotates them when due.
func (k *KeyKeeper) follow(ctx context.Context, store cache.Store, use func(Keys) error) error {
	x, ok, err := store.GetByKey(k.name())
	if err != nil {
		return err
	}
	secret, _ := x.(*core.Secret)
	if !ok || len(secret.Data) == 0 {
		if _, err = k.create(ctx, secret); apierrors.IsAlreadyExists(err) || apierrors.IsConflict(err) {
			return nil
		}
		return err // the watch delivers the Secret
	}
	keys, err := k.parse(secret)
	if err != nil {
		return err
	}
	if k.known == nil || !k.known.equal(keys) {
		if err := use(keys); err != nil {
			return err
		}
		k.known = &keys
	}
	next, due := keys.after(time.Now().Truncate(time.Second), k.jitter)
	if !due || k.reader && time.Since(keys.Rotated) < 2*keyPeriod {
		return nil
	}
	secret = secret.DeepCopy()
	for name, value := range next.Data() {
		secret.Data[name] = value
	}
	o := meta.UpdateOptions{FieldManager: "steelyard"}
	_, err = k.o.Client.CoreV1().Secrets(k.o.Namespace).Update(ctx, secret, o)
	switch {
	case apierrors.IsConflict(err): // another agent was first
		return nil
	case apierrors.IsForbidden(err):
		k.reader = true
		return nil
	case err == nil:
		k.reader = false // a starting API server may have refused it
		k.o.Log.Info("tunnel keys updated", "secret", k.name(), "rotated", next.Rotated, "required", next.Required)
	}
	return err
}
