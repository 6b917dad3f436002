package lb

import "testing"

// A VIP whose packets the datapath does not deliver is withdrawn, and announced again when it does.
func TestFaultsWithdraw(t *testing.T) {
	fx := newRoutesFixture(testVIP, testVIP6)
	fx.put("web", 1, nil, testVIP, testVIP6)
	fx.step(t, "203.0.113.10*1[] 2001:db8::10*1[]", nil)
	fx.logged()
	fx.faultsChanged(map[vipKey]string{testVIP: "eth0 is down"})
	fx.step(t, "2001:db8::10*1[]", nil)
	want := "msg=\"route withdrawn\" vip=203.0.113.10 reason=\"eth0 is down\"\n"
	if got := fx.logged(); got != want {
		t.Errorf("logged %q; want %q", got, want)
	}
	if s := fx.status(testVIP); s.Announced || s.State != RouteWithheld || s.Reason != "eth0 is down" {
		t.Errorf("status %+v", s)
	}
	fx.faultsChanged(map[vipKey]string{testVIP: ""})
	fx.step(t, "203.0.113.10*1[] 2001:db8::10*1[]", nil)
	if s := fx.status(testVIP); s.State != RouteAnnounced || len(fx.faults) > 0 {
		t.Errorf("status %+v, faults %v", s, fx.faults)
	}
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
	if r := s.Routes[0]; r.Announced || r.State != RouteOffered || r.Reason != "no peer" {
		t.Errorf("route %+v", r)
	}
	if r := s.Routes[1]; r.State != RouteWithheld || r.Reason != "drained" {
		t.Errorf("withdrawn route %+v", r)
	}
	if x := s.Services; x[0].Announced || x[0].Reason != "no peer" || x[1].Reason != "drained" {
		t.Errorf("services %+v", x)
	}
}
