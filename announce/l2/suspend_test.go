package l2

import (
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// A process that was stopped probes before it replies again: another node may have its VIPs. The frames of that node,
// which it took over from meanwhile, are no conflict.
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
		if !replies() {
			t.Fatal("no reply")
		}
		time.Sleep(time.Millisecond)
		stopped.Store(int64(suspendLimit + 100*time.Millisecond))
		if replies() {
			t.Error("a request was answered after the stop")
		}
		a.conflict(vip4, otherMAC.String(), "eth0", netip.Addr{}) // in the queue
		if c := a.Conflicts(); len(c) > 0 || counted(a)[1] > 0 {
			t.Errorf("conflicts %+v from the time of the stop", c)
		}
		f.take()
		time.Sleep(clockTick + time.Millisecond)
		synctest.Wait()
		if got := f.take(); replies() || len(got) != 1 {
			t.Errorf("sent %q; want a probe", got)
		}
		time.Sleep(time.Second)
		if !replies() {
			t.Error("no reply after the probes")
		}
	})
}

// A member that did not run for a moment keeps its VIP, whoever comes first in the order of the VIP, and loses it when
// another one has taken it over meanwhile.
func TestOwnerThatPauses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x := newSegment(t, 2)
		x.run()
		vip := shared[0]
		owner, other := x.hosts[0], x.hosts[1]
		if outranks(vip, owner.self, other.self) {
			owner, other = other, owner
		}
		owner.set(vip)
		x.pass(2 * silentTimeout)
		other.set(vip)
		x.pass(time.Second)
		owner.a.reclaim()
		if w := owner.a.Waiting(); len(w) > 0 {
			t.Errorf("waiting: %v", w)
		}
		owner.a.probed(vip, owner.f.ifi.HardwareAddr, net.HardwareAddr{2, 0, 0, 0, 0, 0}, "eth0")
		x.pass(time.Second)
		if x.owner(vip) != owner {
			t.Errorf("%s has it; want %s", x.owner(vip).name(), owner.name())
		}
		x.change(func() { owner.down = true })
		x.pass(2 * time.Second)
		if x.owner(vip) != other {
			t.Fatal("the other member has not taken over")
		}
		owner.a.reclaim()
		x.change(func() { owner.down = false })
		x.pass(time.Second)
		if x.owner(vip) != other {
			t.Errorf("%s has it again", owner.name())
		}
	})
}
