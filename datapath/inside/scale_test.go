package inside

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// BenchmarkChange measures how long a change of one Service takes beside 10,000 Services with two ports, both families,
// a node port and ten endpoints each, and how long all of them take.
func BenchmarkChange(b *testing.B) {
	l := must.Get(lab.New())(b)
	b.Cleanup(func() { must.Do(b, l.Close()) })
	h := labtest.Host(b, l, "node")
	must.Do(b, l.Link(lab.End{Host: h, Name: "eth0", Addresses: []netip.Prefix{
		netip.PrefixFrom(nodeV4, 24), netip.PrefixFrom(nodeV6, 64)}},
		lab.End{Host: labtest.Host(b, l, "other"), Name: "eth0"}, lab.LinkOptions{}))
	p := startProxy(b, h, "eth0")
	const services, endpoints = 10_000, 10
	rules := func(i, version int) (all []lb.NodeRule) {
		for port := range 2 {
			var four, six []netip.AddrPort
			for e := range endpoints {
				n, target := i*endpoints+e+version, uint16(8080+port)
				a4 := netip.AddrFrom4([4]byte{10, byte(128 + n>>16), byte(n >> 8), byte(n)})
				a6 := netip.MustParseAddr(fmt.Sprintf("fd00:244::%x:%x", n>>16, n&0xffff))
				four, six = append(four, netip.AddrPortFrom(a4, target)), append(six, netip.AddrPortFrom(a6, target))
			}
			name := fmt.Sprintf("test/s%d:p%d", i, port)
			v4, v6 := lb.NodeChoice{Endpoints: four}, lb.NodeChoice{Endpoints: six}
			number := uint16(80 + port)
			all = append(all,
				lb.NodeRule{Name: name, Addr: netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), Port: number,
					Protocol: lb.TCP, ClusterIP: true, Inside: v4},
				lb.NodeRule{Name: name, Addr: netip.MustParseAddr(fmt.Sprintf("fd00:96::%x", i+1)), Port: number,
					Protocol: lb.TCP, ClusterIP: true, Inside: v6},
				lb.NodeRule{Name: name, Addr: netip.IPv4Unspecified(), Port: uint16(20000 + 2*i + port),
					Protocol: lb.TCP, Inside: v4, Outside: &v4},
				lb.NodeRule{Name: name, Addr: netip.IPv6Unspecified(), Port: uint16(20000 + 2*i + port),
					Protocol: lb.TCP, Inside: v6, Outside: &v6})
		}
		return all
	}
	all := map[string][]lb.NodeRule{}
	for i := range services {
		all[fmt.Sprintf("test/s%d", i)] = rules(i, 0)
	}
	var took time.Duration
	p.call("Time", Change{all, true}, &took)
	b.ReportMetric(took.Seconds(), "s/all")
	for i := range b.N {
		n := i % services
		change := map[string][]lb.NodeRule{fmt.Sprintf("test/s%d", n): rules(n, 1+i/services)}
		p.call("Time", Change{change, false}, &took)
		b.ReportMetric(float64(took.Microseconds()), "µs/change")
	}
}
