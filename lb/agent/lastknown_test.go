package agent

import (
	"context"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/kube"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
	"github.com/steelyard-lb/steelyard/lb/state"
)

// stored returns a service as the cluster source puts it.
func stored(name string) *lb.Service {
	return &lb.Service{
		Name: name, Source: kube.Name, VIPs: []netip.Addr{ip("203.0.113.10"), ip("2001:db8::10")},
		Ports: []lb.ServicePort{{
			Port: lb.Port{Port: 80, Target: 80, Protocol: lb.TCP},
			Backends: []lb.Backend{
				{Addr: ip("10.1.0.1"), Port: 8080, Weight: 1, Local: true, Node: ip("192.0.2.1")},
			},
			DropWhenEmpty: []lb.Family{lb.IPv6},
			Nodes:         []lb.Node{{Addr: ip("192.0.2.1"), Local: true}},
		}},
		Policy: lb.PolicyLocal, NodeForwarding: lb.NodeForwarding{Enabled: true, AnyNode: true},
		Algorithm: lb.AlgorithmMaglev, Method: lb.MethodNAT, Affinity: time.Hour, MinHealthy: 1,
		Allow: []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, Check: lb.CheckSpec{Type: lb.CheckNone},
		WithholdReason: "not yet", Announce: []lb.AnnouncerKind{lb.AnnounceBGP},
	}
}

// puts is a lb.Sink that keeps the services.
type puts struct {
	calls
	services map[string]*lb.Service
}

func (p *puts) Put(s *lb.Service)  { p.services[s.Name] = s }
func (p *puts) Delete(name string) { p.calls.Delete(name); delete(p.services, name) }

// after runs a lastKnown in dir for d. isAway says whether the API server is away.
func after(t *testing.T, dir string, d time.Duration, isAway bool, feed func(l *lastKnown)) (*puts, []netip.Addr) {
	out := &puts{services: map[string]*lb.Service{}}
	var nodes []netip.Addr
	l := newLastKnown(out, func(n []netip.Addr) error { nodes = n; return nil }, dir, discard)
	l.away = func() time.Time {
		if isAway {
			return time.Now()
		}
		return time.Time{}
	}
	ctx, cancel := context.WithTimeout(t.Context(), d)
	defer cancel()
	done := make(chan error)
	go func() { done <- l.run(ctx) }()
	feed(l)
	must.Do(t, <-done)
	return out, nodes
}

// When the API server is away, the services that the source had put are put again, each with its own probe.
func TestLastKnownState(t *testing.T) {
	dir := t.TempDir()
	nodes := []netip.Addr{ip("192.0.2.1"), ip("192.0.2.2")}
	dns := stored("b/dns")
	dns.Ports[0].Protocol, dns.WithholdReason, dns.WithholdIntended = lb.UDP, "the node is cordoned", true
	synctest.Test(t, func(t *testing.T) {
		after(t, dir, time.Minute, false, func(l *lastKnown) {
			if err := l.tunnelSources(nodes); err != nil {
				t.Error(err)
			}
			for _, s := range []*lb.Service{stored("a/web"), dns, stored("c/gone")} {
				l.Put(s)
			}
			l.Complete(kube.Name)
			time.Sleep(20 * time.Second)
			l.Delete("c/gone")
		})
	})
	synctest.Test(t, func(t *testing.T) {
		out, gotNodes := after(t, dir, 5*time.Second, true, func(*lastKnown) {})
		want := stored("a/web")
		want.WithholdReason = ""
		want.Check = lb.CheckSpec{
			Type: lb.CheckTCP, Interval: 2 * time.Second, Timeout: time.Second, Rise: 1, Fall: 2,
			ServicePort: want.Ports[0].Port,
		}
		must.Equal(t, map[string]*lb.Service{"a/web": want, "b/dns": dns}, out.services)
		must.True(t, slices.Equal(out.list, []string{"complete kubernetes"}) && slices.Equal(gotNodes, nodes),
			"calls %q, nodes %v", out.list, gotNodes)
	})
	synctest.Test(t, func(t *testing.T) {
		out, _ := after(t, dir, 20*time.Second, false, func(*lastKnown) {})
		must.True(t, len(out.services) == 0, "the state was put although the API server answers")
		out, _ = after(t, dir, 40*time.Second, false, func(*lastKnown) {})
		must.True(t, len(out.services) == 2, "the state was not put although the API server gives none")
	})
	// Services that no longer exist when the API server is back are deleted.
	synctest.Test(t, func(t *testing.T) {
		out, _ := after(t, dir, time.Minute, true, func(l *lastKnown) {
			time.Sleep(10 * time.Second)
			l.Put(stored("a/web"))
			l.Complete(kube.Name)
		})
		want := []string{"complete kubernetes", "delete b/dns", "complete kubernetes"}
		must.Equal(t, want, out.list)
		must.True(t, reflect.DeepEqual(out.services, map[string]*lb.Service{"a/web": stored("a/web")}),
			"services %v", out.services)
	})
}

// Damaged state is never put, and nothing is put once the source has begun.
func TestLastKnownStateIsNotPut(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		after(t, dir, time.Second, false, func(l *lastKnown) { l.Put(stored("a/web")); l.Complete(kube.Name) })
		out, _ := after(t, dir, time.Minute, true, func(l *lastKnown) { l.Put(stored("new")) })
		must.True(t, len(out.services) == 1 && out.services["new"] != nil, "services %v", out.services)
		l := newLastKnown(nil, nil, dir, discard)
		must.Do(t, os.WriteFile(l.file.Path(), []byte("damaged"), 0o600))
		out, _ = after(t, dir, time.Minute, true, func(*lastKnown) {})
		must.True(t, len(out.services)+len(out.list) == 0, "services %v, calls %q", out.services, out.list)
	})
}

// The state is written in parts, and read as a whole.
func TestWrittenStateIsThatOfTheFile(t *testing.T) {
	all := []*lb.Service{stored("a/a"), stored("a/b"), stored("a/c")}
	nodes := []netip.Addr{netip.MustParseAddr("192.0.2.1")}
	for n := range len(all) + 1 {
		want := clusterState{Nodes: nodes}
		if n > 0 {
			want.Services = all[:n]
		}
		f := state.New(t.TempDir(), "cluster", clusterStateVersion)
		must.Do(t, f.Write(func(w io.Writer) error { return writeState(w, all[:n], nodes) }))
		var got clusterState
		if found, err := f.Load(&got); !found || err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%d services: %t, %v\n got %+v\nwant %+v", n, found, err, got, want)
		}
	}
}

// The endpoints of the API server belong to its address and port, whether they are stored or from this run.
func TestEndpointsOfTheAPIServer(t *testing.T) {
	service := func(name, vip, backend string) *lb.Service {
		s := &lb.Service{Name: name, VIPs: []netip.Addr{ip(vip)}}
		for _, p := range []lb.Port{
			{Port: 443, Protocol: lb.UDP, Target: 1}, {Port: 80, Protocol: lb.TCP, Target: 2},
			{Port: 443, Protocol: lb.TCP, Target: 6443},
		} {
			s.Ports = append(s.Ports, lb.ServicePort{Port: p, Backends: []lb.Backend{
				{Addr: ip("10.0.0.99"), Deleted: true}, {Addr: ip(backend)},
			}})
		}
		return s
	}
	l := newLastKnown(nil, nil, t.TempDir(), discard)
	l.stored = []*lb.Service{service("other", "10.96.0.2", "10.0.0.3"), service("api", "10.96.0.1", "10.0.0.1")}
	l.services["api"] = service("api", "10.96.0.1", "10.0.0.2")
	got, want := l.endpoints("10.96.0.1:443"), []string{"10.0.0.1:6443", "10.0.0.2:6443"}
	must.Equal(t, want, got)
}

// Each kind of change is stored.
func TestEachChangeIsStored(t *testing.T) {
	l := newLastKnown(discardSink{}, func([]netip.Addr) error { return nil }, t.TempDir(), discard)
	for name, change := range map[string]func(){
		"complete": func() { l.Complete(kube.Name) }, "put": func() { l.Put(stored("a/web")) },
		"delete": func() { l.Delete("a/web") }, "nodes": func() { _ = l.tunnelSources(nil) },
	} {
		l.synced, l.dirty = true, false
		change()
		must.True(t, l.dirty, "%s: not to be stored", name)
		l.save()
		must.True(t, !l.dirty, "%s: not stored", name)
	}
}

type discardSink struct{}

func (discardSink) Put(*lb.Service) {}
func (discardSink) Delete(string)   {}
func (discardSink) Complete(string) {}

// Addresses that cannot be stored are a problem in the status, and are stored once that is possible.
func TestAssignedThatCannotBeStored(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	must.Do(t, os.WriteFile(dir, nil, 0o600))
	text := `
[l2]
[[pool]]
name = "p"
addresses = ["203.0.113.16/28"]
[[service]]
name = "web"
pool = "p"
ports = ["80"]
backends = ["10.0.0.21"]
check = "none"
`
	a, _, err := newInMemory(t, text, func(o *Options) { o.KeepDir = dir })
	must.Do(t, err)
	defer a.close()
	const problem = "addresses not stored; services may get others from their pools at the next start"
	stored := func() bool {
		return !slices.ContainsFunc(a.problems.findings(), func(f lb.Finding) bool { return f.Object == problem })
	}
	must.Need(t, !stored(), "problems %q; want %q", lbtest.Texts(a.problems.findings()), problem)
	i := slices.IndexFunc(a.tasks, func(t task) bool { return t.name == "addresses to store" })
	go a.tasks[i].run(t.Context())
	must.Do(t, os.Remove(dir))
	eventually(t, "no problem", stored)
	content, err := os.ReadFile(filepath.Join(dir, "addresses.json"))
	must.True(t, err == nil && strings.Contains(string(content), `"web":["203.0.113.1`), "stored %q, %v", content, err)
}
