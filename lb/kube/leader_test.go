package kube

import (
	"fmt"
	"log/slog"
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

// newTerm is a term that does not run: tests fill its cache and call its methods.
func testTerm(t *testing.T, objects ...*core.Service) (*term, *fake.Clientset, *record.FakeRecorder) {
	ranges := []lb.AddrRange{{From: netip.MustParseAddr("203.0.113.1"), To: netip.MustParseAddr("203.0.113.2")}}
	pool := Pool{Pool: lb.Pool{Name: "public", AutoAssign: true, Ranges: ranges}, ExternalIPs: true}
	client, events := fake.NewClientset(), record.NewFakeRecorder(20)
	a := NewAllocator(AllocatorOptions{
		Client: client, Node: "n1", Pools: []Pool{pool},
		Log: slog.New(slog.DiscardHandler),
	})
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

// wanting is a Service without an address.
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

// foreign is a status that another controller has written.
func foreign(addrs ...string) func(*core.Service) {
	return func(s *core.Service) {
		given(addrs...)(s)
		setManager(s, "other")
	}
}

// patches returns what was patched, and forgets it.
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

// What a reconciliation writes depends on the status and the finalizer that the Service has.
func TestReconcileStatus(t *testing.T) {
	finalized := func(more func(*core.Service)) func(*core.Service) {
		return func(s *core.Service) {
			s.Finalizers = []string{finalizer}
			setManager(s, "")
			more(s)
		}
	}
	otherClass := func(more func(*core.Service)) func(*core.Service) {
		return func(s *core.Service) { more(s); s.Spec.LoadBalancerClass = ptr("x/y") }
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
	const taken = "Warning AddressMoved 203.0.113.1 was taken from the Service: " +
		"its type or its class is another one now"
	withdrawn := []string{clearBoth}
	const noPoolAnyMore = "192.0.2.1 is no longer in a pool; the Service keeps it, and it is " +
		"not announced; to get another one, set the annotation steelyard.dev/pool"
	const left = "Warning ForeignAddress status.loadBalancer was written by other and is left as it is; without it " +
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
		{"has two", finalized(given("203.0.113.1", "203.0.113.2")), []string{setFirst}, assigned, true},
		{
			"has one in no pool", finalized(given("192.0.2.1")), condition("True", "AddressInNoPool", noPoolAnyMore),
			"Warning AddressInNoPool " + noPoolAnyMore, false,
		},
		{
			"cannot have another", finalized(both(given("203.0.113.1"), noPool)),
			condition("True", "AllocationFailed", failed),
			`Warning AllocationFailed there is no pool "x"; pools: public`, true,
		},
		{
			"another's, cannot have another", both(foreign("203.0.113.1"), noPool), nil,
			`Warning AllocationFailed there is no pool "x"; pools: public`, true,
		},
		{"asks for another", finalized(both(given("192.0.2.1"), first)), []string{setFirst}, assigned, true},
		{"another's", foreign("203.0.113.1"), []string{addFinalizer}, "", true},
		{"another's, in no pool", foreign("192.0.2.1"), nil, left, false},
		{"another's, of two", foreign("203.0.113.1", "203.0.113.2"), nil, left, true},
		{"another's, with a name", both(foreign(""), func(s *core.Service) {
			s.Status.LoadBalancer.Ingress[0].Hostname = "x.example"
		}), nil, left, false},
		{"another's, with a proxy", both(foreign("203.0.113.1"), func(s *core.Service) {
			s.Status.LoadBalancer.Ingress[0].IPMode = ptr(core.LoadBalancerIPModeProxy)
		}), []string{addFinalizer}, "", true},
		{
			"cannot have any", noPool, condition("False", "AllocationFailed", failed),
			`Warning AllocationFailed there is no pool "x"; pools: public`, false,
		},
		{
			"other class", otherClass(same), nil, `Warning NoAgentForClass no agent of Steelyard serves the class ` +
				"\"x/y\": see load_balancer_class in [kubernetes]", false,
		},
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
		if err := term.reconcile(t.Context(), webName); err != nil {
			t.Errorf("%s: %v", tt.name, err)
		}
		event := ""
		if len(events.Events) > 0 {
			event = <-events.Events
		}
		got, holds := patches(client), term.assigner.holds(webName)
		for i := range got {
			got[i] = transition.ReplaceAllString(got[i], "T")
		}
		if !slices.Equal(got, tt.want) || event != tt.event || holds != tt.holds {
			t.Errorf("%s: patches %q, event %q, holds %t; want %q, %q, %t",
				tt.name, got, event, holds, tt.want, tt.event, tt.holds)
		}
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
	if got := patches(client); !slices.Equal(got, want) {
		t.Errorf("patches %q; want %q", got, want)
	}
}

// A failed request is an error: the Service is reconciled again, and keeps its addresses.
func TestRequestsFail(t *testing.T) {
	gone := func(s *core.Service) {
		given("203.0.113.1")(s)
		s.Spec.Type, s.Finalizers = core.ServiceTypeClusterIP, []string{finalizer}
	}
	for _, tt := range []struct {
		name   string
		change func(*core.Service)
		want   string
	}{
		{"assign", same, setBoth},
		{"withdraw", gone, clearBoth},
	} {
		s := wanting("web", tt.change)
		term, client, events := testTerm(t, s)
		term.assigner.adopt(s, pending{})
		client.PrependReactor("patch", "services", func(a k8stest.Action) (bool, runtime.Object, error) {
			return true, nil, errTest
		})
		err := term.reconcile(t.Context(), webName)
		got, said, holds := patches(client), len(events.Events), term.assigner.holds(webName)
		if err == nil || !slices.Equal(got, []string{tt.want}) || said > 0 || !holds {
			t.Errorf("%s: %v, patches %q, %d events, holds %t; want an error, %q, none, true",
				tt.name, err, got, said, holds, tt.want)
		}
	}
}

// A released address is offered to the Services that wait for one.
func TestRetryOthers(t *testing.T) {
	had := wanting("had", func(s *core.Service) {
		given("203.0.113.1")(s)
		s.Finalizers = []string{finalizer}
	})
	others := []*core.Service{wanting("waits", same), wanting("has", given("203.0.113.2"))}
	queued := func(term *term) (keys []string) {
		for term.queue.Len() > 0 {
			key, _ := term.queue.Get()
			term.queue.Done(key)
			keys = append(keys, key)
		}
		return keys
	}
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
		if err := term.reconcile(t.Context(), "default/had"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := queued(term); !slices.Equal(got, tt.want) {
			t.Errorf("%s: queued %q; want %q", name, got, tt.want)
		}
		if got, err := term.assigner.assign(wanting("new", same)); fmt.Sprint(got) != "[203.0.113.1]" {
			t.Errorf("%s: %v, %v after the release", name, got, err)
		}
	}
}

// A new leader assigns no address that is in the status of a Service or in externalIPs.
func TestAdopt(t *testing.T) {
	otherClass := func(s *core.Service) {
		given("203.0.113.1")(s)
		s.Spec.LoadBalancerClass = ptr("x/y")
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
			s.Finalizers = []string{finalizer}
		})}, "[203.0.113.2]"},
		"deleting, kept by others": {[]*core.Service{wanting("a", deleting)}, "[203.0.113.1]"},
	} {
		term, _, _ := testTerm(t, tt.services...)
		must.Do(t, term.readAll(t.Context()))
		if got, err := term.assigner.assign(wanting("new", same)); fmt.Sprint(got) != tt.want {
			t.Errorf("%s: %v, %v; want %s", name, got, err, tt.want)
		}
	}
}

// A leader assigns addresses, the next one starts from what the API server has.
func TestElection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old := wanting("old", func(s *core.Service) { given("203.0.113.1")(s); s.Finalizers = []string{finalizer} })
		client := fake.NewClientset(old, wanting("new", same), wanting("late", same))
		pool := lb.Pool{Name: "public", AutoAssign: true, Ranges: []lb.AddrRange{
			{From: netip.MustParseAddr("203.0.113.1"), To: netip.MustParseAddr("203.0.113.2")},
		}}
		address := func(name string) string {
			s, err := client.CoreV1().Services("default").Get(t.Context(), name, meta.GetOptions{})
			if err != nil {
				return err.Error()
			}
			return fmt.Sprint(addressesOf(s))
		}
		run := func(node string) (stop func()) {
			a := NewAllocator(AllocatorOptions{
				Client: client, Lease: client, Node: node, Namespace: "kube-system", Pools: []Pool{{Pool: pool}},
				Log: slog.New(slog.DiscardHandler),
			})
			return must.Run(t, a.Run)
		}
		stopFirst, stopSecond := run("n1"), run("n2")
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
		if want := []string{"[203.0.113.1]", "[203.0.113.2]"}; !slices.Equal(got, want) {
			t.Errorf("addresses %q after the first leader; want %q", got, want)
		}
		stopSecond()
	})
}
