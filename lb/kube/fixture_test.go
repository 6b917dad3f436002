package kube

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestMain sets client-go's logger before any use, and removes its error handlers, which sleep outside of a synctest
// bubble.
func TestMain(m *testing.M) {
	klog.SetSlogLogger(slog.New(slog.DiscardHandler))
	utilruntime.ErrorHandlers = nil
	m.Run()
}

// fixture is a Source that does not run: tests fill its caches and call its methods.
type fixture struct {
	*Source
	*recorded
}

// recorded records what a Source has done.
type recorded struct {
	checks  []lb.Check // started; a check without a target was stopped
	ports   []string   // calls of NodePorts
	portErr error      // what NodePorts returns
	tunnels []string
	tunnErr error
	sink    []string
	log     bytes.Buffer
	emitted *record.FakeRecorder
}

func (r *recorded) Put(service string, checks []lb.Check) {
	if len(checks) == 0 {
		checks = []lb.Check{{Key: lb.CheckKey{Service: service}}}
	}
	r.checks = append(r.checks, checks...)
}

type fakePorts struct{ *recorded }

func (p fakePorts) Serve(service string, port uint16, readyLocal int, other bool) error {
	p.ports = append(p.ports, fmt.Sprintf("serve %s %d %d%s", service, port, readyLocal,
		map[bool]string{true: " other"}[other]))
	return p.portErr
}
func (p fakePorts) Stop(service string) { p.ports = append(p.ports, "stop "+service) }

type fakeSink struct{ *recorded }

func (s fakeSink) Put(service *lb.Service) {
	s.sink = append(s.sink, fmt.Sprintf("put %s %v", service.Name, service.VIPs))
}
func (s fakeSink) Delete(name string)     { s.sink = append(s.sink, "delete "+name) }
func (s fakeSink) Complete(source string) { s.sink = append(s.sink, "complete "+source) }

// taken returns what was recorded in a list and empties it.
func taken(list *[]string) string {
	text := fmt.Sprint(*list)
	*list = nil
	return text
}

var discard = slog.New(slog.DiscardHandler)

var errTest = errors.New("test error")

func newFixture(t testing.TB, change func(*Options)) *fixture {
	t.Helper()
	r := &recorded{emitted: record.NewFakeRecorder(20)}
	o := Options{
		Client: fake.NewClientset(), Node: "n1", Prober: r, NodePorts: fakePorts{r},
		Address: netip.MustParseAddr("192.0.2.1"), Probe: lb.CheckSpec{Interval: time.Second, Rise: 2, Fall: 3},
		TunnelSources: func(addrs []netip.Addr) error {
			r.tunnels = append(r.tunnels, fmt.Sprint(addrs))
			return r.tunnErr
		},
		Log: slog.New(slog.NewTextHandler(&r.log, nil)),
	}
	change(&o)
	s := must.Get(New(o))(t)
	t.Cleanup(s.queue.ShutDown)
	s.events = r.emitted
	return &fixture{s, r}
}

func asIs(*Options) {}

// drained returns and removes the Events so far.
func drained(r *record.FakeRecorder) (all []string) {
	for len(r.Events) > 0 {
		all = append(all, <-r.Events)
	}
	return all
}

// queued returns the keys in the queue and empties it.
func (f *fixture) queued() []string { return emptied(f.queue) }

func emptied(q workqueue.TypedInterface[string]) (keys []string) {
	for q.Len() > 0 {
		key, _ := q.Get()
		q.Done(key)
		keys = append(keys, key)
	}
	return keys
}

// have puts objects into the caches.
func (f *fixture) have(t testing.TB, objects ...any) {
	t.Helper()
	for _, x := range objects {
		var err error
		switch x := x.(type) {
		case *core.Service:
			err = f.services.Add(x)
		case *discovery.EndpointSlice:
			err = f.slices.Add(slimSlice(x))
		case *endpointSlice:
			err = f.slices.Add(x)
		case *core.Node:
			err = f.nodes.Add(x)
		}
		must.Do(t, err)
	}
	f.readNodes()
}

// slimmed returns what the cache keeps of EndpointSlices.
func slimmed(all []*discovery.EndpointSlice) (out []*endpointSlice) {
	for _, s := range all {
		out = append(out, slimSlice(s))
	}
	return out
}

// of assigns an EndpointSlice to a service in the namespace default.
func of(service string, s *discovery.EndpointSlice) *discovery.EndpointSlice {
	s.Namespace, s.Name = "default", service+"-1"
	s.Labels = map[string]string{discovery.LabelServiceName: service}
	return s
}

func node(name string, addrs ...string) *core.Node {
	n := &core.Node{ObjectMeta: meta.ObjectMeta{Name: name}}
	n.Labels = map[string]string{core.LabelTopologyZone: "zone-" + name}
	for _, a := range addrs {
		n.Status.Addresses = append(n.Status.Addresses, core.NodeAddress{Type: core.NodeInternalIP, Address: a})
	}
	return n
}

// pass lets time pass in a bubble, and waits until everything that was due has ended.
func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// running runs the Source.
func (f *fixture) running(t *testing.T) (stop func()) {
	t.Helper()
	return must.Run(t, func(ctx context.Context) error { return f.Run(ctx, fakeSink{f.recorded}) })
}
