package l2

import (
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/announce/l2/members"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Each VIP has one owner. If the owner fails or leaves, another node takes over, and nothing moves back.
func TestOneOwner(t *testing.T) {
	onSegment(t, 3, func(t *testing.T, x *segment) {
		x.set(shared...)
		x.pass(time.Second)
		owners := map[string]int{}
		for _, vip := range shared {
			owners[x.owner(vip).name()]++
		}
		must.True(t, len(owners) >= 2, "owners %v", owners)
		vip := shared[0]
		first := x.owner(vip)
		for _, h := range x.hosts {
			w := h.a.Waiting()[vip]
			must.True(t, h == first || w.Reason == "standby: "+first.name()+" has it" && w.Intended,
				"%s waits for %+v", h.name(), w)
			must.Row(t, h.name(), nil, h.a.Conflicts())
		}
		failed := time.Now()
		x.change(func() { first.down = true })
		x.pass(200 * time.Millisecond)
		second := x.owner(vip)
		if since, ok := second.a.Since()[vip]; !ok || since.Before(failed) {
			t.Errorf("%s has had the VIP since %v, before the failure at %v", second.name(), since, failed)
		}
		// The first owner returns. It believes that it still has the VIP, but its term is lower.
		x.change(func() { first.down = false })
		x.pass(time.Second)
		got := x.owner(vip)
		must.True(t, got == second, "%s took the VIP back from %s", got.name(), second.name())
		// In a planned shutdown, the VIP is kept until another member has it.
		done := make(chan time.Duration)
		go func() {
			start := time.Now()
			second.set()
			done <- time.Since(start)
		}()
		x.pass(time.Second)
		took := <-done
		must.True(t, took <= 400*time.Millisecond && took >= handOverLinger, "the hand-over took %s", took)
		must.True(t, x.owner(vip) != second && !second.owns(vip), "%s still has the VIP", second.name())
	})
}

// A node receives its first endpoint of a VIP while another node probes for the VIP. The other node then leaves the VIP
// to this one, although no member notifies this node.
func TestOwnClaimChanges(t *testing.T) {
	vip := shared[0]
	local := func(h *host, is bool) { must.Do(h.t, h.a.Set(h.t.Context(), []lb.Announcement{{VIP: vip, Local: is}})) }
	for after := range 30 {
		for first := range 2 {
			onSegment(t, 2, func(t *testing.T, x *segment) {
				one, two := x.hosts[first], x.hosts[1-first]
				local(two, false)
				local(one, true)
				x.pass(time.Duration(after) * 5 * time.Millisecond)
				local(two, true)
				x.pass(time.Second)
				must.True(t, one.owns(vip) != two.owns(vip),
					"after %d ms: waiting %v / %v", after*5, one.a.Waiting(), two.a.Waiting())
			})
		}
	}
}

// Without other members, Set does not wait.
func TestLastOneLeaves(t *testing.T) {
	onSegment(t, 2, func(t *testing.T, x *segment) {
		x.hosts[0].set(shared...)
		x.hosts[1].set()
		x.pass(time.Second)
		start := time.Now()
		x.hosts[0].set()
		took := time.Since(start)
		must.True(t, took <= 10*time.Millisecond, "the end took %s", took)
	})
}

// Separated members share the segment. The owner of a VIP keeps it, and the other member reports this. If both have the
// VIP, both decide alike.
func TestSeparatedMembers(t *testing.T) {
	onSegment(t, 2, func(t *testing.T, x *segment) {
		x.set(shared...)
		x.pass(time.Second)
		before := map[netip.Addr]*host{}
		for _, vip := range shared {
			before[vip] = x.owner(vip)
		}
		x.change(func() { x.separated = true })
		x.pass(5 * time.Second)
		for _, vip := range shared {
			owner := x.owner(vip)
			other := x.but(owner)
			i := slices.IndexFunc(other.a.Conflicts(), func(c Conflict) bool { return c.VIP == vip })
			must.Need(t, owner == before[vip] && i >= 0,
				"%s: %s has it, and %s has conflicts %+v", vip, owner.name(), other.name(), other.a.Conflicts())
			c := other.a.Conflicts()[i]
			must.True(t, c.MAC == owner.mac() && c.Member == owner.name() && c.Withheld, "reported: %+v", c)
		}
		for _, h := range x.hosts { // both have all VIPs
			h.a.mu.Lock()
			for vip := range h.a.claims {
				delete(h.a.claims, vip)
				h.a.owned[vip] = &ownership{}
			}
			h.a.mu.Unlock()
			h.a.announce(t.Context(), h.a.responders, shared)
		}
		x.pass(3 * time.Second)
		for _, vip := range shared {
			want := x.elected(vip)
			must.Row(t, vip, want.name(), x.owner(vip).name())
			other := x.but(want)
			reports := func(c Conflict) bool { return c.VIP == vip && c.Withheld }
			must.True(t, slices.ContainsFunc(other.a.Conflicts(), reports),
				"%s: %s does not report it: %+v", vip, other.name(), other.a.Conflicts())
		}
		x.change(func() { x.separated = false })
		x.pass(time.Second)
		for _, vip := range shared {
			x.owner(vip)
		}
		for _, h := range x.hosts {
			must.Row(t, h.name(), nil, h.a.Conflicts()) // the other one is reachable
		}
	})
}

// Any host can send frames with the MAC address of a dead member. They take no address from the other member.
func TestForgedMember(t *testing.T) {
	onSegment(t, 2, func(t *testing.T, x *segment) {
		x.set(shared...)
		x.pass(time.Second)
		down, up := x.hosts[0], x.hosts[1]
		x.change(func() { down.down = true })
		x.pass(2 * time.Second)
		for range 40 {
			for _, vip := range shared {
				up.a.conflict(vip, down.mac(), "eth0", vip)
			}
			x.pass(100 * time.Millisecond)
			for _, vip := range shared {
				must.Need(t, up.owns(vip), "%s was given up", vip)
			}
		}
		log := up.a.Conflicts()
		must.True(t, len(log) == len(shared) && log[0].Member == down.name(), "conflicts %+v", log)
	})
}

// Frames with the MAC address of a live member that does not report having the VIP are reported and defended against.
// They take no VIP from its owner. If the owner fails, a member that they keep from taking over reports this.
func TestForgedLiveMember(t *testing.T) {
	onSegment(t, 3, func(t *testing.T, x *segment) {
		vip := shared[0]
		x.set(vip)
		x.pass(time.Minute)
		owner := x.owner(vip)
		i := slices.Index(x.hosts, owner)
		other, third := x.hosts[(i+1)%3], x.hosts[(i+2)%3]
		owner.f.take()
		for range 125 {
			owner.a.conflict(vip, other.mac(), "eth0", netip.Addr{})
			time.Sleep(100 * time.Millisecond)
		}
		synctest.Wait()
		c := owner.a.Conflicts()
		must.True(t, len(c) == 1 && c[0].MAC == other.mac() && c[0].Member == other.name() && c[0].Reached &&
			!c[0].Withheld && owner.owns(vip), "conflicts %+v", c)
		must.Row(t, "frames of two defences", 4, len(owner.f.take())) // a request and a reply each
		x.change(func() { owner.down = true })
		reported := map[string]bool{}
		for range 200 {
			for _, f := range [][2]*host{{other, third}, {third, other}} {
				f[0].a.conflict(vip, f[1].mac(), "eth0", netip.Addr{})
				for _, c := range f[0].a.Conflicts() {
					reported[c.Member] = c.Reached && c.Withheld
				}
			}
			x.pass(50 * time.Millisecond)
		}
		must.True(t, len(reported) == 1 && (reported[other.name()] || reported[third.name()]), "reported: %v", reported)
		x.pass(time.Second)
		must.Row(t, "conflicts", nil, x.owner(vip).a.Conflicts())
	})
}

// Addresses are spread evenly, and only a failed node's addresses move.
func TestElect(t *testing.T) {
	var nodes []members.Peer
	for i := range 5 {
		nodes = append(nodes, members.Peer{
			Address: netip.AddrFrom4([4]byte{192, 0, 2, byte(i + 1)}), Alive: true,
			Claim: members.Claim{Eligible: true},
		})
	}
	count, moved := map[netip.Addr]int{}, 0
	const n = 1000
	for i := range n {
		vip := netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)})
		first, ok := elect(vip, nodes)
		must.Need(t, ok, "nobody is elected")
		count[first.Address]++
		if second, _ := elect(vip, nodes[1:]); first.Address != nodes[0].Address && second != first {
			moved++
		}
	}
	for a, c := range count {
		must.True(t, c >= n/5*8/10 && c <= n/5*12/10, "%s has %d of %d", a, c, n)
	}
	must.True(t, moved == 0, "%d addresses of other nodes moved", moved)
	change := func(f func(c *members.Claim), i int) []members.Peer {
		list := slices.Clone(nodes)
		f(&list[i].Claim)
		return list
	}
	vip := vip4
	first, _ := elect(vip, nodes)
	other := (slices.Index(nodes, first) + 1) % len(nodes)
	for name, f := range map[string]func(*members.Claim){
		"has it": func(c *members.Claim) { c.Holds = true }, "has endpoints": func(c *members.Claim) { c.Local = true },
	} {
		got, _ := elect(vip, change(f, other))
		must.True(t, got.Address == nodes[other].Address, "%s is elected; want the one that %s", got.Address, name)
	}
	two := change(func(c *members.Claim) { c.Holds, c.Term = true, 2 }, other)
	two[slices.Index(nodes, first)].Claim = members.Claim{Eligible: true, Holds: true, Term: 1, Local: true}
	got, _ := elect(vip, two)
	must.Row(t, "took over last", nodes[other].Address, got.Address)
	_, ok := elect(vip, nil)
	must.True(t, !ok, "nobody was there")
}

// A member that is elected, but does not have the VIP because a host outside the members has it, is not reported as
// having it.
func TestElectedDoesNotHold(t *testing.T) {
	onSegment(t, 2, func(t *testing.T, x *segment) {
		vip := shared[0]
		elected := x.elected(vip)
		other := x.but(elected)
		elected.set(vip)
		other.set(vip)
		for range 300 { // the host replies to the probes
			elected.a.conflict(vip, otherMAC.String(), "eth0", netip.Addr{})
			x.pass(20 * time.Millisecond)
		}
		want := "standby: " + elected.name() + " is elected but does not announce it; see the status of that member"
		w := other.a.Waiting()[vip]
		must.True(t, w.Reason == want && w.Intended, "%+v; want %s", w, want)
		other.a.conflict(vip, otherMAC.String(), "eth0", netip.Addr{}) // a broadcast
		elected.set(vip, shared[1])                                    // the members change
		x.pass(20 * time.Millisecond)
		want = "standby: " + elected.name() + " is elected but does not announce it: " + otherMAC.String() +
			", which is not a member of [l2], claims it"
		must.Row(t, "claimed by a stranger", want, other.a.Waiting()[vip].Reason)
		x.pass(5 * time.Second)
		w = other.a.Waiting()[vip]
		must.True(t, x.owner(vip) == elected && w.Reason == "standby: "+elected.name()+" has it", "%+v", w)
	})
}

// A standby that receives nothing, and so hears no member, takes nothing from a working owner, nor does one that the
// owner does not hear. When the owner fails, a standby that hears a host takes over.
func TestSeparatedStandby(t *testing.T) {
	for _, tt := range []struct {
		deaf   bool
		reason string
	}{
		{true, "not taken over: no other member responds, and no other host is heard on eth0"},
		{false, "not taken over: lb1 has it; it is heard, but does not respond"},
	} {
		onSegment(t, 2, func(t *testing.T, x *segment) {
			x.set(shared...)
			x.pass(2 * time.Second)
			standby := x.hosts[1]
			was := standby.a.all()
			standby.f.change(func() { standby.f.deaf = tt.deaf })
			x.change(func() {
				if x.separated = tt.deaf; !tt.deaf {
					x.mute = standby
				}
			})
			x.pass(10 * time.Second)
			must.Row(t, tt.reason, was, standby.a.all())
			for vip, w := range standby.a.Waiting() {
				must.True(t, w == Waiting{Reason: tt.reason}, "%s waits: %+v; want %q", vip, w, tt.reason)
			}
			x.change(func() { x.hosts[0].down = true })
			standby.f.change(func() { standby.f.deaf = false })
			x.pass(time.Second)
			must.Row(t, tt.reason+": alone, it has", len(shared), len(standby.a.all()))
		})
	}
}
