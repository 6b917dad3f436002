package lb

import (
	"net/netip"
	"slices"
	"testing"
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
	if !slices.Equal(got.VIPs, []netip.Addr{free}) || len(got.Refused) != 1 || len(s.VIPs) != 2 {
		t.Errorf("%v without %v", got.VIPs, got.Refused)
	}
	if same := got.Refuse(taken); same != got {
		t.Error("a service was copied although it has no such address")
	}
	const reason = "refused: 192.0.2.11 is the address of eth0"
	out := Status{Routes: []RouteStatus{{Address: other}, {Address: free}}}
	out.addRefused(got)
	got.Name = "mail"
	out.addRefused(got)
	if len(out.Services) != 2 || out.Services[0].Address != own || out.Services[0].Reason != reason {
		t.Errorf("services %+v", out.Services)
	}
	if r := out.Routes[0]; len(out.Routes) != 3 || r.Address != own || r.Reason != reason || r.Announced ||
		!slices.Equal(r.Services, []string{"web", "mail"}) {
		t.Errorf("routes %+v", out.Routes)
	}
}
