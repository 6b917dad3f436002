package kube

import (
	"fmt"
	"strings"
	"testing"
	"time"

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
