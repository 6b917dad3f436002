package kube

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// An Event names why no node announces the addresses of a Service, once.
func TestNobodyAnnounces(t *testing.T) {
	has := func(s *core.Service) { given("203.0.113.1")(s); s.Finalizers = []string{finalizer} }
	for _, tt := range []struct {
		name  string
		setUp func(*term)
		want  string
	}{
		{"a node may", func(t *term) { t.setNodes(1, 2) }, ""},
		{"the nodes are not known", func(*term) {}, ""},
		{"one node", func(t *term) { t.setNodes(0, 1) }, excludedNodes(1)},
		{"all nodes", func(t *term) { t.setNodes(0, 3) }, excludedNodes(3)},
		{"no announcer", func(t *term) { t.o.NoAnnouncer = true }, textNoAnnouncer},
		{"no agent", func(t *term) { t.unready.Store(3) }, fmt.Sprintf(textNotReady, 3, "")},
	} {
		term, _, events := testTerm(t, wanting("web", has))
		tt.setUp(term)
		for range 2 {
			must.Do(t, term.reconcile(t.Context(), webName))
		}
		var got []string
		for range len(events.Events) {
			got = append(got, <-events.Events)
		}
		want := []string{"Warning NotAnnounced " + tt.want}
		if tt.want == "" {
			want = nil
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %q; want %q", tt.name, got, want)
		}
	}
}

// Where no pod of the DaemonSet becomes ready, each Service is decided again, and again when one is ready.
func TestNoAgentReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		term, client, _ := testTerm(t, wanting("web", same))
		term.Allocator.term = term
		term.know(wanting("web", same))
		ready := func(n int32) {
			d := &apps.DaemonSet{ObjectMeta: meta.ObjectMeta{Name: agentsName}}
			d.Status.DesiredNumberScheduled, d.Status.NumberReady = 3, n
			client.AppsV1().DaemonSets("").Delete(t.Context(), agentsName, meta.DeleteOptions{})
			must.Get(client.AppsV1().DaemonSets("").Create(t.Context(), d, meta.CreateOptions{}))(t)
		}
		ctx, cancel := context.WithCancel(t.Context())
		go term.followAgents(ctx)
		for _, tt := range []struct {
			ready   int32
			queued  int
			unready int64
		}{{1, 0, 0}, {0, 0, 0}, {0, 1, 3}, {0, 0, 3}, {1, 1, 0}} {
			ready(tt.ready)
			time.Sleep(agentsEvery + time.Second)
			if n := term.queue.Len(); n != tt.queued || term.unready.Load() != tt.unready {
				t.Errorf("%+v: %d queued, %d unready", tt, n, term.unready.Load())
			}
			for term.queue.Len() > 0 {
				key, _ := term.queue.Get()
				term.queue.Done(key)
			}
		}
		cancel()
		term.queue.ShutDown()
		synctest.Wait()
	})
}

// Without pools, a Service is left to another controller for a minute, and one that has its address forever.
func TestServiceWithoutPools(t *testing.T) {
	for _, tt := range []struct {
		age   time.Duration
		given bool
		says  bool
	}{{time.Second, false, false}, {2 * othersTime, false, true}, {2 * othersTime, true, false}} {
		term, client, _ := testTerm(t, wanting("web", func(s *core.Service) {
			s.CreationTimestamp = meta.NewTime(time.Now().Add(-tt.age))
			if tt.given {
				given("203.0.113.1")(s)
				s.ManagedFields = nil
			}
		}))
		term.assigner = newAssigner(nil, nil)
		must.Do(t, term.reconcile(t.Context(), webName))
		got := patches(client)
		if said := strings.Contains(fmt.Sprint(got), textNoPool); said != tt.says || !said && len(got) > 0 {
			t.Errorf("%+v: patched %q", tt, got)
		}
	}
}

// The status of a node names what the cluster lacks, when there is a Service that needs it.
func TestSetupFindings(t *testing.T) {
	free, excluded := node("n1", "192.0.2.1"), node("n2", "192.0.2.2")
	excluded.Labels[labelExclude] = ""
	pools := Options{Forward: lb.MethodTunnel, Pools: []Pool{poolOfOne("203.0.113.1")}}
	ignores, silent := pools, pools
	other := pools
	other.Classes = []string{"x/y", "z"}
	ignores.IgnoreExclude, silent.NoAnnouncer = true, true
	const waits, waitsLong, has = 1, 2, 3
	for _, tt := range []struct {
		name    string
		options Options
		nodes   []*core.Node
		service int
		want    string // the codes
	}{
		{"no pool and no Service", Options{}, nil, 0, ""},
		{"no pool, a new Service", Options{}, nil, waits, ""},
		{"no pool", Options{}, nil, waitsLong, "no-pool"},
		{"another controller has the pools", Options{NoAnnouncer: true}, nil, has, ""},
		{"no announcer", silent, nil, has, "no-announcer"},
		{"a class of nobody", other, nil, waitsLong, "no-agent-for-class"},
		{"a new Service of another class", other, nil, waits, ""},
		{"another class's controller works", other, nil, has, ""},
		{"all excluded", pools, []*core.Node{excluded}, has, "all-nodes-excluded"},
		{"all excluded, no Service", pools, []*core.Node{excluded}, 0, ""},
		{"one excluded", pools, []*core.Node{excluded, free}, has, ""},
		{"the label has no effect", ignores, []*core.Node{excluded}, has, ""},
	} {
		keys := cache.MetaNamespaceKeyFunc
		s := &Source{
			o: tt.options, services: cache.NewIndexer(keys, nil), nodes: cache.NewIndexer(keys, nil),
			probes: newNodeProbes(tt.options, nil),
		}
		s.noPools.Store(len(tt.options.Pools) == 0)
		for _, n := range tt.nodes {
			s.nodes.Add(n)
		}
		s.excluded.Store(int64(s.allExcluded()))
		if tt.service > 0 {
			s.services.Add(wanting("web", func(s *core.Service) {
				s.CreationTimestamp = meta.Now()
				if tt.service == waitsLong {
					s.CreationTimestamp = meta.NewTime(time.Now().Add(-2 * othersTime))
				}
				if tt.service == has {
					given("203.0.113.1")(s)
				}
			}))
		}
		var got []string
		for _, f := range s.Findings() {
			got = append(got, f.Code)
		}
		if fmt.Sprint(got) != "["+tt.want+"]" {
			t.Errorf("%s: %q; want %s", tt.name, got, tt.want)
		}
	}
}
