package kube

import (
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"

	"github.com/steelyard-lb/steelyard/lb"
)

// twoPorts is a view of a service without backends.
func twoPorts() *view {
	return &view{
		service: &lb.Service{Name: webName, Ports: make([]lb.ServicePort, 2)},
		ports:   []portKey{{"http", core.ProtocolTCP}, {"other", core.ProtocolTCP}},
	}
}

// deleted returns the deleted backends of each port.
func deleted(v *view) string {
	out := make([][]netip.AddrPort, len(v.service.Ports))
	for i, p := range v.service.Ports {
		for _, b := range p.Backends {
			if b.Deleted {
				out[i] = append(out[i], b.ID())
			}
		}
	}
	return fmt.Sprint(out)
}

const webName = "default/web"

// Endpoints that a service has had become deleted ones when no slice has them now, whatever was known of them
// before.
func TestStaleEndpoints(t *testing.T) {
	const none, first = "[[] []]", "[[10.0.0.1:8080] []]"
	const both = "[[10.0.0.1:8080 10.0.0.2:8080] []]"
	a, b := ep("10.0.0.1", "n1", "rs"), ep("10.0.0.2", "n1", "rs")
	down, leaving := ep("10.0.0.1", "n1", ""), ep("10.0.0.1", "n1", "st")
	portless := slice(8080, a)
	portless.Ports = append([]discovery.EndpointPort{{}}, portless.Ports...)
	one := func(e ...discovery.Endpoint) *discovery.EndpointSlice { return slice(8080, e...) }
	for _, tt := range []struct {
		name  string
		steps []*discovery.EndpointSlice
		want  string
	}{
		{"new service", []*discovery.EndpointSlice{one()}, none},
		{"removed", []*discovery.EndpointSlice{one(a), one(b)}, first},
		{"both removed", []*discovery.EndpointSlice{one(b, a), one()}, both},
		{"not ready", []*discovery.EndpointSlice{one(a), one(down)}, none},
		{"terminating", []*discovery.EndpointSlice{one(a), one(leaving)}, none},
		{"removed while it was terminating", []*discovery.EndpointSlice{one(a), one(leaving), one(b)}, first},
		{"removed while it was not ready", []*discovery.EndpointSlice{one(down), one(b)}, first},
		{"back again", []*discovery.EndpointSlice{one(a), one(), one(down)}, none},
		{"other port", []*discovery.EndpointSlice{one(a), slice(8081, a)}, first},
		{"behind a port without number", []*discovery.EndpointSlice{one(a), portless}, none},
		{"behind one without address", []*discovery.EndpointSlice{one(a), one(discovery.Endpoint{}, a)}, none},
	} {
		f := newFixture(t, asIs)
		f.have(t, of("db", slice(8080, a, b)))
		var now *view
		for _, step := range tt.steps {
			f.have(t, of("web", step))
			now = twoPorts()
			f.addStale(now)
		}
		if got := deleted(now); got != tt.want {
			t.Errorf("%s: deleted %s; want %s", tt.name, got, tt.want)
		}
	}
}

func TestStaleEndpointsExpire(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, asIs)
		f.have(t, of("web", slice(8080, ep("10.0.0.1", "n1", "rs"))))
		f.addStale(twoPorts())
		f.have(t, of("web", slice(8080)))
		const at, none = "[[10.0.0.1:8080] []]", "[[] []]"
		for i, step := range []struct {
			wait time.Duration
			want string
		}{
			{0, at}, {staleEndpointTTL - time.Second, at},
			{time.Second, at}, // it expires after, not at the end of, its time
			{time.Nanosecond, none}, {0, none},
		} {
			time.Sleep(step.wait)
			now := twoPorts()
			f.addStale(now)
			if got := deleted(now); got != step.want {
				t.Errorf("step %d: deleted %s; want %s", i, got, step.want)
			}
		}
		pass(time.Second)
		if got := f.queued(); len(got) != 1 || got[0] != webName {
			t.Errorf("looked at again: %q", got)
		}
		if x := f.endpoints[webName]; len(x.present)+len(x.removed) != 0 {
			t.Errorf("remembered: %v", x)
		}
	})
}
