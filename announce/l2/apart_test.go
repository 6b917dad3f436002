package l2

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/announce/l2/members"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// apart announces VIPs that different nodes should have.
func (h *host) apart(vips ...netip.Addr) {
	h.t.Helper()
	var list []lb.Announcement
	for _, vip := range vips {
		list = append(list, lb.Announcement{VIP: vip, Apart: vips, Movable: h.movable})
	}
	must.Do(h.t, h.a.Set(h.t.Context(), list))
}

// owners counts the VIPs of each host.
func (x *segment) owners(vips ...netip.Addr) map[string]int {
	x.t.Helper()
	count := map[string]int{}
	for _, vip := range vips {
		count[x.owner(vip).name()]++
	}
	return count
}

// Each node has one of as many VIPs. When one fails its VIP moves, and no other one does; a node that joins gets the
// VIP that comes with it.
func TestApart(t *testing.T) {
	for n := range 20 { // the hashes of most lists would give one node two
		vips := make([]netip.Addr, 4)
		for i := range vips {
			vips[i] = netip.AddrFrom4([4]byte{203, 0, 113, byte(10*n + i)})
		}
		synctest.Test(t, func(t *testing.T) {
			x := newSegment(t, 4)
			x.run()
			late := x.hosts[3]
			x.change(func() { late.down = true })
			for _, h := range x.hosts[:3] {
				h.apart(vips[:3]...)
			}
			x.pass(time.Second)
			if got := x.owners(vips[:3]...); len(got) != 3 {
				t.Fatalf("owners of %v: %v", vips[:3], got)
			}
			before := map[netip.Addr]*host{}
			for _, vip := range vips[:3] {
				before[vip] = x.owner(vip)
			}
			x.change(func() { late.down = false })
			for _, h := range x.hosts {
				h.apart(vips...)
			}
			x.pass(time.Second)
			if got := x.owners(vips...); len(got) != 4 {
				t.Fatalf("owners of %v: %v", vips, got)
			}
			failed := x.hosts[0]
			x.change(func() { failed.down = true })
			x.pass(time.Second)
			for _, vip := range vips[:3] {
				if o := x.owner(vip); o != before[vip] && before[vip] != failed {
					t.Errorf("%s moved from %s to %s", vip, before[vip].name(), o.name())
				}
			}
			if got := x.owners(vips...); len(got) != 3 {
				t.Errorf("owners of %v after a failure: %v", vips, got)
			}
		})
	}
}

// Whatever the members have and can serve, each VIP has one node, what one has it keeps, and none of the others goes to
// a node with more VIPs than another one that can serve it.
func TestElectApart(t *testing.T) {
	rng := rand.New(rand.NewPCG(12, 12))
	for range 1000 {
		nodes, vips := 1+rng.IntN(6), make([]netip.Addr, 1+rng.IntN(6))
		claims := map[netip.Addr][]members.Peer{}
		for i := range vips {
			vips[i] = netip.AddrFrom4([4]byte{203, 0, byte(rng.IntN(256)), byte(i)})
		}
		slices.SortFunc(vips, netip.Addr.Compare)
		for _, vip := range vips {
			for n := range nodes {
				c := members.Claim{Eligible: rng.IntN(4) > 0, Holds: rng.IntN(4) == 0, Local: rng.IntN(2) == 0}
				node := netip.AddrFrom4([4]byte{192, 0, 2, byte(n)})
				claims[vip] = append(claims[vip], members.Peer{Address: node, Alive: rng.IntN(8) > 0, Claim: c})
			}
		}
		view := func(vip netip.Addr) []members.Peer { return slices.Clone(claims[vip]) }
		count, free := map[netip.Addr]int{}, map[netip.Addr]netip.Addr{}
		for _, vip := range vips {
			plain, any := elect(vip, view(vip))
			got, ok := electApart(vip, vips, view)
			if ok != any || any && plain.Claim.Holds && got != plain || ok && !(got.Alive && got.Claim.Eligible) {
				t.Fatalf("%s: %+v, %t; want %+v, %t", vip, got, ok, plain, any)
			}
			if ok {
				count[got.Address]++
			}
			if ok && !got.Claim.Holds {
				free[vip] = got.Address
			}
		}
		for vip, node := range free {
			for _, p := range claims[vip] {
				if p.Alive && p.Claim.Eligible && count[p.Address]+1 < count[node] && len(free) == 1 {
					t.Fatalf("%s: %s has %d, and %s %d", vip, node, count[node], p.Address, count[p.Address])
				}
			}
		}
	}
}

// A member that returns gets a VIP of the one that has two, once it has been there for a while, if connections survive
// that. Until it has the VIP, the other one replies. Nothing else moves.
func TestReturnBalances(t *testing.T) {
	for _, movable := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			x := newSegment(t, 3)
			vips := shared[:3]
			x.run()
			for _, h := range x.hosts {
				h.movable = movable
				h.apart(vips...)
			}
			x.pass(time.Second)
			back := x.hosts[0]
			x.change(func() { back.down = true })
			x.pass(time.Second)
			x.change(func() { back.down, back.since = false, time.Now() })
			x.pass(balanceAfter - 2*time.Second)
			before := x.owners(vips...)
			if len(before) != 2 {
				t.Fatalf("before the time is over: %v", before)
			}
			keeps := map[netip.Addr]*host{}
			for _, vip := range vips {
				if o := x.owner(vip); before[o.name()] == 1 {
					keeps[vip] = o
				}
			}
			for range 20 * time.Second / (10 * time.Millisecond) {
				x.pass(10 * time.Millisecond)
				for _, vip := range vips { // with two for a moment, the earlier one says so to probes no more
					if !slices.ContainsFunc(x.hosts, func(h *host) bool { return h.owns(vip) }) {
						t.Fatalf("nobody replies for %s", vip)
					}
				}
			}
			after := x.owners(vips...)
			if want := 2 + count(movable); len(after) != want {
				t.Errorf("movable %t: %v", movable, after)
			}
			for vip, h := range keeps {
				if x.owner(vip) != h {
					t.Errorf("%s moved from %s", vip, h.name())
				}
			}
		})
	}
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

// What is to move and finds no other node stays, and so does what is claimed again meanwhile.
func TestMoveFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newSegment(t, 2)
		vips := shared[:2]
		x.run()
		only, late := x.hosts[0], x.hosts[1]
		x.change(func() { late.down, only.movable = true, true })
		only.apart(vips...)
		x.pass(time.Second)
		// The other one can serve them, as it says, and takes none.
		x.change(func() {
			late.down, late.since = false, time.Now().Add(-time.Hour)
			late.claims = map[netip.Addr]members.Claim{vips[0]: {Eligible: true}, vips[1]: {Eligible: true}}
		})
		leaving := func() int {
			only.a.mu.Lock()
			defer only.a.mu.Unlock()
			return len(only.a.leaving)
		}
		tried := false
		for range 3000 {
			x.pass(5 * time.Millisecond)
			tried = tried || leaving() > 0
			if !only.owns(vips[0]) || !only.owns(vips[1]) {
				t.Fatalf("it has %v", only.a.all())
			}
		}
		if !tried {
			t.Fatal("no VIP was to move")
		}
		for leaving() == 0 {
			x.pass(5 * time.Millisecond)
		}
		x.change(func() { late.down = true })
		only.a.reclaim()
		x.pass(5 * time.Second)
		if n := leaving(); n > 0 || !only.owns(vips[0]) || !only.owns(vips[1]) {
			t.Errorf("it has %v, and leaves %d", only.a.all(), n)
		}
	})
}
