package lb

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func targets(weights ...int) []Target {
	out := make([]Target, len(weights))
	for i, w := range weights {
		addr := netip.AddrFrom4([4]byte{10, 0, byte(i / 256), byte(i % 256)})
		out[i] = Target{Addr: netip.AddrPortFrom(addr, 80), Weight: w}
	}
	return out
}

func equalWeights(n int) []Target { return targets(slices.Repeat([]int{1}, n)...) }

func shares(table []uint16, n int) []int {
	count := make([]int, n)
	for _, t := range table {
		count[t]++
	}
	return count
}

// With source-hash, a client reaches the same server through all ports. Servers with one address stay different.
func TestSourceHashIgnoresPorts(t *testing.T) {
	ts := equalWeights(5)
	other := slices.Clone(ts)
	for i, x := range ts {
		other[i].Addr = netip.AddrPortFrom(x.Addr.Addr(), 443)
	}
	must.Equal(t, tableFor(AlgorithmSourceHash, ts, true), tableFor(AlgorithmSourceHash, other, true))
	other[1].Addr = netip.AddrPortFrom(ts[0].Addr.Addr(), 444)
	for i, n := range shares(tableFor(AlgorithmSourceHash, other, true), 5) {
		must.True(t, n > 0, "target %d has no slot", i)
	}
}

// With source-hash, a client address keeps its node, and there its pod.
func TestNodesBySource(t *testing.T) {
	s := &Service{
		VIPs: []netip.Addr{netip.MustParseAddr("203.0.113.10")}, Algorithm: AlgorithmSourceHash, Method: MethodNAT,
		Ports: []ServicePort{{Port: Port{Port: 80, Target: 80, Protocol: TCP}}},
		Check: CheckSpec{Type: CheckNone}, NodeForwarding: NodeForwarding{Enabled: true},
	}
	for i, f := range Build(s, nil, Drains{}).Frontends {
		must.Row(t, fmt.Sprintf("frontend %d", i), AlgorithmSourceHash, f.Algorithm)
	}
}

// Every table function must give each target its share, and the same table each time.
func TestTablesGiveEveryTargetItsShare(t *testing.T) {
	sets := [][]Target{
		equalWeights(1), equalWeights(3), equalWeights(100), targets(1, 2, 3), targets(1, 1000), targets(7, 7),
	}
	for _, algorithm := range Algorithms {
		for _, ts := range sets {
			t.Run(fmt.Sprintf("%s/%d", algorithm, len(ts)), func(t *testing.T) {
				table := tableFor(algorithm, ts, true)
				must.Equal(t, tableFor(algorithm, ts, true), table)
				total := 0
				for _, x := range ts {
					total += x.Weight
				}
				for i, n := range shares(table, len(ts)) {
					want := float64(len(table)) * float64(ts[i].Weight) / float64(total)
					must.True(t, math.Abs(float64(n)-want) <= 2+want*0.02,
						"target %d has %d of %d slots; want about %.0f", i, n, len(table), want)
				}
			})
		}
	}
}

// When one of N targets is removed, its 1/N of the slots must move, and at most two per cent of the others.
func TestMaglevMovesLittle(t *testing.T) {
	for _, n := range []int{2, 3, 10, 100} {
		ts := equalWeights(n)
		size := TableSize(n)
		before := Maglev(ts, size)
		for _, gone := range []int{0, n / 2, n - 1} {
			after := Maglev(slices.Delete(slices.Clone(ts), gone, gone+1), size)
			moved := 0
			for slot, target := range before {
				now := int(after[slot])
				if now >= gone {
					now++
				}
				if int(target) != gone && now != int(target) {
					moved++
				}
			}
			if n > 2 && float64(moved) > 0.02*float64(size)+float64(size)/float64(n) {
				t.Errorf("%d targets, number %d leaves: %d of %d other slots moved", n, gone, moved, size)
			}
		}
	}
}

func TestTableSizesArePrimes(t *testing.T) {
	for _, size := range tablePrimes {
		for d := 2; d*d <= size; d++ {
			must.True(t, size%d != 0, "%d is %d × %d", size, d, size/d)
		}
	}
	for n, want := range map[int]int{1: 1009, 10: 1009, 11: 2039, 650: 65521, 5000: MaxTableSize} {
		must.Row(t, n, want, TableSize(n))
	}
}

func BenchmarkMaglev(b *testing.B) {
	for _, n := range []int{3, 100, 600} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			ts := equalWeights(n)
			for b.Loop() {
				Maglev(ts, TableSize(n))
			}
		})
	}
}

// Each algorithm fills a table, whatever weights nodes report.
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
						must.Need(t, int(slot) < len(f.Targets),
							"%s: a slot of target %d of %d", algorithm, slot, len(f.Targets))
					}
					if len(f.Targets) > 0 && len(table) == 0 {
						t.Fatalf("%s: no slots for %d targets", algorithm, len(f.Targets))
					}
				}
			}
		}
	})
}
