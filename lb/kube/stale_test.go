package kube

import (
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// with is a service with these backends at each of two ports.
func with(backends ...string) *lb.Service {
	var list []lb.Backend
	for _, b := range backends {
		at := netip.MustParseAddrPort(b)
		list = append(list, lb.Backend{Addr: at.Addr(), Port: at.Port()})
	}
	return &lb.Service{Ports: []lb.ServicePort{{Backends: list}, {}}}
}

// deleted returns the deleted backends of each port.
func deleted(s *lb.Service) string {
	out := make([][]netip.AddrPort, len(s.Ports))
	for i, p := range s.Ports {
		for _, b := range p.Backends {
			if b.Deleted {
				out[i] = append(out[i], b.ID())
			}
		}
	}
	return fmt.Sprint(out)
}

const webName = "default/web"

func TestStaleEndpoints(t *testing.T) {
	const a, b = "10.0.0.1:8080", "10.0.0.2:8080"
	const both = "[[10.0.0.1:8080 10.0.0.2:8080] [10.0.0.1:8080 10.0.0.2:8080]]"
	const first = "[[10.0.0.1:8080] [10.0.0.1:8080]]"
	addressless := slice(8080, discovery.Endpoint{}, ep("10.0.0.1", "n1", "rs"))
	portless := slice(8080, ep("10.0.0.1", "n1", "rs"))
	portless.Ports = append([]discovery.EndpointPort{{}}, portless.Ports...)
	for _, tt := range []struct {
		name  string
		old   *lb.Service
		slice *discovery.EndpointSlice
		want  string
	}{
		{"new service", nil, of("web", slice(8080)), "[[] []]"},
		{"removed", with(a), of("web", slice(8080, ep("10.0.0.2", "n1", "rs"))), first},
		{"both removed", with(b, a), of("web", slice(8080)), both},
		{"not ready", with(a), of("web", slice(8080, ep("10.0.0.1", "n1", ""))), "[[] []]"},
		{"terminating", with(a), of("web", slice(8080, ep("10.0.0.1", "n1", "st"))), "[[] []]"},
		{"other port", with(a), of("web", slice(8081, ep("10.0.0.1", "n1", "rs"))), first},
		{"behind a port without number", with(a), of("web", portless), "[[] []]"},
		{"behind one without address", with(a), of("web", addressless), "[[] []]"},
		{"of another service", with(a), of("db", slice(8080, ep("10.0.0.1", "n1", "rs"))), first},
	} {
		f := newFixture(t, asIs)
		f.have(t, tt.slice)
		now := with()
		f.addStale(webName, tt.old, now)
		if got := deleted(now); got != tt.want {
			t.Errorf("%s: deleted %s; want %s", tt.name, got, tt.want)
		}
	}
}

func TestStaleEndpointsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, asIs)
		const at, none = "[[10.0.0.1:8080] [10.0.0.1:8080]]", "[[] []]"
		old := with("10.0.0.1:8080")
		for i, step := range []struct {
			wait time.Duration
			old  *lb.Service // nil: what the step before has put
			want string
		}{
			{0, old, at},
			{staleEndpointTTL - time.Second, nil, at},
			{time.Second, nil, at}, // it expires after, not at the end of, its time
			{time.Nanosecond, nil, none},
			{0, nil, none},
			{0, old, at},
			{staleEndpointTTL / 2, old, at}, // it does not stay longer for this
			{staleEndpointTTL/2 + 1, nil, none},
		} {
			time.Sleep(step.wait)
			if step.old != nil {
				old = step.old
			}
			now := with()
			f.addStale(webName, old, now)
			if got := deleted(now); got != step.want {
				t.Errorf("step %d: deleted %s; want %s", i, got, step.want)
			}
			old = now
		}
		// One that comes back is deleted no more.
		now := with()
		f.addStale(webName, with("10.0.0.1:8080"), now)
		f.have(t, of("web", slice(8080, ep("10.0.0.1", "n1", ""))))
		next := with()
		f.addStale(webName, now, next)
		if got := deleted(now) + deleted(next); got != at+none {
			t.Errorf("one comes back: deleted %s; want %s", got, at+none)
		}
	})
}
