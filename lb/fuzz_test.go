package lb

import (
	"math"
	"net/netip"
	"slices"
	"testing"
)

// Whatever weights nodes report, each algorithm makes a table of the targets.
func FuzzTables(f *testing.F) {
	f.Add([]byte{2, 3, 3}, uint64(math.MaxInt64)) // their sum is negative
	f.Add([]byte{0, 1, 4, 5, 6, 7, 255}, uint64(1)<<63)
	f.Add(slices.Repeat([]byte{3}, 30), uint64(1)<<40)
	f.Add([]byte{5, 6}, uint64(math.MaxUint32))
	f.Add(append(slices.Repeat([]byte{5}, 9), slices.Repeat([]byte{2}, 9)...), uint64(MaxWeight))
	f.Fuzz(func(t *testing.T, weights []byte, large uint64) {
		weights = weights[:min(len(weights), 32)]
		special := []int{0, -1, 1, int(large), math.MaxInt, MaxWeight, MaxWeight + 1, -int(large)}
		vip, states := netip.MustParseAddr("203.0.113.1"), map[CheckKey]Health{}
		for algorithm := range tableFuncs {
			s := &Service{Name: "s", VIPs: []netip.Addr{vip}, Algorithm: algorithm}
			s.Check.Type = CheckNodePort
			s.Ports = []ServicePort{{Port: Port{Port: 80}}}
			for i, w := range weights {
				b := Backend{Addr: netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), Port: 80, Weight: 1}
				b.Node = b.Addr
				s.Ports[0].Backends = append(s.Ports[0].Backends, b)
				states[keyOf(s, b, s.Ports[0].Port)] = Health{State: StateHealthy, Weight: special[int(w)%len(special)]}
			}
			for _, s.NodeForwarding.Enabled = range []bool{false, true} {
				for _, f := range Build(s, states, Drains{}).Frontends {
					table := f.Table()
					for _, slot := range table {
						if int(slot) >= len(f.Targets) {
							t.Fatalf("%s: a slot of target %d of %d", algorithm, slot, len(f.Targets))
						}
					}
					if len(f.Targets) > 0 && len(table) == 0 {
						t.Fatalf("%s: no slots for %d targets", algorithm, len(f.Targets))
					}
				}
			}
		}
	})
}
