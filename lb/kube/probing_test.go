package kube

import (
	"errors"
	"fmt"
	"net/netip"
	"reflect"
	"testing"
	"time"

	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// Another probing is in force for the checks that run, which keep the results of targets that are the same.
func TestSetProbing(t *testing.T) {
	const url = "http://127.0.0.1:10256/healthz"
	first := lb.CheckSpec{Interval: time.Second, Timeout: time.Second, Rise: 2, Fall: 3}
	fast := lb.CheckSpec{Interval: 100 * time.Millisecond, Timeout: 50 * time.Millisecond, Rise: 1, Fall: 2}
	started := func(f *fixture) (all []string) {
		for _, c := range f.checks {
			text := "ends " + c.Key.Service
			if c.Target.IsValid() {
				text = fmt.Sprintf("%s %s%s every %s", c.Key.Service, c.Target,
					map[bool]string{true: " presumed"}[c.Presumed], c.Spec.Interval)
			}
			all = append(all, text)
		}
		f.checks = nil
		return all
	}
	for _, tt := range []struct {
		name   string
		next   Probing
		want   string
		reason string // why addresses are withheld afterwards
	}{
		{"equal", Probing{Probe: first, ProxyHealthz: url}, "[]", ""},
		{"faster", Probing{Probe: fast, ProxyHealthz: url}, "[node/proxy 127.0.0.1:10256 every 100ms]", ""},
		{
			"elsewhere", Probing{Probe: first, ProxyHealthz: "http://127.0.0.1:9/healthz"},
			"[ends node/proxy node/proxy 127.0.0.1:9 presumed every 1s]", "",
		},
		{"nowhere", Probing{Probe: first}, "[ends node/proxy]", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, func(o *Options) { o.Probe, o.ProxyHealthz = first, url })
			f.have(t, node("n1", "192.0.2.1"))
			f.conditions.startProxyCheck(false)
			f.Health(lb.Health{Key: lb.CheckKey{Service: proxyCheck}, State: lb.StateHealthy})
			started(f)
			f.SetProbing(tt.next)
			for _, key := range f.queued() {
				f.handle(key, fakeSink{f.recorded})
			}
			if got := fmt.Sprint(started(f)); got != tt.want {
				t.Errorf("%s; want %s", got, tt.want)
			}
			if got := f.conditions.proxyReason(); got != tt.reason {
				t.Errorf("withheld for %q; want %q", got, tt.reason)
			}
			if !reflect.DeepEqual(f.o.probing(), tt.next) {
				t.Errorf("the options have %+v", f.o.probing())
			}
		})
	}
}

// The checks of other nodes' proxies follow as well.
func TestSetProbingOfOthers(t *testing.T) {
	f := newFixture(t, func(o *Options) { o.ProxyHealthz = "http://127.0.0.1:10256/healthz" })
	f.conditions.startProxyCheck(false)
	f.Health(lb.Health{
		Key: lb.CheckKey{Service: proxyCheck}, State: lb.StateUnhealthy, Err: errors.New("status 503"),
	})
	f.conditions.ask(map[string]netip.Addr{"n2": netip.MustParseAddr("192.0.2.2")})
	f.checks = nil
	f.conditions.setProbing(Probing{})
	var ended []string
	for _, c := range f.checks {
		if !c.Target.IsValid() {
			ended = append(ended, c.Key.Service)
		}
	}
	if got := fmt.Sprint(ended); got != "[node/proxy node/proxy/n2]" {
		t.Errorf("ended %s", got)
	}
}

// A service that this node announces when its health check node port is new stays announced until the check has failed;
// one that it did not announce waits for the first success.
func TestPolicyChangesToLocal(t *testing.T) {
	const notYet = "health check node port 30000 has not answered yet"
	for _, tt := range []struct {
		name      string
		endpoints string // the node of the endpoint; "": none
		proxy     error
		then      string // the node of the endpoint under the policy Local
		after     string // why it is withheld directly after the change
	}{
		{"announced", "n1", nil, "n1", ""},
		{"an endpoint elsewhere before", "n2", nil, "n1", ""},
		{"no endpoint here", "n1", nil, "n2", lb.NoLocalEndpoint},
		{"withheld for the proxy", "n1", errTest, "n1", notYet},
		{"no endpoint before", "", nil, "n1", notYet},
		{"no endpoint at all", "n1", nil, "", lb.NoEndpoint},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture(t, func(o *Options) { o.ProxyHealthz = healthz })
			at := func(node string) {
				all := []discovery.Endpoint{}
				if node != "" {
					all = append(all, ep("10.0.0.1", node, "rs"))
				}
				f.have(t, of("web", slice(8080, all...)))
			}
			reconcile := func(want string) {
				t.Helper()
				f.reconcile(webName, fakeSink{f.recorded})
				if got := f.put[webName].WithholdReason; got != want {
					t.Errorf("withheld for %q; want %q", got, want)
				}
			}
			f.own = node("n1", "192.0.2.1")
			f.have(t, f.own, node("n2", "192.0.2.2"), aService(same))
			f.conditions.startProxyCheck(false)
			f.Health(report(proxyCheck, tt.proxy))
			at(tt.endpoints)
			f.reconcile(webName, fakeSink{f.recorded})
			f.have(t, aService(localPort))
			at(tt.then)
			for range 2 {
				reconcile(tt.after)
			}
			if tt.then != "n1" {
				return
			}
			f.Health(lb.Health{Key: lb.CheckKey{Service: webName}, Err: errRefused}) // does not decide yet
			reconcile(tt.after)
			f.Health(report(webName, errTest))
			reconcile("health check node port 30000: bad")
			f.Health(report(webName, nil))
			reconcile("")
		})
	}
}
