package lb

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestRefuse(t *testing.T) {
	own, free := netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("203.0.113.10")
	other := netip.MustParseAddr("203.0.113.1")
	taken := func(a netip.Addr) string {
		if a == own {
			return "the address of eth0"
		}
		return ""
	}
	s := &Service{Name: "web", VIPs: []netip.Addr{own, free}, Ports: []ServicePort{{Port: Port{Port: 80}}}}
	got := s.Refuse(taken)
	must.True(t, slices.Equal(got.VIPs, []netip.Addr{free}) && len(got.Refused) == 1 && len(s.VIPs) == 2,
		"%v without %v", got.VIPs, got.Refused)
	same := got.Refuse(taken)
	must.True(t, same == got, "a service was copied although it has no such address")
	const reason = "refused: 192.0.2.11 is the address of eth0"
	out := Status{Routes: []RouteStatus{{Address: other}, {Address: free}}}
	mail, wide := *got, *got
	mail.Name, wide.Name = "mail", "wide"
	wide.Ports, wide.Refused = make([]ServicePort, 15_000), nil
	for i := range byte(100) {
		wide.Refused = append(wide.Refused, RefusedVIP{VIP: netip.AddrFrom4([4]byte{203, 0, 113, i + 100})})
	}
	out.addRefused([]*Service{got, &mail})
	many := Status{}
	many.addRefused([]*Service{&wide})
	must.True(t, len(many.Services) == 100 && len(many.Routes) == 100, "%d rows and %d routes of 100 addresses",
		len(many.Services), len(many.Routes))
	must.True(t, len(out.Services) == 2 && out.Services[0].Address == own && out.Services[0].Reason == reason,
		"services %+v", out.Services)
	r := out.Routes[0]
	must.True(t, len(out.Routes) == 3 && r.Address == own && r.Reason == reason && !r.Announced &&
		slices.Equal(r.Services, []string{"web", "mail"}), "routes %+v", out.Routes)
}

// refuse takes the next delta, which must be want, and refuses all of it.
func (d *datapathState) refuse(t *testing.T, now time.Time, want string) {
	t.Helper()
	delta, _ := d.next(now, true)
	must.Equal(t, want, deltaText(delta))
	errs := map[Frontend]error{}
	for _, f := range delta.Put {
		errs[f.Frontend] = fmt.Errorf("%w: no room", ErrRefused)
	}
	d.complete(delta, errs, now)
}

// A service that does not fit does not make the node count as behind, and is retried rarely.
func TestRefusedFrontend(t *testing.T) {
	d, now := newTestState(), testStart
	d.want(testPlan("large", 3, 80))
	d.refuse(t, now, "+80")
	d.step(t, now, "")
	must.True(t, d.behind.IsZero(), "behind since %v", d.behind)
	d.step(t, now.Add(refusedFactor*time.Second-1), "")
	d.refuse(t, now.Add(refusedFactor*time.Second), "+80")
	d.want(testPlan("other", 1, 81))
	d.step(t, now, "+81", 81)
	must.True(t, !d.behind.IsZero(), "not behind after another error")
	d.step(t, now.Add(time.Minute), "+80 +81")
	d.step(t, now.Add(time.Minute), "")
	must.True(t, d.behind.IsZero(), "behind since %v after success", d.behind)
}

// An applied frontend that grows too large keeps its targets, except those that fail.
func TestRefusedUpdateRemovesTargets(t *testing.T) {
	d, now := newTestState(), testStart
	first := testPlan("web", 3, 80)
	d.want(first)
	d.step(t, now, "+80")
	next := testPlan("web", 5, 80)
	next.Frontends[0].Targets = next.Frontends[0].Targets[1:] // the first one has failed
	d.want(next)
	d.refuse(t, now, "+80")
	d.step(t, now, "+80")
	if s := d.frontends[at(80)]; len(s.plan.Targets) != 2 || s.plan.Targets[0] != first.Frontends[0].Targets[1] {
		t.Errorf("targets %v; want the two that work", s.plan.Targets)
	}
	if d.step(t, now, ""); !d.behind.IsZero() || d.reason(at(80)) == "" {
		t.Errorf("behind since %v, reason %q; want a reason only", d.behind, d.reason(at(80)))
	}
	d.step(t, now.Add(time.Minute), "+80")
	s := d.frontends[at(80)]
	must.True(t, s.plan == s.want, "not as wanted when there is room")
	d.step(t, now.Add(time.Minute), "")
	restricted := testPlan("web", 5, 80)
	restricted.Frontends[0].Allow = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	restricted.Frontends[0].Needs.Sources = 1
	d.want(restricted)
	d.refuse(t, now.Add(time.Minute), "+80")
	f := d.frontends[at(80)].fitting()
	must.True(t, f == nil, "a change without the refused sources: %+v", f)
}

// Few of many elements are sorted, because the engine repeatedly finds the next frontends among 100,000.
func TestSmallest(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for _, size := range []int{0, 1, 2048, 2049, 2050, 4098, 100_000} {
		all := rnd.Perm(size)
		compared := 0
		got := smallest(all, 2049, func(a, b int) int { compared++; return cmp.Compare(a/2, b/2) })
		for i, x := range got {
			must.True(t, x/2 == i/2, "of %d: element %d is %d", size, i, x)
		}
		must.Equal(t, min(size, 2049), len(got))
		must.True(t, size < 100_000 || compared < 5*size, "of %d: %d comparisons", size, compared)
	}
}

// One call puts a bounded number of targets: updates first, then small services. The node is not behind while calls put
// something.
func TestSlices(t *testing.T) {
	d, now := newTestState(), testStart
	plan := func(name string, needs int, ports ...uint16) *Plan {
		p := testPlan(name, sliceTargets/2, ports...)
		for _, f := range p.Frontends {
			f.Needs.Backends = needs
		}
		return p
	}
	d.want(plan("updated", 9, 70))
	d.step(t, now, "+70")
	d.want(plan("large", 8, 80, 81, 82))
	d.want(plan("small", 1, 83))
	update := plan("updated", 9, 70)
	update.Frontends[0].Targets = equalWeights(3)
	d.want(update)
	d.step(t, now, "+70 +83")
	d.step(t, now, "+80")
	must.True(t, !d.behind.IsZero(), "not behind while targets are left")
	d.step(t, now.Add(time.Minute), "+81")
	d.step(t, now.Add(2*time.Minute), "+82")
	must.Row(t, "behind since the last call that put something", time.Minute, d.behind.Sub(now))
	d.step(t, now, "")
	must.True(t, d.behind.IsZero(), "behind since %v", d.behind)
}
