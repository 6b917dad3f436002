package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	coordination "k8s.io/api/coordination/v1"
	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	k8stest "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// refusing is an API server with one agent that assigns addresses.
type refusing struct {
	*apiServer
	events *record.FakeRecorder
	agent  *Allocator
}

func newRefusing(t *testing.T) *refusing {
	r := &refusing{newAPIServer(t, 1), record.NewFakeRecorder(10_000), nil}
	client := r.client("agent", &faults{})
	r.agent = NewAllocator(AllocatorOptions{
		Client: client, Lease: client, Node: "n1", Namespace: "steelyard", Log: discard,
		Pools: []Pool{poolFrom("public", "203.0.113.1", "203.0.127.254")},
	})
	r.agent.events = r.events
	return r
}

// lead lets the agent lead for some time.
func (r *refusing) lead(d time.Duration) {
	stop := must.Run(r.t, func(ctx context.Context) error { r.agent.lead(ctx); return nil })
	pass(d)
	stop()
}

func (r *refusing) add(name string) {
	r.edit("default/"+name, func(*core.Service) *core.Service {
		return wanting(name, func(s *core.Service) { s.ResourceVersion = "" })
	})
}

func (r *refusing) has(name string) string { return fmt.Sprint(statusOf(r.services["default/"+name])) }

// pending returns the annotation of the ledger.
func (r *refusing) pending() string {
	return r.leases["steelyard-addresses"].Annotations[ledgerPending]
}

// The API server refuses the status of one Service, whose write the previous leader had recorded. All other Services
// get their addresses, including later ones. The Service's owner is told, and the Service gets an address when the
// cause is gone.
func TestRefusedService(t *testing.T) {
	for _, answer := range refusals {
		synctest.Test(t, func(t *testing.T) {
			r := newRefusing(t)
			r.add("refused")
			r.add("other")
			s := r.services["default/refused"]
			text, _ := json.Marshal([]intent{{
				Service: nameOf(s), UID: string(s.UID), Version: s.ResourceVersion, Addresses: []string{"203.0.113.1"},
			}})
			r.leases["steelyard-addresses"] = &coordination.Lease{ObjectMeta: meta.ObjectMeta{
				Name: "steelyard-addresses", Namespace: "steelyard", ResourceVersion: "1",
				Annotations: map[string]string{ledgerPending: string(text)},
			}}
			r.refused["default/refused"] = answer
			r.lead(10 * time.Minute)
			r.add("later")
			r.lead(10 * time.Minute)
			others := []string{r.has("refused"), r.has("other"), r.has("later")}
			// The previous leader's write may still be applied, so its address is not assigned to another Service.
			if want := []string{"[]", "[203.0.113.2]", "[203.0.113.3]"}; !slices.Equal(others, want) {
				t.Errorf("%d %s: the addresses are %v; want %v", answer.Code, answer.Message, others, want)
			}
			close(r.events.Events)
			told := false
			for e := range r.events.Events {
				told = told || strings.Contains(e, "Warning StatusRefused") && strings.Contains(e, answer.Message)
			}
			r.events.Events = make(chan string, 100)
			must.True(t, told, "%d %s: no Event says so", answer.Code, answer.Message)
			clear(r.refused)
			if r.lead(2 * time.Minute); r.has("refused") != "[203.0.113.1]" {
				t.Errorf("%d %s: addresses %s after the cause is gone", answer.Code, answer.Message, r.has("refused"))
			}
		})
	}
}

// Many Services whose status is refused neither fill the ledger nor keep others from getting an address, and get
// theirs soon after the cause is gone.
func TestManyRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRefusing(t)
		const many = 60
		for i := range many {
			name := fmt.Sprintf("%s-%04d", strings.Repeat("x", 50), i)
			r.add(name)
			r.refused["default/"+name] = refusals[0]
		}
		for range 3 {
			r.lead(2 * time.Minute)
		}
		n := len(r.pending())
		must.True(t, n <= 8<<10, "the ledger has %d bytes; want the %d writes under way at most", n, workers)
		r.add("innocent")
		r.lead(time.Minute)
		must.True(t, r.has("innocent") != "[]", "a Service that is not refused has no address")
		clear(r.refused)
		r.lead(2 * time.Minute)
		without := 0
		for _, s := range r.services {
			if len(statusOf(s)) == 0 {
				without++
			}
		}
		must.True(t, without == 0,
			"%d of %d Services have no address two minutes after the cause is gone", without, many)
	})
}

// The effect of a refusal on the ledger depends on the writes before it: a write with an unknown outcome may still be
// applied.
func TestLedgerAfterRefusal(t *testing.T) {
	s := wanting("web", same)
	forbidden := &apierrors.StatusError{ErrStatus: refusals[0]}
	conflict := apierrors.NewConflict(coordination.Resource("services"), "web", errTest)
	timeout := apierrors.NewTimeoutError("x", 1)
	unauthorized := apierrors.NewUnauthorized("x")
	for name, tt := range map[string]struct {
		failures []error
		want     string // what is pending
	}{
		"refused":                   {[]error{forbidden}, "[]"},
		"refused twice":             {[]error{forbidden, forbidden}, "[]"},
		"lost":                      {[]error{errTest}, "[203.0.113.1]"},
		"timed out":                 {[]error{timeout}, "[203.0.113.1]"},
		"unauthorized":              {[]error{unauthorized}, "[203.0.113.1]"},
		"conflict":                  {[]error{conflict}, "[]"},
		"lost, then refused":        {[]error{errTest, forbidden}, "[203.0.113.1]"},
		"lost twice":                {[]error{errTest, errTest}, "[203.0.113.2 203.0.113.1]"},
		"lost twice, then refused":  {[]error{errTest, errTest, forbidden}, "[203.0.113.2 203.0.113.1]"},
		"lost, then conflict":       {[]error{errTest, conflict}, "[]"},
		"refused, then lost":        {[]error{forbidden, errTest}, "[203.0.113.2]"},
		"lost, refused, lost again": {[]error{errTest, forbidden, errTest}, "[203.0.113.3 203.0.113.1]"},
	} {
		term, _, _ := testTerm(t)
		for i, err := range tt.failures {
			addrs := []string{fmt.Sprint("203.0.113.", i+1)}
			intent := intent{Service: nameOf(s), UID: string(s.UID), Version: s.ResourceVersion, Addresses: addrs}
			must.Do(t, term.ledger.record(t.Context(), intent))
			term.failed(t.Context(), s, err)
		}
		must.Row(t, name+": is pending", tt.want, fmt.Sprint(term.ledger.pendingFor(s).addrs))
	}
}

// If a policy refuses only the addresses, the condition says why there are none. It is written once.
func TestRefusedCondition(t *testing.T) {
	term, client, events := testTerm(t, wanting("web", same))
	client.PrependReactor("patch", "services", func(a k8stest.Action) (bool, runtime.Object, error) {
		if strings.Contains(string(a.(k8stest.PatchAction).GetPatch()), "loadBalancer") {
			return true, nil, &apierrors.StatusError{ErrStatus: refusals[0]}
		}
		return false, nil, nil
	})
	for range 3 {
		err := term.reconcile(t.Context(), webName)
		must.True(t, err != nil, "no error")
		s := must.Get(client.CoreV1().Services("default").Get(t.Context(), "web", meta.GetOptions{}))(t)
		c := assignedCondition(s)
		must.Need(t, c != nil && c.Reason == "StatusRefused" && strings.Contains(c.Message, refusals[0].Message),
			"the condition is %+v", c)
		term.services.Update(s)
	}
	conditions := 0
	for _, p := range patches(client) {
		if !strings.Contains(p, "loadBalancer") {
			conditions++
		}
	}
	must.True(t, conditions == 1 && len(events.Events) == 1,
		"%d conditions written, %d Events; want one each", conditions, len(events.Events))
	// After another reason it is written again, because otherwise the condition would keep that reason.
	api := client.CoreV1().Services("default")
	for _, step := range []struct{ pool, want string }{{"x", reasonFailed}, {"", reasonRefused}} {
		s := must.Get(api.Get(t.Context(), "web", meta.GetOptions{}))(t)
		s.Annotations = map[string]string{wantPool[0]: step.pool}
		s = must.Get(api.Update(t.Context(), s, meta.UpdateOptions{}))(t)
		term.services.Update(s)
		err := term.reconcile(t.Context(), webName)
		must.True(t, (err != nil) == (step.want == reasonRefused), "pool %q: %v", step.pool, err)
		s = must.Get(api.Get(t.Context(), "web", meta.GetOptions{}))(t)
		c := assignedCondition(s)
		must.True(t, c != nil && c.Reason == step.want,
			"pool %q: the condition is %+v; want %s", step.pool, c, step.want)
	}
}

// When too many writes have an unknown outcome, no further Service gets an address until some outcomes are known.
// Services that are already in the ledger are tried again.
func TestLedgerFull(t *testing.T) {
	var problem error
	term, client, _ := testTerm(t)
	term.o.Problem = func(err error) { problem = err }
	change := func(i int) intent {
		name := fmt.Sprintf("default/%s-%04d", strings.Repeat("x", 50), i)
		return intent{Service: name, Version: "7", Addresses: []string{"203.0.113.1"}}
	}
	add := func(i int) error { return term.ledger.record(t.Context(), change(i)) }
	for i := range workers {
		large := change(i)
		large.Ports = []string{strings.Repeat("65535/SCTP, ", sharedPortsMax)}
		err := term.ledger.record(t.Context(), large)
		must.Need(t, err == nil, "the largest of %d workers: %v", i+1, err)
	}
	clear(term.ledger.pending)
	one, err := json.Marshal(change(0))
	n := 0
	for ; n < ledgerMax/len(one)-20; n++ { // each further one stores all of them
		term.ledger.pending[change(n).Service] = change(n)
	}
	for ; err == nil && n < 10_000; n++ {
		err = add(n)
	}
	stored := term.ledger.object.Annotations[ledgerPending]
	must.Need(t, n >= 500 && err != nil && len(stored) <= 250<<10,
		"%d intents, %d bytes: %v; want a limit below that of the API server", n, len(stored), err)
	if term.setFull(err); problem == nil || !strings.Contains(problem.Error(), "steelyard-addresses") {
		t.Errorf("the status has the problem %v", problem)
	}
	must.Row(t, "one that is pending", nil, add(0))
	for i := range 10 {
		term.ledger.done(fmt.Sprintf("default/%s-%04d", strings.Repeat("x", 50), i))
	}
	s := wanting("web", same)
	term.services.Add(s)
	must.Do(t, client.Tracker().Add(s))
	err = term.reconcile(t.Context(), webName)
	must.True(t, err == nil && problem == nil, "with room again: %v, and the status has the problem %v", err, problem)
}
