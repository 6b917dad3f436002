package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	k8stest "k8s.io/client-go/testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var secretResource = schema.GroupResource{Resource: "secrets"}

// newKeyCluster returns a client whose API server refuses an update of an outdated Secret, as the real one does.
func newKeyCluster() *fake.Clientset {
	client := fake.NewClientset()
	version := 0
	check := func(a k8stest.Action) (bool, runtime.Object, error) {
		secret := a.(k8stest.UpdateAction).GetObject().(*core.Secret)
		if secret.ResourceVersion != fmt.Sprint(version) {
			return true, nil, apierrors.NewConflict(secretResource, KeySecret, errors.New("outdated"))
		}
		version++
		secret.ResourceVersion = fmt.Sprint(version)
		return false, nil, nil
	}
	client.PrependReactor("update", "secrets", check)
	client.PrependReactor("create", "secrets", func(a k8stest.Action) (bool, runtime.Object, error) {
		a.(k8stest.CreateAction).GetObject().(*core.Secret).ResourceVersion = fmt.Sprint(version)
		return false, nil, nil
	})
	return client
}

// keyNode is a node that follows the keys.
type keyNode struct {
	*KeyKeeper
	mu   sync.Mutex // guards used
	used []Keys
	err  error
	stop func()
}

func newKeyNode(client *fake.Clientset, log *bytes.Buffer, known *Keys) *keyNode {
	o := KeyOptions{Client: client, Namespace: "steelyard", Log: slog.New(slog.NewTextHandler(log, nil))}
	return &keyNode{KeyKeeper: NewKeyKeeper(o, known)}
}

func (n *keyNode) run(t *testing.T) {
	n.stop = must.Run(t, func(ctx context.Context) error {
		return n.Run(ctx, func(k Keys) error {
			n.mu.Lock()
			defer n.mu.Unlock()
			if n.err == nil {
				n.used = append(n.used, k)
			}
			return n.err
		})
	})
}

// settle waits until the informers have the latest Secret. They start with a delay of 100 ms.
func settle() { pass(time.Second) }

func (n *keyNode) last() (k Keys) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.used) > 0 {
		k = n.used[len(n.used)-1]
	}
	return k
}

func stored(t *testing.T, client *fake.Clientset) Keys {
	t.Helper()
	secret := must.Get(client.CoreV1().Secrets("steelyard").Get(t.Context(), KeySecret, meta.GetOptions{}))(t)
	return must.Get(ParseKeys(secret.Data))(t)
}

// When ten nodes start at the same time, one creates the Secret, and all have the same keys. The keys are required
// after some minutes. Every day each key moves up by one, so that a node that misses one change still accepts the
// others' packets. The seed stays.
func TestKeysRotate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, log := newKeyCluster(), new(bytes.Buffer)
		var nodes []*keyNode
		for range 10 {
			n := newKeyNode(client, log, nil)
			k, err := n.First(t.Context())
			if err != nil || len(nodes) > 0 && !k.equal(*nodes[0].known) {
				t.Fatalf("first keys %+v, %v", k, err)
			}
			nodes = append(nodes, n)
		}
		was := stored(t, client)
		must.True(t, !was.Required && len(was.Previous) == 0 && !bytes.Equal(was.Current, was.Next) &&
			was.Seed != [32]byte{}, "first keys %+v", was)
		for _, n := range nodes {
			n.run(t)
		}
		time.Sleep(requireAfter - keyCheck)
		settle()
		k := stored(t, client)
		must.True(t, k.equal(was), "changed too early: %+v", k)
		time.Sleep(keyJitter + 2*keyCheck)
		settle()
		was.Required = true
		for i, n := range nodes {
			k := n.last()
			must.True(t, k.equal(was), "node %d: %+v; want the key required", i, k)
		}
		for day := range 3 {
			time.Sleep(keyPeriod + keyJitter + 2*keyCheck)
			settle()
			k := stored(t, client)
			moved := bytes.Equal(k.Previous, was.Current) && bytes.Equal(k.Current, was.Next)
			must.True(t, moved && !bytes.Equal(k.Next, was.Next) && len(k.Next) == keySize && k.Seed == was.Seed &&
				k.Required, "day %d: %+v after %+v", day, k, was)
			for i, n := range nodes {
				must.True(t, n.last().equal(k), "day %d, node %d: %+v; want %+v", day, i, n.last(), k)
			}
			was = k
		}
		for i, n := range nodes {
			n.stop()
			must.True(t, n.Problem() == "" && len(n.used) == 4,
				"node %d: %d changes, problem %q", i, len(n.used), n.Problem())
		}
		must.True(t, !strings.Contains(log.String(), "WARN"), "log:\n%s", log)
	})
}

// A deleted Secret is created again from the keys in use. If the Secret becomes invalid, the keys in use stay.
func TestKeysOutliveTheSecret(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := newKeyCluster()
		n := newKeyNode(client, new(bytes.Buffer), nil)
		first := must.Get(n.First(t.Context()))(t)
		n.run(t)
		defer n.stop()
		settle()
		secrets := client.CoreV1().Secrets("steelyard")
		must.Do(t, secrets.Delete(t.Context(), KeySecret, meta.DeleteOptions{}))
		settle()
		k := stored(t, client)
		must.True(t, k.equal(first), "made again as %+v; want %+v", k, first)
		secret := must.Get(secrets.Get(t.Context(), KeySecret, meta.GetOptions{}))(t)
		good := secret.Data["current"]
		secret.Data["current"] = []byte("short")
		secret = must.Get(secrets.Update(t.Context(), secret, meta.UpdateOptions{}))(t)
		settle()
		must.True(t, len(n.used) == 0 && strings.Contains(n.Problem(), "current has 5 bytes; want at least 16"),
			"used %+v, problem %q", n.used, n.Problem())
		secret.Data["current"] = good
		delete(secret.Data, "rotated") // an operator asks for a rotation
		must.Get(secrets.Update(t.Context(), secret, meta.UpdateOptions{}))(t)
		time.Sleep(2 * keyCheck)
		settle()
		if k := stored(t, client); !bytes.Equal(k.Previous, first.Current) || n.Problem() != "" {
			t.Errorf("keys %+v, problem %q; want a rotation", k, n.Problem())
		}
	})
}

// Keys that cannot be activated are tried again.
func TestKeysAreUsedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := newKeyCluster()
		other := newKeyNode(client, new(bytes.Buffer), nil)
		must.Get(other.First(t.Context()))(t)
		n := newKeyNode(client, new(bytes.Buffer), nil)
		n.err = errTest
		n.run(t)
		defer n.stop()
		settle()
		must.Row(t, "problem", errTest.Error(), n.Problem())
		n.mu.Lock()
		n.err = nil
		n.mu.Unlock()
		time.Sleep(2 * keyCheck)
		settle()
		must.True(t, n.last().equal(stored(t, client)) && n.Problem() == "",
			"used %+v, problem %q", n.used, n.Problem())
	})
}

// Without the permission the agent continues with the keys it has, and reports once what is missing.
func TestKeysWithoutPermission(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, log, granted := newKeyCluster(), new(bytes.Buffer), new(atomic.Bool)
		client.PrependReactor("*", "secrets", func(k8stest.Action) (bool, runtime.Object, error) {
			return !granted.Load(), nil, apierrors.NewForbidden(secretResource, KeySecret, errors.New("no"))
		})
		n := newKeyNode(client, log, nil)
		start := time.Now()
		if _, err := n.First(t.Context()); !apierrors.IsForbidden(err) || time.Since(start) > 0 {
			t.Errorf("%v after %s; want Forbidden immediately", err, time.Since(start))
		}
		n.run(t)
		defer n.stop()
		time.Sleep(time.Hour)
		settle()
		must.Row(t, "hints in the log", 1, strings.Count(log.String(), "steelyard manifest"))
		must.True(t, strings.Contains(n.Problem(), "forbidden") && len(n.used) == 0,
			"problem %q, used %+v", n.Problem(), n.used)
		granted.Store(true)
		time.Sleep(10 * time.Minute)
		settle()
		must.True(t, n.known.equal(stored(t, client)) && n.Problem() == "",
			"known %+v, problem %q", n.known, n.Problem())
	})
}

// A node that may only read the Secret waits until another one creates it, and leaves the rotation to others.
func TestKeysOfAReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, log := newKeyCluster(), new(bytes.Buffer)
		for _, verb := range []string{"create", "update"} {
			client.PrependReactor(verb, "secrets", func(k8stest.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewForbidden(secretResource, KeySecret, errors.New("no"))
			})
		}
		n := newKeyNode(client, log, nil)
		made := newKeys(time.Now().Truncate(time.Second))
		time.AfterFunc(5*time.Second, func() {
			s := &core.Secret{ObjectMeta: meta.ObjectMeta{Namespace: n.o.Namespace, Name: KeySecret}, Data: made.Data()}
			must.Do(t, client.Tracker().Add(s))
		})
		got, err := n.First(t.Context())
		must.True(t, err == nil && got.equal(made), "%+v, %v; want those that were made later", got, err)
		n.run(t)
		defer n.stop()
		client.ClearActions()
		time.Sleep(keyPeriod + 2*keyJitter)
		settle()
		writes := 0
		for _, a := range client.Actions() {
			if a.GetVerb() == "update" {
				writes++
			}
		}
		must.True(t, writes == 0 && n.Problem() == "", "%d writes, problem %q; want none", writes, n.Problem())
	})
}

// The first request for keys is retried if the API server does not answer.
func TestFirstKeysAreAskedForAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, fails := newKeyCluster(), 3
		client.PrependReactor("get", "secrets", func(k8stest.Action) (bool, runtime.Object, error) {
			fails--
			return fails >= 0, nil, errTest
		})
		n := newKeyNode(client, new(bytes.Buffer), nil)
		_, err := n.First(t.Context())
		must.True(t, err == nil && n.Problem() == "", "%v, problem %q", err, n.Problem())
		fails = 1000
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = n.First(ctx)
		must.True(t, errors.Is(err, errTest), "%v; want that of the last attempt", err)
		fails = 0
		secret := &core.Secret{ObjectMeta: meta.ObjectMeta{Name: KeySecret, ResourceVersion: "0"}}
		secrets := client.CoreV1().Secrets("steelyard")
		must.Get(secrets.Update(t.Context(), secret, meta.UpdateOptions{}))(t)
		if k, err := n.First(t.Context()); err != nil || !k.equal(stored(t, client)) {
			t.Errorf("%v; want the manifest's empty Secret filled", err)
		}
		secret = must.Get(secrets.Get(t.Context(), KeySecret, meta.GetOptions{}))(t)
		secret.Data = map[string][]byte{"current": []byte("no key")}
		must.Get(secrets.Update(t.Context(), secret, meta.UpdateOptions{}))(t)
		start := time.Now()
		if _, err := n.First(t.Context()); !errors.Is(err, errKeysInvalid) || time.Since(start) > 0 {
			t.Errorf("%v after %s; want an invalid Secret, immediately", err, time.Since(start))
		}
	})
}

func TestParseKeys(t *testing.T) {
	k := newKeys(time.Unix(1e9, 0))
	k.Previous = randomKey()
	for _, required := range []bool{false, true} {
		k.Required = required
		got, err := ParseKeys(k.Data())
		must.True(t, err == nil && got.equal(k), "%+v became %+v, %v", k, got, err)
	}
	for name, change := range map[string]func(map[string][]byte){
		"seed":     func(d map[string][]byte) { d["seed"] = d["seed"][1:] },
		"current":  func(d map[string][]byte) { delete(d, "current") },
		"next":     func(d map[string][]byte) { d["next"] = d["next"][:15] },
		"previous": func(d map[string][]byte) { d["previous"] = []byte("x") },
		"rotated":  func(d map[string][]byte) { d["rotated"] = []byte("yesterday") },
	} {
		data := k.Data()
		change(data)
		_, err := ParseKeys(data)
		must.True(t, err != nil && strings.HasPrefix(err.Error(), name), "a wrong %s: %v", name, err)
	}
}

// verbs returns what a client has asked about Secrets.
func verbs(client *fake.Clientset) string {
	var all []string
	for _, a := range client.Actions() {
		if a.GetResource().Resource == "secrets" {
			all = append(all, a.GetVerb())
		}
	}
	return strings.Join(all, " ")
}

// A node with keys from a previous run reads the Secret through the watch it opens anyway, with no other request.
func TestResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := newKeyCluster()
		made := must.Get(newKeyNode(client, new(bytes.Buffer), nil).First(t.Context()))(t)
		client.ClearActions()
		old := newKeys(time.Now())
		n := newKeyNode(client, new(bytes.Buffer), &old)
		got, err := n.Resume(t.Context())
		must.True(t, err == nil && got.equal(made), "%+v, %v; want %+v", got, err, made)
		n.run(t)
		settle()
		must.Row(t, "requests", "list watch", verbs(client))
		must.True(t, len(n.used) == 0 && n.Problem() == "", "%d changes, problem %q", len(n.used), n.Problem())
		next, _ := made.after(time.Now().Add(keyPeriod).Truncate(time.Second), 0)
		secrets := client.CoreV1().Secrets("steelyard")
		secret := must.Get(secrets.Get(t.Context(), KeySecret, meta.GetOptions{}))(t)
		secret.Data = next.Data()
		must.Get(secrets.Update(t.Context(), secret, meta.UpdateOptions{}))(t)
		settle()
		must.True(t, n.last().equal(next), "used %+v; want what was changed later", n.used)
		n.stop()
	})
}

// Without the Secret, the right to read it or an answer, the node continues with the keys it has.
func TestResumeWithoutKeys(t *testing.T) {
	for name, tt := range map[string]struct {
		answer error
		want   func(error) bool
		takes  time.Duration
	}{
		"no Secret": {nil, func(err error) bool { return errors.Is(err, ErrNoKeys) }, 200 * time.Millisecond},
		"forbidden": {
			apierrors.NewForbidden(secretResource, KeySecret, errTest), apierrors.IsForbidden, 200 * time.Millisecond,
		},
		"no answer": {errTest, func(err error) bool { return errors.Is(err, errNoAnswer) }, time.Minute},
	} {
		synctest.Test(t, func(t *testing.T) {
			client := newKeyCluster()
			client.PrependReactor("list", "secrets", func(k8stest.Action) (bool, runtime.Object, error) {
				return tt.answer != nil, nil, tt.answer
			})
			old := newKeys(time.Now())
			n := newKeyNode(client, new(bytes.Buffer), &old)
			defer n.Close()
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			start := time.Now()
			_, err := n.Resume(ctx)
			must.True(t, tt.want(err) && time.Since(start) <= tt.takes, "%s: %v after %s", name, err, time.Since(start))
			problem := n.Problem() != ""
			must.True(t, problem == (tt.answer != nil) && n.known.equal(old), "%s: problem %q", name, n.Problem())
		})
	}
}
