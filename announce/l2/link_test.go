package l2

import (
	"bytes"
	"fmt"
	"net"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/vishvananda/netlink"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// After an overrun of the queue of link updates, in which the update with a new MAC address is lost, replies have the
// new address.
func TestLinkOverrun(t *testing.T) {
	n := newNeighbour(t)
	a := newAnnouncer(t, &lines{}, "eth0")
	hold := make(chan struct{})
	release := sync.OnceFunc(func() { close(hold) })
	t.Cleanup(release)
	a.links.buffer = 1 // the kernel's minimum
	a.links.received = func() { <-hold }
	must.Run(t, a.Run)
	set(t, a, vip4)
	before := ourMAC(t)
	until(t, "a reply", func() bool { return bytes.Equal(n.resolve(vip4), before) })

	ours := must.Get(netlink.LinkByName("eth0"))(t)
	for i := range 300 {
		must.Do(t, netlink.LinkSetAlias(ours, fmt.Sprint("a", i)))
	}
	after := net.HardwareAddr{2, 0, 0, 0, 0, 99}
	must.Do(t, netlink.LinkSetHardwareAddr(ours, after))
	for i := range 10 {
		must.Do(t, netlink.LinkSetAlias(ours, fmt.Sprint("b", i)))
	}
	release()
	until(t, "an overrun", func() bool { return testutil.ToFloat64(a.metrics.overruns) >= 1 })
	until(t, "a reply with the new address", func() bool { return bytes.Equal(n.resolve(vip4), after) })
}

func TestNotify(t *testing.T) {
	renamed := &responder{name: "eth0", open: &sockets{ifi: &net.Interface{Index: 7}}}
	responders := []*responder{{name: "eth0"}, {name: "eth1"}, {name: "eth1"}, renamed}
	var changes []chan struct{}
	for range responders {
		changes = append(changes, make(chan struct{}, 1))
	}
	link := &netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Name: "eth1", Index: 7}}
	for range 2 { // the second one finds the channels full
		notify(netlink.LinkUpdate{Link: link}, responders, changes)
	}
	notify(netlink.LinkUpdate{}, responders, changes)
	for i, want := range []int{0, 1, 1, 1} {
		if len(changes[i]) != want {
			t.Errorf("responder %d: %d notifications; want %d", i, len(changes[i]), want)
		}
	}
}
