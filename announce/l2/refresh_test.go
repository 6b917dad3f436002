package l2

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/steelyard-lb/steelyard/announce/l2/members"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// wantRouter checks that the router has the MAC address of each VIP's owner.
func (x *segment) wantRouter(what string, vips ...netip.Addr) {
	x.t.Helper()
	for _, vip := range vips {
		if o := x.owner(vip); x.router[vip] != o.mac() {
			x.t.Errorf("%s: the router has %s for %s; want %s of %s", what, x.router[vip], vip, o.mac(), o.name())
		}
	}
}

// When a partitioned segment is joined again, the owner announces its VIPs to the other part. It does so whether it had
// the VIPs before, members there give them up, or only it can serve them.
func TestJoinedSegment(t *testing.T) {
	for _, all := range []bool{true, false} {
		for _, cut := range []time.Duration{time.Second, 3 * time.Second, 9 * time.Second, 2 * refreshInterval} {
			t.Run(fmt.Sprintf("all=%t/cut=%s", all, cut), func(t *testing.T) {
				onSegment(t, 3, func(t *testing.T, x *segment) {
					x.set(shared...)
					x.pass(10 * time.Second)
					x.wantRouter("before", shared...)
					far := x.hosts[0]
					x.change(func() { x.far = map[*host]bool{far: true} })
					if !all { // the servers are behind the link
						x.hosts[1].set()
						x.hosts[2].set()
					}
					x.pass(cut)
					x.change(func() {
						x.far = nil
						for _, h := range x.hosts {
							h.since = time.Now()
						}
					})
					x.pass(2*againInterval + time.Second)
					x.wantRouter("joined again", shared...)
				})
			})
		}
	}
}

// After a conflict with another member, whose frames came last, a VIP is announced again, but not during the conflict.
// A member that repeatedly fails and returns does not cause more announcements than the limit.
func TestAnnounceAgain(t *testing.T) {
	onSegment(t, 2, func(t *testing.T, x *segment) {
		owner, other := x.hosts[0], x.hosts[1]
		owner.set(vip4)
		x.pass(time.Minute)
		for range 3 {
			x.change(func() { x.router[vip4] = other.mac() })
			owner.a.conflict(vip4, other.mac(), "eth0", netip.Addr{})
			x.pass(calmAfter - 100*time.Millisecond)
		}
		must.True(t, x.router[vip4] == other.mac(), "announced in the conflict")
		x.pass(time.Second)
		x.wantRouter("after the conflict", vip4)
	})
	onSegment(t, 2, func(t *testing.T, x *segment) {
		owner, other := x.hosts[0], x.hosts[1]
		owner.set(vip4)
		x.pass(10 * time.Second)
		owner.f.take()
		frames := 0
		for range 600 {
			time.Sleep(100 * time.Millisecond)
			x.change(func() { other.down, other.since = !other.down, time.Now() })
			synctest.Wait()
			frames += len(owner.f.take())
		}
		most := 2 * (1 + len(owner.a.o.Repeat)) * int(time.Minute/againInterval+1)
		must.True(t, frames > 0 && frames <= most, "%d frames in a minute; want at most %d", frames, most)
	})
}

// Each VIP is announced once per minute, but not all at the same time. Other nodes' VIPs are not announced.
func TestRefresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 200
		var vips []netip.Addr
		for i := range n {
			vips = append(vips, netip.AddrFrom4([4]byte{203, 0, 113, byte(i)}))
		}
		x := newSegment(t, 2)
		x.run()
		owner, other := x.hosts[0], x.hosts[1]
		owner.set(vips...)
		x.pass(10 * time.Second)
		other.set(vips...)
		owner.set(vips[1:]...)
		x.pass(refreshInterval)
		claim := members.Claim{Eligible: true, Holds: true, Term: 1}
		must.Need(t, x.owner(vips[0]) == other && owner.claims[vips[1]] == claim, "the VIPs have other owners")
		owner.f.take()
		go owner.a.refresh(t.Context())
		most, sum, seen := 0, 0, map[string]int{}
		for range 2 * refreshInterval / turnInterval {
			time.Sleep(turnInterval)
			synctest.Wait()
			got := owner.f.take()
			most, sum = max(most, len(got)), sum+len(got)
			for _, text := range got {
				seen[text]++
			}
		}
		for text, times := range seen {
			must.True(t, times == 2, "%d times in two minutes: %s", times, text)
		}
		if len(seen) != 2*(n-1) || most > sum/10 { // a request and a reply each
			t.Errorf("%d different frames, at most %d of %d in a second", len(seen), most, sum)
		}
	})
}

// A probe finds a host that replies for a VIP without announcing it.
func TestSilentRival(t *testing.T) {
	n := newNeighbour(t)
	a := newAnnouncer(t, &lines{}, "eth0")
	a.o.ProbeOwn = 2 * time.Second
	must.Run(t, a.Run)
	set(t, a, vip4, vip6)
	until(t, "the first frames", func() bool {
		return testutil.ToFloat64(a.metrics.gratuitous.WithLabelValues("eth0")) >= 2
	})
	must.Equal(t, nil, a.Conflicts())
	must.Do(t, n.nl.AddrAdd(n.link, address(t, vip4.String()+"/32")))
	must.Do(t, n.nl.AddrAdd(n.link, address(t, vip6.String()+"/128")))
	until(t, "both conflicts", func() bool { return len(a.Conflicts()) == 2 })
	for _, c := range a.Conflicts() {
		must.True(t, c.MAC == n.link.Attrs().HardwareAddr.String() && !c.Withheld, "conflict %+v", c)
	}
}

// A process that was stopped probes before it replies again, because another node may have its VIPs. Frames from a node
// that has taken over in the meantime are not a conflict.
func TestStoppedProcess(t *testing.T) {
	defer func(f func() time.Duration) { boottime = f }(boottime)
	synctest.Test(t, func(t *testing.T) {
		var stopped atomic.Int64
		start := time.Now()
		boottime = func() time.Duration { return time.Hour + time.Since(start) + time.Duration(stopped.Load()) }
		f := newFakeSystem()
		a, r, s := claiming(t, f, vip4)
		r.use(s)
		go a.runClaims(t.Context())
		go a.watchClock(t.Context())
		time.Sleep(time.Second)
		replies := func() bool {
			sent, _ := a.reply(vip4, func() error { return nil })
			return sent
		}
		must.Need(t, replies() && a.Findings() == nil, "no reply, or findings %v", a.Findings())
		time.Sleep(time.Millisecond)
		stopped.Store(int64(suspendLimit + 100*time.Millisecond))
		must.True(t, !replies(), "a request was answered after the stop")
		a.conflict(vip4, otherMAC.String(), "eth0", netip.Addr{}) // queued before
		c := a.Conflicts()
		must.True(t, len(c) == 0 && counted(a)[1] == 0, "conflicts %+v from the time of the stop", c)
		f.take()
		time.Sleep(clockTick + time.Millisecond)
		synctest.Wait()
		got := f.take()
		must.True(t, !replies() && len(got) == 1, "sent %q; want a probe", got)
		time.Sleep(time.Second)
		must.True(t, replies(), "no reply after the probes")
		text := lbtest.Texts(a.Findings())
		must.True(t, len(text) == 1 && strings.Contains(text[0], "lacks CPU"), "findings %q after the stop", text)
		time.Sleep(suspensionReported)
		must.True(t, a.Findings() == nil, "findings %v a minute later", a.Findings())
	})
}

// A member that paused keeps its VIP, whatever the VIP's order, unless another member has taken it over in the
// meantime.
func TestOwnerThatPauses(t *testing.T) {
	onSegment(t, 2, func(t *testing.T, x *segment) {
		vip := shared[0]
		other := x.elected(vip)
		owner := x.but(other)
		owner.set(vip)
		x.pass(2 * silentTimeout)
		other.set(vip)
		x.pass(time.Second)
		owner.a.reclaim()
		w := owner.a.Waiting()
		must.True(t, len(w) == 0, "waiting: %v", w)
		owner.a.probed(vip, owner.f.ifi.HardwareAddr, net.HardwareAddr{2, 0, 0, 0, 0, 0}, "eth0")
		x.pass(time.Second)
		must.True(t, x.owner(vip) == owner, "%s has it; want %s", x.owner(vip).name(), owner.name())
		x.change(func() { owner.down = true })
		x.pass(2 * time.Second)
		must.Need(t, x.owner(vip) == other, "the other member has not taken over")
		owner.a.reclaim()
		x.change(func() { owner.down = false })
		x.pass(time.Second)
		must.True(t, x.owner(vip) == other, "%s has it again", owner.name())
	})
}
