package lb

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A weight that is set applies to all ports of the server, until it is removed or the server's entry changes.
func TestSetWeight(t *testing.T) {
	one, two := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	s := &Service{Name: "web", Ports: PortsOn([]Backend{{Addr: one, Weight: 1}, {Addr: two, Weight: 1},
		{Addr: two, Port: 9000, Weight: 2}}, Port{Port: 80, Target: 8080})}
	target := DrainTarget{"web", two}
	d := Drains{}.WithWeight(target, 5).WithWeight(DrainTarget{"api", one}, 7).WithWeight(target, 0)
	for _, tt := range []struct {
		d    Drains
		want string
	}{
		{d, "[1 0 0]"}, {d.WithWeight(target, -1), "[1 1 2]"}, {d.WithWeight(target, MaxWeight), "[1 1000 1000]"},
	} {
		var got []int
		for _, b := range tt.d.applied(s).Ports[0].Backends {
			got = append(got, b.Weight)
		}
		must.Row(t, fmt.Sprint(tt.d), tt.want, fmt.Sprint(got))
	}
	must.Equal(t, []string{"7 for 192.0.2.1 of api", "0 for 192.0.2.2 of web"}, d.WeightNames())
	for object, ends := range map[string]string{
		"backend 192.0.2.2 of web":   "[~ backend 192.0.2.2 of web: weight no longer 0, set by the operator]",
		"backend 192.0.2.1 of web":   "[]",
		"backend 192.0.2.1:9 of api": "[~ backend 192.0.2.1 of api: weight no longer 7, set by the operator]",
	} {
		after, ended := d.After([]Change{{Op: Changed, Object: object}})
		must.Row(t, object, ends, fmt.Sprint(ended))
		must.Row(t, object+": left", 2-len(ended), len(after.Weights))
	}
}
