package kube

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stest "k8s.io/client-go/testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

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

// A node with keys of an earlier run gets those of the Secret from the watch that it has anyway.
func TestResume(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := newKeyCluster()
		made := must.Get(newKeyNode(client, new(bytes.Buffer), nil).First(t.Context()))(t)
		client.ClearActions()
		old := newKeys(time.Now())
		n := newKeyNode(client, new(bytes.Buffer), &old)
		if got, err := n.Resume(t.Context()); err != nil || !got.equal(made) {
			t.Errorf("%+v, %v; want %+v", got, err, made)
		}
		n.run(t)
		settle()
		if got := verbs(client); got != "list watch" || len(n.used) > 0 || n.Problem() != "" {
			t.Errorf("requests %q, %d changes, problem %q", got, len(n.used), n.Problem())
		}
		next, _ := made.after(time.Now().Add(keyPeriod).Truncate(time.Second), 0)
		secrets := client.CoreV1().Secrets("steelyard")
		secret := must.Get(secrets.Get(t.Context(), KeySecret, meta.GetOptions{}))(t)
		secret.Data = next.Data()
		must.Get(secrets.Update(t.Context(), secret, meta.UpdateOptions{}))(t)
		settle()
		if !n.last().equal(next) {
			t.Errorf("used %+v; want what was changed later", n.used)
		}
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
			if _, err := n.Resume(ctx); !tt.want(err) || time.Since(start) > tt.takes {
				t.Errorf("%s: %v after %s", name, err, time.Since(start))
			}
			if problem := n.Problem() != ""; problem != (tt.answer != nil) || !n.known.equal(old) {
				t.Errorf("%s: problem %q", name, n.Problem())
			}
		})
	}
}
