package kube

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A Service keeps its address and its ports, whatever changes in a Service that shares the address, even while there is
// no leader. The changed Service gets the ports that are free, and a condition that names the others.
func TestSharerThatChangesTakesNothing(t *testing.T) {
	const both, denied = "guest [203.0.113.1], host [203.0.113.1]", "443/TCP at 203.0.113.1 belongs to default/host; " +
		"the Service keeps its addresses for its other ports"
	ports := func(numbers ...int32) func(*core.Service) {
		return func(s *core.Service) {
			s.Spec.Ports = nil
			for _, n := range numbers {
				s.Spec.Ports = append(s.Spec.Ports, core.ServicePort{Name: fmt.Sprint(n), Port: n})
			}
		}
	}
	note := func(name, value string) func(*core.Service) {
		return func(s *core.Service) { s.Annotations = map[string]string{"steelyard.dev/" + name: value} }
	}
	for _, tt := range []struct {
		name    string
		change  func(*core.Service) // of the guest, which was created first
		without bool                // a leader
		want    string
		record  string // of the guest
		told    string
		served  string // of its ports, by a node
	}{
		{"one more port", ports(80, 443), false, both, "80/TCP", denied, "80/TCP"},
		{"one more port, without a leader", ports(80, 443), true, both, "80/TCP", denied, "80/TCP"},
		{"no other port", ports(443), true, both, "no port", denied, ""},
		{"a free port", ports(80, 81), true, both, "80/TCP, 81/TCP", "", "80/TCP, 81/TCP"},
		{"the key", note("share", "y"), true, both, "80/TCP", "", "80/TCP"},
		{"no key", func(s *core.Service) { s.Annotations = nil }, false, both, "80/TCP", "", "80/TCP"},
		{"no key, one more port", func(s *core.Service) { ports(80, 443)(s); s.Annotations = nil }, true, both,
			"80/TCP", denied, "80/TCP"},
	} {
		synctest.Test(t, func(t *testing.T) {
			server := newAPIServer(t, 1)
			settle := func() { time.Sleep(10 * time.Minute) }
			start := func() (stop func()) {
				ctx, cancel := context.WithCancel(t.Context())
				client := server.client("agent", &faults{})
				a := NewAllocator(AllocatorOptions{
					Client: client, Lease: client, Node: "n", Namespace: "steelyard",
					Pools: []Pool{poolOfOne("203.0.113.1"), poolOfOne("203.0.113.2")},
					Log:   discard,
				})
				a.events = &record.FakeRecorder{}
				go a.lead(ctx)
				settle()
				return func() { cancel(); settle() }
			}
			edit := func(name string, change func(*core.Service)) {
				server.edit("default/"+name, func(s *core.Service) *core.Service {
					if s == nil {
						s = wanting(name, note("share", "x"))
					}
					change(s)
					return s
				})
				settle()
			}
			stop := start()
			edit("guest", ports(80))
			edit("host", ports(443))
			server.mu.Lock()
			server.written = func(_ string, old, _ *core.Service) {
				must.True(t, old.Name != "host", "%s: the host is written", tt.name)
			}
			server.mu.Unlock()
			if tt.without {
				stop()
			}
			edit("guest", tt.change)
			if tt.without {
				stop = start()
			}
			stop()
			server.mu.Lock()
			guest, host := server.services["default/guest"], server.services["default/host"]
			server.written = func(string, *core.Service, *core.Service) {}
			server.mu.Unlock()
			must.Row(t, tt.name, tt.want,
				fmt.Sprintf("guest %v, host %v", statusAddresses(guest), statusAddresses(host)))
			must.True(t, recordOf(host) == "443/TCP" && recordOf(guest) == tt.record,
				"%s: recorded %q and %q", tt.name, recordOf(host), recordOf(guest))
			c := assignedCondition(guest)
			told := c != nil && c.Status == meta.ConditionFalse && c.Reason == "PortInUse" && c.Message == tt.told
			must.True(t, told == (tt.told != ""), "%s: condition %+v; want %q", tt.name, c, tt.told)
			f := newFixture(t, asIs)
			f.have(t, guest, host)
			a := f.addressesFor(host)
			must.True(t, len(a.vips) == 1 && len(a.taken) == 0, "%s: nodes serve the host as %+v", tt.name, a)
			served := ""
			if a := f.addressesFor(guest); len(a.vips) > 0 {
				served = portsText(holder(withoutPorts(guest, a.taken)).Ports)
			}
			must.Row(t, tt.name+": nodes serve of the guest", tt.served, served)

			stop = start() // when the host is gone, the guest gets the port
			server.change("default/host", func(s *core.Service) { s.DeletionTimestamp = &meta.Time{Time: time.Now()} })
			settle()
			stop()
			server.mu.Lock()
			guest = server.services["default/guest"]
			server.mu.Unlock()
			if c := assignedCondition(guest); c != nil && c.Status == meta.ConditionFalse {
				t.Errorf("%s: after the host was deleted: %+v", tt.name, c)
			}
		})
	}
}

// A record does not depend on the order of the ports, and is read as it was written, even one of an earlier version.
func TestRecord(t *testing.T) {
	s := wanting("web", func(s *core.Service) {
		s.Annotations = map[string]string{"metallb.io/allow-shared-ip": "x"}
		s.Spec.Ports = []core.ServicePort{{Port: 443, Protocol: core.ProtocolUDP}, {Port: 80}}
	})
	h := holds(s)
	must.True(t, h.ShareKey == "" && len(h.Ports) == 2, "without a record it holds %+v", h)
	got, want := portsText(holder(s).Ports), "443/UDP, 80/TCP"
	must.True(t, got == want, "%s; want %s", got, want)
	for record, want := range map[string]string{
		"443/UDP, 80/TCP": "443/UDP, 80/TCP", "80/TCP": "80/TCP", noPorts: noPorts,
		`443/UDP, 80/TCP by the key "x"; at version 7`: "443/UDP, 80/TCP",
	} {
		s.Status.Conditions = conditionsAfter(s, decision{addrs: []string{"203.0.113.1"}, record: record})
		if h := holds(s); portsText(h.Ports) != want || h.ShareKey != "x" || len(conditionsOfOthers(s)) > 0 {
			t.Errorf("%q: the Service holds %+v; want %s", record, h, want)
		}
	}
	s.Spec.Ports = make([]core.ServicePort, sharedPortsMax+1)
	h = holder(s)
	must.True(t, h.ShareKey == "", "a Service with too many ports for a condition shares its addresses")
}

// A share key is valid in the namespace of the Service that has the address, in namespaces that this Service names, and
// in all if the pool says so. A Service elsewhere that only knows the key gets another address.
func TestShareAcrossNamespaces(t *testing.T) {
	const (
		in      = "the address"
		refused = "203.0.113.1 belongs to team/holder, whose share key is valid only in its namespace; it can name " +
			"the namespace %s in the annotation steelyard.dev/share-with, or the pool can set share_across_namespaces"
	)
	for _, tt := range []struct {
		name, namespace string
		with            string // what the holder names
		across          bool   // the pool
		want            string
	}{
		{"the same", "team", "", false, in},
		{"another", "other", "", false, fmt.Sprintf(refused, "other")},
		{"a named one", "other", "more, other", false, in},
		{"one that is not named", "third", "more,other", false, fmt.Sprintf(refused, "third")},
		{"any, by the pool", "other", "", true, in},
	} {
		pool := poolOfOne("203.0.113.1")
		to := netip.MustParseAddr("203.0.113.2")
		pool.Ranges = append(pool.Ranges, lb.AddrRange{From: to, To: to})
		pool.ShareAcross, pool.ExternalIPs = tt.across, true
		a := newAssigner(nil, []Pool{pool})
		holder := wanting("holder", func(s *core.Service) {
			s.Namespace, s.Annotations = "team", map[string]string{"steelyard.dev/share": "x", shareWith[0]: tt.with}
		})
		a.settle(holder, a.decide(holder, pending{}, false))
		joiner := func(asks string) *core.Service {
			return wanting("joiner", func(s *core.Service) {
				s.Namespace, s.Spec.Ports[0].Port, s.Spec.LoadBalancerIP = tt.namespace, 443, asks
				s.Annotations = map[string]string{"steelyard.dev/share": "x"}
			})
		}
		got := in
		if addrs, err := a.assign(joiner("203.0.113.1")); err != nil {
			got = err.Error()
		} else if fmt.Sprint(addrs) != "[203.0.113.1]" {
			t.Errorf("%s: requests 203.0.113.1 and gets %v", tt.name, addrs)
		}
		must.Row(t, tt.name, tt.want, got)
		a.release(tt.namespace + "/joiner")
		addrs, err := a.assign(joiner(""))
		shared := fmt.Sprint(addrs) == "[203.0.113.1]"
		must.True(t, err == nil && shared == (tt.want == in), "%s: asks for any and gets %v, %v", tt.name, addrs, err)

		f := newFixture(t, func(o *Options) { o.Pools = []Pool{pool} })
		external := joiner("")
		external.Spec.Type, external.Spec.ExternalIPs = core.ServiceTypeClusterIP, []string{"203.0.113.1"}
		given("203.0.113.1")(holder)
		f.have(t, holder, external)
		must.Row(t, tt.name+": as externalIPs, served", tt.want == in, len(f.addressesFor(external).vips) == 1)
	}
}
