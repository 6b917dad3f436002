package lb

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// routesFixture has routes whose log is kept, and VIPs that the datapath serves.
type routesFixture struct {
	*routes
	log strings.Builder
	now time.Time
}

func newRoutesFixture(served ...netip.Addr) *routesFixture {
	fx := &routesFixture{now: testStart}
	vips := &vipTable{byAddr: map[vipKey]*vip{}}
	for _, addr := range served {
		*vips.get(addr) = vip{addr: addr, wanted: 1, held: 1, serving: 1, datapath: Known{Done: true}}
	}
	plain := &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}
	fx.routes = newRoutes(vips, time.Second, slog.New(slog.NewTextHandler(&fx.log, plain)))
	return fx
}

// logged returns what was logged since the last call.
func (fx *routesFixture) logged() string {
	defer fx.log.Reset()
	return fx.log.String()
}

// wantLog fails the test unless these lines were logged since the last call.
func (fx *routesFixture) wantLog(t *testing.T, want string) {
	t.Helper()
	must.Equal(t, want, fx.logged())
}

// put makes a service claim VIPs with this number of healthy backends; 0 gives a reason not to announce.
func (fx *routesFixture) put(name string, healthy int, by []AnnouncerKind, vips ...netip.Addr) *Plan {
	p := &Plan{Service: &Service{Name: name, Announce: by}}
	for _, v := range vips {
		plan := VIPPlan{VIP: v, Healthy: healthy}
		if healthy == 0 {
			plan.Reason = "no backend of " + name
		}
		p.VIPs = append(p.VIPs, plan)
	}
	fx.adopt(nil, p)
	return p
}

// step takes the next set, which must be want ("VIP*weight[announcers]"), and completes it.
func (fx *routesFixture) step(t *testing.T, want string, err error) {
	t.Helper()
	set, ok := fx.next(fx.now)
	got := []string{}
	for _, a := range set {
		got = append(got, fmt.Sprintf("%s*%d%v", a.VIP, a.Weight, a.By))
	}
	text := strings.Join(got, " ")
	must.Need(t, text == want && ok, "set %q, %t; want %q", text, ok, want)
	_, ok = fx.next(fx.now)
	must.Need(t, !ok, "a second set while a call is in flight")
	fx.complete(err, fx.now)
}

func (fx *routesFixture) none(t *testing.T) {
	t.Helper()
	set, ok := fx.next(fx.now)
	must.True(t, !ok, "set %v; want none", set)
}

// The route of a VIP is logged when it changes, not with every call.
func TestRoutesLogChanges(t *testing.T) {
	fx := newRoutesFixture(testVIP, testVIP6)
	fx.step(t, "", nil)
	fx.wantLog(t, "")
	plan := fx.put("web", 1, nil, testVIP)
	fx.step(t, "203.0.113.10*1[]", nil)
	fx.wantLog(t, "level=INFO msg=\"route announced\" vip=203.0.113.10 services=web\n")
	fx.none(t)
	fx.put("web", 2, nil, testVIP)
	fx.step(t, "203.0.113.10*2[]", nil)
	fx.wantLog(t, "")
	since := fx.status(testVIP).Since
	fx.now = fx.now.Add(time.Minute)
	fx.adopt(plan, nil)
	fx.step(t, "", nil)
	fx.wantLog(t, "level=WARN msg=\"route withdrawn\" vip=203.0.113.10 services=\"\" reason=\"no service has it\"\n")
	must.True(t, since.Equal(testStart) && len(fx.since) == 0,
		"announced since %s, then kept %v; want %s, nothing", since, fx.since, testStart)
}

// The first set after a start also logs the routes that an earlier run announced.
func TestFirstRoutesAreLogged(t *testing.T) {
	for healthy, tt := range []struct{ set, log string }{
		{"", "level=WARN msg=\"route withdrawn\" vip=203.0.113.10 services=web reason=\"no backend of web\"\n"},
		{"203.0.113.10*1[]", "level=INFO msg=\"route announced\" vip=203.0.113.10 services=web\n"},
	} {
		fx := newRoutesFixture(testVIP)
		fx.vips.get(testVIP).announce.Done = true
		fx.put("web", healthy, nil, testVIP)
		fx.step(t, tt.set, nil)
		fx.wantLog(t, tt.log)
	}
}

// After an error a VIP counts as announced if it was before or may be now, nothing is logged as announced, and the set
// is retried after Retry, which doubles.
func TestRoutesAfterErrors(t *testing.T) {
	fx := newRoutesFixture(testVIP, testVIP6)
	fx.put("web", 1, nil, testVIP)
	fx.step(t, "203.0.113.10*1[]", nil)
	fx.logged()
	fx.put("web", 0, nil, testVIP)
	fx.put("six", 1, nil, testVIP6)
	for _, delay := range []time.Duration{1, 2, 4, 8, 16, 32, 32} {
		fx.step(t, "2001:db8::10*1[]", errTest)
		fx.wantLog(t, "level=ERROR msg=\"could not update all routes\" err=injected\n")
		for _, addr := range []netip.Addr{testVIP, testVIP6} {
			k := fx.vips.get(addr).announce
			must.True(t, k.Maybe() && !k.Busy, "%s: %+v; want it to count as announced", addr, k)
		}
		got := fx.status(testVIP6)
		must.True(t, !got.Announced && got.Reason == "injected", "status %+v; want the error", got)
		must.Equal(t, delay*time.Second, fx.retryAt.Sub(fx.now))
		fx.now = fx.retryAt.Add(-1)
		fx.none(t)
		fx.now = fx.retryAt
	}
	fx.step(t, "2001:db8::10*1[]", nil)
	must.True(t, !fx.vips.get(testVIP).announce.Maybe() && fx.vips.get(testVIP6).announce.Surely(),
		"after the call succeeded: want the first VIP withdrawn, the second announced")
	if got := fx.status(testVIP6); !got.Announced || got.Reason != "" || !fx.retryAt.IsZero() {
		t.Errorf("status %+v, retry at %s; want announced and no retry", got, fx.retryAt)
	}
}

// The weight of a VIP is the sum over its healthy services, and each of their announcers announces it.
func TestRoutesOfSeveralServices(t *testing.T) {
	bgp, l2 := []AnnouncerKind{AnnounceBGP}, []AnnouncerKind{AnnounceL2}
	fx := newRoutesFixture(testVIP)
	fx.put("a", 2, l2, testVIP)
	b := fx.put("b", 3, bgp, testVIP)
	fx.put("c", 0, nil, testVIP)
	fx.step(t, "203.0.113.10*5[bgp l2]", nil)
	got := fx.status(testVIP)
	must.True(t, slices.Equal(got.Services, []string{"a", "b", "c"}) &&
		slices.Equal(got.By, []AnnouncerKind{"bgp", "l2"}), "status %+v; want three services, bgp and l2", got)
	fx.adopt(b, nil)
	fx.step(t, "203.0.113.10*2[l2]", nil)
	fx.put("d", 1, l2, testVIP)
	fx.step(t, "203.0.113.10*3[l2]", nil)
	fx.put("e", 1, nil, testVIP)
	fx.step(t, "203.0.113.10*4[]", nil)
}

func TestRouteReasons(t *testing.T) {
	fx := newRoutesFixture(testVIP)
	wantReason := func(vip netip.Addr, want string) {
		t.Helper()
		must.Equal(t, want, fx.status(vip).Reason)
	}
	wantReason(testVIP, "no service has it")
	fx.put("web", 1, nil, testVIP)
	wantReason(testVIP, "not yet")
	fx.put("six", 1, nil, testVIP6)
	wantReason(testVIP6, "no backend in the datapath yet")
	fx.put("six", 0, nil, testVIP6)
	wantReason(testVIP6, "no backend of six")
}

// An address is announced with a lower preference when every service that announces it wants that.
func TestLowerPreference(t *testing.T) {
	for _, tt := range []struct {
		lower []string // of each service that has the address
		want  bool
	}{{[]string{""}, false}, {[]string{"p"}, true}, {[]string{"p", ""}, false}, {[]string{"p", "q"}, true}} {
		r := newRoutes(&vipTable{byAddr: map[vipKey]*vip{}}, 0, slog.New(slog.DiscardHandler))
		v := r.vips.get(testVIP)
		v.wanted, v.datapath.Done = 1, true
		for i, lower := range tt.lower {
			plan := VIPPlan{VIP: testVIP, Healthy: 1, LowerPreference: lower}
			r.adopt(nil, &Plan{Service: &Service{Name: string(rune('a' + i))}, VIPs: []VIPPlan{plan}})
		}
		set, ok := r.next(time.Now())
		must.True(t, ok && len(set) == 1 && set[0].LowerPreference == tt.want,
			"%q: %+v; want %t", tt.lower, set, tt.want)
		r.complete(nil, time.Now())
		reason := ""
		if tt.want {
			reason = "with a lower preference: p"
		}
		st := r.status(testVIP)
		must.True(t, st.Announced && st.Reason == reason, "%q: status %+v", tt.lower, st)
	}
}

func TestAnnouncementEqual(t *testing.T) {
	bgp := []AnnouncerKind{AnnounceBGP}
	a := Announcement{By: bgp}
	must.True(t, a.equal(Announcement{By: []AnnouncerKind{AnnounceBGP}}), "the same announcement differs")
	for _, b := range []Announcement{
		{}, {By: []AnnouncerKind{AnnounceL2}}, {By: bgp, VIP: testVIP}, {By: bgp, Weight: 1},
		{By: bgp, LowerPreference: true}, {By: bgp, Local: true}, {By: bgp, Apart: addrs("192.0.2.1")},
		{By: bgp, Movable: true},
	} {
		must.True(t, !a.equal(b), "%+v equals %+v", b, a)
	}
}

// An error for one VIP affects only that VIP: others are announced and logged, and its state shows the error.
func TestRoutesAfterErrorsOfVIPs(t *testing.T) {
	fx := newRoutesFixture(testVIP, testVIP6)
	fx.put("web", 1, nil, testVIP)
	fx.put("six", 1, nil, testVIP6)
	fx.step(t, "203.0.113.10*1[] 2001:db8::10*1[]", VIPErrors{testVIP6: errTest})
	fx.logged()
	got := fx.status(testVIP)
	must.True(t, got.Announced, "status %+v; want announced", got)
	got = fx.status(testVIP6)
	must.True(t, !got.Announced && got.Reason == "injected", "status %+v; want the error", got)
	four, six := fx.vips.get(testVIP).announce, fx.vips.get(testVIP6).announce
	must.True(t, four.Surely() && six.Maybe(), "known: %+v, %+v", four, six)

	// A VIP whose withdrawal fails stays announced; the other VIP is not affected.
	fx.put("web", 0, nil, testVIP)
	fx.put("six", 0, nil, testVIP6)
	fx.step(t, "", VIPErrors{testVIP: errTest})
	must.True(t, fx.vips.get(testVIP).announce.Maybe() && !fx.vips.get(testVIP6).announce.Maybe(),
		"want the first VIP announced, the second withdrawn")
	got = fx.status(testVIP)
	must.True(t, got.Announced, "status %+v; want announced", got)
	fx.now = fx.retryAt
	fx.step(t, "", nil)
	must.True(t, !fx.vips.get(testVIP).announce.Maybe(), "the withdrawal was not retried")
}

// A change does not wait for the retry of another one that failed.
func TestWithdrawalDoesNotWaitForARetry(t *testing.T) {
	fx := newRoutesFixture(testVIP, testVIP6)
	fx.put("web", 1, nil, testVIP)
	fx.put("six", 1, nil, testVIP6)
	for range 5 {
		fx.step(t, "203.0.113.10*1[] 2001:db8::10*1[]", VIPErrors{testVIP6: errTest})
		fx.none(t)
		fx.now = fx.retryAt
	}
	fx.step(t, "203.0.113.10*1[] 2001:db8::10*1[]", VIPErrors{testVIP6: errTest})
	fx.put("web", 0, nil, testVIP)
	fx.step(t, "2001:db8::10*1[]", VIPErrors{testVIP6: errTest}) // immediately
	must.True(t, !fx.vips.get(testVIP).announce.Maybe(), "the address is announced")
	fx.none(t)
}

// A VIP whose packets the datapath does not deliver is withdrawn, and announced again when it does.
func TestFaultsWithdraw(t *testing.T) {
	fx := newRoutesFixture(testVIP, testVIP6)
	fx.put("web", 1, nil, testVIP, testVIP6)
	fx.step(t, "203.0.113.10*1[] 2001:db8::10*1[]", nil)
	fx.logged()
	fx.faultsChanged(map[vipKey]string{testVIP: "eth0 is down"})
	fx.step(t, "2001:db8::10*1[]", nil)
	fx.wantLog(t, "level=WARN msg=\"route withdrawn\" vip=203.0.113.10 services=web reason=\"eth0 is down\"\n")
	s := fx.status(testVIP)
	must.True(t, !s.Announced && s.State == RouteWithheld && s.Reason == "eth0 is down", "status %+v", s)
	fx.faultsChanged(map[vipKey]string{testVIP: ""})
	fx.step(t, "203.0.113.10*1[] 2001:db8::10*1[]", nil)
	s = fx.status(testVIP)
	must.True(t, s.State == RouteAnnounced && len(fx.faults) == 0, "status %+v, faults %v", s, fx.faults)
}

// A route that nobody receives is offered and not announced, and its services say so.
func TestMarkOffered(t *testing.T) {
	s := Status{
		Routes: []RouteStatus{
			{Address: testVIP, Announced: true, State: RouteAnnounced},
			{Address: testVIP6, State: RouteWithheld, Reason: "drained"},
		},
		Services: []ServiceStatus{{Address: testVIP, Announced: true}, {Address: testVIP6, Reason: "drained"}},
	}
	s.MarkOffered(func(r RouteStatus) string { return "no peer" })
	r := s.Routes[0]
	must.True(t, !r.Announced && r.State == RouteOffered && r.Reason == "no peer", "route %+v", r)
	r = s.Routes[1]
	must.True(t, r.State == RouteWithheld && r.Reason == "drained", "withdrawn route %+v", r)
	x := s.Services
	must.True(t, !x[0].Announced && x[0].Reason == "no peer" && x[1].Reason == "drained", "services %+v", x)
}
