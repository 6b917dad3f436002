package kube

import (
	"fmt"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stest "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// testTerm returns a term that does not run: tests fill its cache and call its methods.
func testTerm(t *testing.T, objects ...*core.Service) (*term, *fake.Clientset, *record.FakeRecorder) {
	pool := poolFrom("public", "203.0.113.1", "203.0.113.2", forExternalIPs)
	client, events := fake.NewClientset(), record.NewFakeRecorder(20)
	a := NewAllocator(AllocatorOptions{Client: client, Node: "n1", Pools: []Pool{pool}, Log: discard})
	a.events = events
	term := newTerm(a, a.o.Pools)
	term.services = cache.NewStore(cache.MetaNamespaceKeyFunc)
	must.Do(t, term.ledger.take(t.Context()))
	client.ClearActions()
	t.Cleanup(term.queue.ShutDown)
	for _, s := range objects {
		term.services.Add(s)
		must.Do(t, client.Tracker().Add(s))
	}
	return term, client, events
}

// wanting returns a Service without an address.
func wanting(name string, change func(*core.Service)) *core.Service {
	return aService(func(s *core.Service) {
		s.Name, s.Status, s.ResourceVersion = name, core.ServiceStatus{}, "7"
		change(s)
	})
}

func given(addrs ...string) func(*core.Service) {
	return func(s *core.Service) {
		for _, a := range addrs {
			status := &s.Status.LoadBalancer
			status.Ingress = append(status.Ingress, core.LoadBalancerIngress{IP: a})
		}
		setManager(s, fieldManager)
	}
}

// owning gives a Service a status that this controller has written, with its finalizer.
func owning(addrs ...string) func(*core.Service) {
	return func(s *core.Service) { given(addrs...)(s); s.Finalizers = []string{finalizer} }
}

// foreign gives a Service a status that another controller has written.
func foreign(addrs ...string) func(*core.Service) {
	return func(s *core.Service) {
		given(addrs...)(s)
		setManager(s, "other")
	}
}

// patches returns and clears the recorded patches.
func patches(client *fake.Clientset) (all []string) {
	for _, a := range client.Actions() {
		if p, ok := a.(k8stest.PatchAction); ok {
			all = append(all, strings.TrimSpace(p.GetSubresource()+" "+string(p.GetPatch())))
		}
	}
	client.ClearActions()
	return all
}

const (
	finalized       = `"metadata":{"finalizers":["` + finalizer + `"],"resourceVersion":"7"}`
	first           = `"status":{"loadBalancer":{"ingress":[{"ip":"203.0.113.1","ipMode":"VIP"}]}}`
	addFinalizer    = `status {` + finalized + `}`
	removeFinalizer = `status {"metadata":{"finalizers":[],"resourceVersion":"7"}}`
	setFirst        = `status {"metadata":{"resourceVersion":"7"},` + first + `}`
	setBoth         = `status {` + finalized + `,` + first + `}`
	clearBoth       = `status {"metadata":{"finalizers":[],"resourceVersion":"7"},` +
		`"status":{"loadBalancer":{"ingress":[]}}}`
)

// Reconciliation depends on the status and the finalizer of a Service.
func TestReconcileStatus(t *testing.T) {
	finalized := func(more func(*core.Service)) func(*core.Service) {
		return func(s *core.Service) {
			s.Finalizers = []string{finalizer}
			setManager(s, "")
			more(s)
		}
	}
	otherClass := func(more func(*core.Service)) func(*core.Service) {
		return func(s *core.Service) { more(s); s.Spec.LoadBalancerClass = new("x/y") }
	}
	clusterIP := func(more func(*core.Service)) func(*core.Service) {
		return func(s *core.Service) { more(s); s.Spec.Type = core.ServiceTypeClusterIP }
	}
	deleting := func(more func(*core.Service)) func(*core.Service) {
		return func(s *core.Service) { more(s); s.DeletionTimestamp = &meta.Time{Time: time.Unix(1, 0)} }
	}
	condition := func(status, reason, message string) []string {
		return []string{`status {"metadata":{"resourceVersion":"7"},"status":{"conditions":[` +
			`{"type":"steelyard.dev/AddressAssigned","status":"` + status + `","lastTransitionTime":"T",` +
			`"reason":"` + reason + `","message":"` + message + `"}]}}`}
	}
	const failed = `there is no pool \"x\"; pools: public`
	const assigned = "Normal IPAllocated assigned [203.0.113.1]"
	const taken = "Warning AddressMoved 203.0.113.1 was taken from the Service: " + "its type or class has changed"
	const moved = assigned + "; Warning AddressMoved %s was taken from the Service, " +
		"which has 203.0.113.1 now: it requests "
	fewer := fmt.Sprintf(moved, "203.0.113.2") + "other families or a different number of addresses"
	byName := fmt.Sprintf(moved, "192.0.2.1") + "others by name"
	withdrawn := []string{clearBoth}
	const noPoolAnyMore = "192.0.2.1 is no longer in a pool; the Service keeps it, but it is " +
		"not announced; to get a different one, set the annotation steelyard.dev/pool"
	const left = "Warning ForeignAddress status.loadBalancer was written by other and is left unchanged; otherwise " +
		"[203.0.113.1] would be assigned; " + textOthers
	first := func(s *core.Service) { s.Spec.LoadBalancerIP = "203.0.113.1" }
	both := func(a, b func(*core.Service)) func(*core.Service) { return func(s *core.Service) { a(s); b(s) } }
	noPool := func(s *core.Service) { s.Annotations = map[string]string{"steelyard.dev/pool": "x"} }
	for _, tt := range []struct {
		name   string
		change func(*core.Service)
		want   []string // patches
		event  string
		holds  bool
	}{
		{"new", same, []string{setBoth}, assigned, true},
		{"has both", finalized(given("203.0.113.1")), nil, "", true},
		{"has an address", given("203.0.113.1"), []string{addFinalizer}, "", true},
		{"has the finalizer", finalized(same), []string{setFirst}, assigned, true},
		{"has two", finalized(given("203.0.113.1", "203.0.113.2")), []string{setFirst}, fewer, true},
		{"has one in no pool", finalized(given("192.0.2.1")), condition("True", "AddressInNoPool", noPoolAnyMore),
			"Warning AddressInNoPool " + noPoolAnyMore, false},
		{"cannot have another", finalized(both(given("203.0.113.1"), noPool)),
			condition("True", "AllocationFailed", failed),
			`Warning AllocationFailed there is no pool "x"; pools: public`, true},
		{"another's, cannot have another", both(foreign("203.0.113.1"), noPool), nil,
			`Warning AllocationFailed there is no pool "x"; pools: public`, true},
		{"asks for another", finalized(both(given("192.0.2.1"), first)), []string{setFirst}, byName, true},
		{"another's", foreign("203.0.113.1"), []string{addFinalizer}, "", true},
		{"another's, in no pool", foreign("192.0.2.1"), nil, left, false},
		{"another's, of two", foreign("203.0.113.1", "203.0.113.2"), nil, left, true},
		{"another's, with a name", both(foreign(""), func(s *core.Service) {
			s.Status.LoadBalancer.Ingress[0].Hostname = "x.example"
		}), nil, left, false},
		{"another's, with a proxy", both(foreign("203.0.113.1"), func(s *core.Service) {
			s.Status.LoadBalancer.Ingress[0].IPMode = new(core.LoadBalancerIPModeProxy)
		}), []string{addFinalizer}, "", true},
		{"cannot have any", noPool, condition("False", "AllocationFailed", failed),
			`Warning AllocationFailed there is no pool "x"; pools: public`, false},
		{"other class", otherClass(same), nil, `Warning NoAgentForClass no Steelyard agent serves the class ` +
			"\"x/y\": see load_balancer_class in [kubernetes]", false},
		{"class changed, and that one has it", otherClass(finalized(func(s *core.Service) {
			given("198.51.100.1")(s)
			setManager(s, "steelyard:x/y")
		})), nil, "", false},
		{"other class, with its finalizer", otherClass(func(s *core.Service) {
			foreign("192.0.2.1")(s)
			s.Finalizers = []string{finalizer}
		}), nil, "", false},
		{"class changed", otherClass(finalized(given("203.0.113.1"))), withdrawn, taken, false},
		{"ClusterIP", clusterIP(same), nil, "", false},
		{"ClusterIP, with our finalizer", clusterIP(finalized(same)), []string{removeFinalizer}, "", false},
		{"ClusterIP, with another's finalizer", clusterIP(func(s *core.Service) {
			s.Finalizers = []string{finalizer}
		}), nil, "", false},
		{"became ClusterIP", clusterIP(finalized(given("203.0.113.1"))), withdrawn, taken, false},
		{"deleting", deleting(finalized(given("203.0.113.1"))), withdrawn, "", false},
		{"deleting, another's", deleting(finalized(foreign("203.0.113.1"))), withdrawn, "", false},
		{"deleting, without an address", deleting(finalized(same)), []string{removeFinalizer}, "", false},
		{"deleting, without the finalizer", deleting(same), nil, "", false},
		{
			"deleting, released before", deleting(given("203.0.113.1")),
			[]string{`status {"metadata":{"resourceVersion":"7"},"status":{"loadBalancer":{"ingress":[]}}}`}, "", false,
		},
		{"deleting, released, another's", deleting(foreign("203.0.113.1")), nil, "", false},
	} {
		s := wanting("web", tt.change)
		term, client, events := testTerm(t, s)
		term.assigner.adopt(s, pending{})
		must.Row(t, tt.name, nil, term.reconcile(t.Context(), webName))
		event := strings.Join(drained(events), "; ")
		got, holds := patches(client), len(term.assigner.alloc.Given(webName)) > 0
		for i := range got {
			got[i] = transition.ReplaceAllString(got[i], "T")
		}
		must.True(t, slices.Equal(got, tt.want) && event == tt.event && holds == tt.holds,
			"%s: patches %q, event %q, holds %t; want %q, %q, %t", tt.name, got, event, holds, tt.want, tt.event,
			tt.holds)
	}
}

// transition is the time in a condition.
var transition = regexp.MustCompile(`\d{4}-\d\d-\d\dT[0-9:]+Z`)

// Other finalizers stay.
func TestFinalizersOfOthers(t *testing.T) {
	s := wanting("web", func(s *core.Service) { s.Finalizers = []string{"a", finalizer, "b"} })
	term, client, _ := testTerm(t, s)
	write := func(finalized bool) {
		if _, err := term.write(t.Context(), s, finalized, nil, nil); err != nil {
			t.Error(err)
		}
	}
	write(true)
	write(false)
	s.Finalizers = []string{"a"}
	write(false)
	write(true)
	want := []string{
		`status {"metadata":{"finalizers":["a","b"],"resourceVersion":"7"}}`,
		`status {"metadata":{"finalizers":["a","` + finalizer + `"],"resourceVersion":"7"}}`,
	}
	must.Row(t, "patches", want, patches(client))
}

// After a failed request the Service is reconciled again, and keeps its addresses.
func TestRequestsFail(t *testing.T) {
	gone := func(s *core.Service) {
		given("203.0.113.1")(s)
		s.Spec.Type, s.Finalizers = core.ServiceTypeClusterIP, []string{finalizer}
	}
	for _, tt := range []struct {
		name   string
		change func(*core.Service)
		want   string
	}{{"assign", same, setBoth}, {"withdraw", gone, clearBoth}} {
		s := wanting("web", tt.change)
		term, client, events := testTerm(t, s)
		term.assigner.adopt(s, pending{})
		client.PrependReactor("patch", "services", func(a k8stest.Action) (bool, runtime.Object, error) {
			return true, nil, errTest
		})
		err := term.reconcile(t.Context(), webName)
		got, said, holds := patches(client), len(events.Events), len(term.assigner.alloc.Given(webName)) > 0
		must.True(t, err != nil && slices.Equal(got, []string{tt.want}) && said == 0 && holds,
			"%s: %v, patches %q, %d events, holds %t; want an error, %q, none, true", tt.name, err, got, said, holds,
			tt.want)
	}
}

// A released address is offered to the Services that wait for one.
func TestRetryOthers(t *testing.T) {
	had := wanting("had", owning("203.0.113.1"))
	others := []*core.Service{wanting("waits", same), wanting("has", given("203.0.113.2"))}
	for name, tt := range map[string]struct {
		end  func(*term)
		want []string
	}{
		"deleted":    {func(t *term) { t.services.Delete(had) }, []string{"default/waits"}},
		"other type": {func(*term) { had.Spec.Type = core.ServiceTypeClusterIP }, []string{"default/waits"}},
		"only reserved": {func(t *term) {
			t.services.Delete(had)
			t.assigner.release("default/had")
			reserved := []netip.Addr{netip.MustParseAddr("203.0.113.1")}
			t.assigner.alloc.Reserve(lb.Holder{Service: "default/had"}, reserved)
		}, []string{"default/waits"}},
	} {
		had.Spec.Type = core.ServiceTypeLoadBalancer
		term, _, _ := testTerm(t, append(slices.Clone(others), had)...)
		term.assigner.adopt(had, pending{})
		tt.end(term)
		term.gone["default/had"], term.waiting["default/waits"] = true, true
		must.Row(t, name, nil, term.reconcile(t.Context(), "default/had"))
		must.Row(t, name+": queued", tt.want, emptied(term.queue))
		must.Row(t, name+": after the release", "[203.0.113.1]", answer(term.assigner, wanting("new", same)))
	}
}

// A new leader assigns no address that is in the status of a Service or in externalIPs.
func TestAdopt(t *testing.T) {
	otherClass := func(s *core.Service) {
		given("203.0.113.1")(s)
		s.Spec.LoadBalancerClass = new("x/y")
	}
	first := given("203.0.113.1")
	deleting := func(s *core.Service) { first(s); s.DeletionTimestamp = &meta.Time{Time: time.Unix(1, 0)} }
	external := func(s *core.Service) {
		s.Spec.Type, s.Spec.ExternalIPs = core.ServiceTypeClusterIP, []string{"203.0.113.1"}
	}
	for name, tt := range map[string]struct {
		services []*core.Service
		want     string // the addresses of "new"
	}{
		"none":          {nil, "[203.0.113.1]"},
		"one":           {[]*core.Service{wanting("a", first)}, "[203.0.113.2]"},
		"in no pool":    {[]*core.Service{wanting("a", given("192.0.2.1"))}, "[203.0.113.1]"},
		"another class": {[]*core.Service{wanting("a", otherClass)}, "[203.0.113.2]"},
		"externalIPs":   {[]*core.Service{wanting("a", external)}, "[203.0.113.2]"},
		"deleting": {[]*core.Service{wanting("a", func(s *core.Service) {
			deleting(s)
			owning()(s)
		})}, "[203.0.113.2]"},
		"deleting, kept by others": {[]*core.Service{wanting("a", deleting)}, "[203.0.113.1]"},
	} {
		term, _, _ := testTerm(t, tt.services...)
		must.Do(t, term.readAll(t.Context()))
		must.Row(t, name, tt.want, answer(term.assigner, wanting("new", same)))
	}
}

// A leader assigns addresses, and the next one starts from what the API server has.
func TestElection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old := wanting("old", owning("203.0.113.1"))
		client := fake.NewClientset(old, wanting("new", same), wanting("late", same))
		address := func(name string) string {
			s, err := client.CoreV1().Services("default").Get(t.Context(), name, meta.GetOptions{})
			if err != nil {
				return err.Error()
			}
			return fmt.Sprint(addressesOf(s))
		}
		run := func(node string) (stop func(), last func() (string, time.Time)) {
			a := NewAllocator(AllocatorOptions{
				Client: client, Lease: client, Node: node, Namespace: "kube-system", Log: discard,
				Pools: []Pool{poolFrom("public", "203.0.113.1", "203.0.113.2")},
			})
			return must.Run(t, a.Run), a.Last
		}
		stopFirst, _ := run("n1")
		stopSecond, last := run("n2")
		pass(time.Minute)
		if got := []string{address("old"), address("new"), address("late")}; !slices.Contains(got, "[]") ||
			!slices.Contains(got, "[203.0.113.2]") || got[0] != "[203.0.113.1]" {
			t.Errorf("addresses %q; want one each for old and one other", got)
		}
		stopFirst()
		client.CoreV1().Services("default").Delete(t.Context(), "old", meta.DeleteOptions{})
		pass(time.Minute)
		got := []string{address("new"), address("late")}
		slices.Sort(got)
		want := []string{"[203.0.113.1]", "[203.0.113.2]"}
		must.True(t, slices.Equal(got, want), "addresses %q after the first leader; want %q", got, want)
		text, at := last()
		must.True(t, strings.HasSuffix(text, ": assigned [203.0.113.1]") && !at.IsZero(), "decided %q at %s", text, at)
		stopSecond()
	})
}
