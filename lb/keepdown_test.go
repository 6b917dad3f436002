package lb

import (
	"fmt"
	"net/netip"
	"testing"
)

// With KeepDown, an unhealthy backend keeps its flows, including those that an earlier agent left, until it is deleted.
func TestKeepDown(t *testing.T) {
	all := []Backend{
		{Addr: netip.MustParseAddr("10.0.0.1"), Weight: 1}, {Addr: netip.MustParseAddr("10.0.0.2"), Weight: 1},
		{Addr: netip.MustParseAddr("10.0.0.3"), Weight: 1, Deleted: true},
	}
	s := &Service{
		Name: "web", VIPs: []netip.Addr{testVIP}, KeepDown: true, Check: CheckSpec{Type: CheckTCP},
		Ports: PortsOn(all, Port{Port: 80, Target: 80, Protocol: TCP}),
	}
	s.Ports[0].Kept = []netip.AddrPort{}
	for keep, want := range map[bool]string{
		true: "[10.0.0.1:80] [10.0.0.3:80]", false: "[] [10.0.0.1:80 10.0.0.3:80]",
	} {
		s.KeepDown = keep
		f := Build(s, states(s, "uhh"), Drains{}).Frontends[0]
		if got := fmt.Sprint(f.Kept, f.Down); got != want || len(f.Targets) != 1 {
			t.Errorf("KeepDown %t: kept and down %s, targets %v; want %s", keep, got, f.Targets, want)
		}
	}
}
