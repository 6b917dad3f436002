package kube

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
)

func localPort(s *core.Service) { local(s); s.Spec.HealthCheckNodePort = 30000 }

// After a boot the agent takes no health check node port for some minutes: a service proxy that starts later could not
// listen there.
func TestNodePortAfterBoot(t *testing.T) {
	for _, isProxy := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			f := newFixture(t, func(o *Options) {
				o.ProxyHealthz, o.IsProxy, o.Booted = healthz, isProxy, time.Now().Add(-time.Minute)
			})
			f.conditions.startProxyCheck(false)
			f.Health(report(proxyCheck, errRefused))
			f.queued()
			f.nodePort(aService(localPort), 1)
			const served = "[serve default/web 30000 1]"
			if got := taken(&f.ports); (got == served) != isProxy {
				t.Errorf("a minute after the boot, is proxy: %t: %s", isProxy, got)
			}
			if isProxy {
				return
			}
			pass(proxyStart - time.Minute)
			if got := f.queued(); !slices.Equal(got, []string{webName}) {
				t.Errorf("queued %q; want the service", got)
			}
			f.nodePort(aService(localPort), 1)
			if got := taken(&f.ports); got != served {
				t.Errorf("%s after the boot: %s", proxyStart, got)
			}
		})
	}
}

// A service proxy answers for every Service, also for those that another program serves and those without an address.
func TestNodePortsOfOthers(t *testing.T) {
	for name, change := range map[string]func(*core.Service){
		"no address":    func(s *core.Service) { s.Status = core.ServiceStatus{} },
		"another class": func(s *core.Service) { s.Spec.LoadBalancerClass = ptr("x/y") },
	} {
		for _, isProxy := range []bool{false, true} {
			f := newFixture(t, func(o *Options) { o.IsProxy = isProxy })
			s := aService(func(s *core.Service) { localPort(s); change(s) })
			f.have(t, s, node("n1"), of("web", slice(8080, ep("10.0.0.1", "n1", "rs"), ep("10.0.0.2", "n2", "rs"))))
			f.reconcile(webName, fakeSink{f.recorded})
			want := "[stop default/web]"
			if isProxy {
				want = "[serve default/web 30000 1 other]"
			}
			if got := taken(&f.ports); got != want || len(f.sink) > 0 {
				t.Errorf("%s, is proxy: %t: %s, put %v; want %s", name, isProxy, got, f.sink, want)
			}
			f.services.Delete(s)
			f.reconcile(webName, fakeSink{f.recorded})
			if got := taken(&f.ports); got != "[stop default/web]" {
				t.Errorf("%s, deleted: %s", name, got)
			}
		}
	}
}
