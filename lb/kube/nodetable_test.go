package kube

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stest "k8s.io/client-go/testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestTableEntry(t *testing.T) {
	excluded := node("n1", "192.0.2.1")
	excluded.Labels[labelExclude] = ""
	for _, tt := range []struct {
		node *core.Node
		want string
	}{
		{node("n1"), ""},
		{node("n1", "2001:db8::1", "192.0.2.1"), "2001:db8::1 192.0.2.1"},
		{excluded, "192.0.2.1 excluded"},
	} {
		entry := new(Allocator).tableEntry(tt.node)
		must.True(t, entry == tt.want, "%q; want %q", entry, tt.want)
		back := nodeOf("n1", entry)
		same := slices.Equal(nodeAddresses(back), nodeAddresses(tt.node)) && new(Allocator).tableEntry(back) == entry
		if !same || (&conditions{o: Options{NotReady: true}}).excluded(back) != (&conditions{}).excluded(tt.node) {
			t.Errorf("%q: read as %+v", entry, back)
		}
	}
}

// publisher runs publishNodes until the returned function is called.
func publisher(t *testing.T, client *fake.Clientset, log *bytes.Buffer) (stop func()) {
	t.Helper()
	a := NewAllocator(AllocatorOptions{
		Client: client, Namespace: "steelyard", Log: slog.New(slog.NewTextHandler(log, nil)),
	})
	return must.Run(t, func(ctx context.Context) error { a.publishNodes(ctx); return nil })
}

// table returns the entries of all ConfigMaps.
func table(t *testing.T, client *fake.Clientset) (entries []string) {
	t.Helper()
	list := must.Get(client.CoreV1().ConfigMaps("steelyard").List(t.Context(), meta.ListOptions{}))(t)
	for _, m := range list.Items {
		for name, entry := range m.Data {
			entries = append(entries, name+": "+entry)
		}
	}
	slices.Sort(entries)
	return entries
}

// writes counts the changes of ConfigMaps.
func writes(client *fake.Clientset) (n int) {
	for _, a := range client.Actions() {
		if a.GetResource().Resource == "configmaps" && (a.GetVerb() == "create" || a.GetVerb() == "update") {
			n++
		}
	}
	client.ClearActions()
	return n
}

// The table follows the Nodes, and is not written for their heartbeats.
func TestPublishNodes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(node("n1", "192.0.2.1"), node("n2", "192.0.2.2"), node("n3"))
		log := new(bytes.Buffer)
		stop := publisher(t, client, log)
		api := client.CoreV1().Nodes()
		step := func(name string, most int, want ...string) {
			t.Helper()
			pass(time.Second)
			must.Row(t, name, want, table(t, client))
			n := writes(client)
			must.True(t, n <= most, "%s: %d writes; want at most %d", name, n, most)
		}
		step("start", nodeShards, "n1: 192.0.2.1", "n2: 192.0.2.2")
		beat := node("n2", "192.0.2.2")
		beat.Status.Conditions = []core.NodeCondition{{LastHeartbeatTime: meta.Now()}}
		api.UpdateStatus(t.Context(), beat, meta.UpdateOptions{})
		step("heartbeat", 0, "n1: 192.0.2.1", "n2: 192.0.2.2")
		api.Create(t.Context(), node("n9", "2001:db8::9"), meta.CreateOptions{})
		step("n9 appears", 1, "n1: 192.0.2.1", "n2: 192.0.2.2", "n9: 2001:db8::9")
		api.Delete(t.Context(), "n2", meta.DeleteOptions{})
		step("n2 goes", 1, "n1: 192.0.2.1", "n9: 2001:db8::9")
		client.CoreV1().ConfigMaps("steelyard").Delete(t.Context(), shardName(shardOf("n9")), meta.DeleteOptions{})
		step("somebody deletes a ConfigMap", 1, "n1: 192.0.2.1", "n9: 2001:db8::9")
		stop()
		must.True(t, !strings.Contains(log.String(), "WARN"), "log:\n%s", log)
	})
}

// forbid makes the API server refuse requests about ConfigMaps, unless not is true.
func forbid(client *fake.Clientset, not *atomic.Bool) {
	client.PrependReactor("*", "configmaps", func(k8stest.Action) (bool, runtime.Object, error) {
		return !not.Load(), nil, apierrors.NewForbidden(core.Resource("configmaps"), "", errTest)
	})
}

// Without the rights there is no table, and the log says so once.
func TestPublishForbidden(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, log := fake.NewClientset(node("n1", "192.0.2.1")), new(bytes.Buffer)
		var may atomic.Bool
		forbid(client, &may)
		stop := publisher(t, client, log)
		time.Sleep(time.Minute)
		may.Store(true)
		pass(tableRetry)
		got := table(t, client)
		must.True(t, len(got) == 1, "the table has %q after the rights were given", got)
		stop()
		n := strings.Count(log.String(), "node table not written")
		must.True(t, n == 1, "%d times in the log:\n%s", n, log)
	})
}

// reader runs a Source of n1. watched returns its open watches.
func reader(t *testing.T, client *fake.Clientset) (f *fixture, watched func() []string) {
	t.Helper()
	f = newFixture(t, func(o *Options) { o.Client, o.Forward, o.Namespace = client, lb.MethodTunnel, "steelyard" })
	t.Cleanup(f.running(t))
	return f, func() []string {
		what := map[string]bool{}
		for _, a := range client.Actions() {
			if w, ok := a.(k8stest.WatchAction); ok && strings.HasPrefix(a.GetResource().Resource, "node") {
				what["nodes "+w.GetWatchRestrictions().Fields.String()] = true
			} else if ok && a.GetResource().Resource == "configmaps" {
				what["table"] = true
			}
		}
		return slices.Sorted(maps.Keys(what))
	}
}

// With a table, a node watches only its own Node and the table, and does not receive others' heartbeats.
func TestNodesOfTheTable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, log := fake.NewClientset(node("n1", "192.0.2.1"), node("n2", "192.0.2.2")), new(bytes.Buffer)
		stop := publisher(t, client, log)
		pass(time.Second)
		client.ClearActions()
		f, watched := reader(t, client)
		step := func(name string, want ...string) {
			t.Helper()
			pass(time.Second)
			got := taken(&f.tunnels)
			must.True(t, got == fmt.Sprint(want), "%s: tunnel sources %s; want %s", name, got, want)
		}
		step("start", "[192.0.2.1 192.0.2.2]")
		must.Row(t, "watches", "[nodes metadata.name=n1 table]", fmt.Sprint(watched()))
		lists := 0
		for _, a := range client.Actions() {
			lists += count(a.Matches("list", "configmaps"))
		}
		if lists != 1 { // when 1,000 agents restart, each costs 1,000 requests
			t.Errorf("%d lists of the table; want only the watch's", lists)
		}
		client.CoreV1().Nodes().Create(t.Context(), node("n3", "192.0.2.3"), meta.CreateOptions{})
		step("n3 appears", "[192.0.2.1 192.0.2.2 192.0.2.3]")
		client.CoreV1().Nodes().Delete(t.Context(), "n2", meta.DeleteOptions{})
		step("n2 goes", "[192.0.2.1 192.0.2.3]")
		stop()
		client.CoreV1().ConfigMaps("steelyard").Delete(t.Context(), shardName(shardOf("n3")), meta.DeleteOptions{})
		step("a ConfigMap is deleted")
	})
}

// A node that starts before there is a table watches the Nodes until there is one.
func TestNodesBeforeTheTable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client, log := fake.NewClientset(node("n1", "192.0.2.1"), node("n2", "192.0.2.2")), new(bytes.Buffer)
		f, watched := reader(t, client)
		pass(time.Second)
		must.Row(t, "watches", "[nodes  nodes metadata.name=n1 table]", fmt.Sprint(watched()))
		must.Row(t, "tunnel sources", "[192.0.2.1 192.0.2.2]", f.tunnels[len(f.tunnels)-1])
		stop := publisher(t, client, log)
		pass(time.Second)
		stop()
		f.tunnels = nil
		// Nobody writes the table now, so a node that appears is no longer seen.
		client.CoreV1().Nodes().Create(t.Context(), node("n3", "192.0.2.3"), meta.CreateOptions{})
		pass(time.Second)
		must.Row(t, "tunnel sources: the Nodes are still watched", "[]", taken(&f.tunnels))
	})
}

// With an old manifest a node may lack the right to read the table. It then watches Nodes and keeps retrying, because
// an API server that is starting refuses everything.
func TestNodesWithoutRights(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(node("n1", "192.0.2.1"), node("n2", "192.0.2.2"))
		var may atomic.Bool
		forbid(client, &may)
		f, watched := reader(t, client)
		pass(time.Second)
		must.Row(t, "tunnel sources", "[192.0.2.1 192.0.2.2]", f.tunnels[len(f.tunnels)-1])
		must.True(t, strings.Contains(f.log.String(), "node table not read"), "log:\n%s", &f.log)
		may.Store(true)
		stop := publisher(t, client, new(bytes.Buffer))
		pass(tableRetry + time.Minute)
		got := watched()
		must.True(t, slices.Contains(got, "table"), "watches %q", got)
		stop()
	})
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}
