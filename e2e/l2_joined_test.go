package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestMembersJoinedSegment: a member and a server are behind a link of the segment that goes down. The members on both
// sides have all addresses then. When the link is up again, one of them gives each address up, and the router, which
// nobody uses meanwhile, must have the MAC address of the other one.
func TestMembersJoinedSegment(t *testing.T) {
	m := newMembers(t, 2)
	before := m.Settled(t, m.Agents...)
	far := m.Others(before[m.VIPs[0]])[0]
	run := func(host *lab.Host, command ...string) {
		t.Helper()
		if out, err := host.Run(t.Context(), command[0], command[1:]...); err != nil {
			t.Fatal(err, out)
		}
	}
	// The trunk is down from the start.
	run(m.Switch, "ip", "link", "add", "trunk", "type", "veth", "peer", "name", "trunk-far")
	run(m.Switch, "ip", "link", "add", "far", "type", "bridge", "mcast_snooping", "0")
	run(m.Switch, "ip", "link", "set", "far", "up")
	run(m.Switch, "ip", "link", "set", "trunk", "master", "switch")
	run(m.Switch, "ip", "link", "set", "trunk-far", "up", "master", "far")
	for _, vip := range m.VIPs {
		m.Forget(t, vip)
		must.Get(m.Client().Get(t.Context(), labtest.URL(vip)))(t)
	}
	for _, port := range []string{m.Port(far), m.Servers[1].Port} {
		run(m.Switch, "ip", "link", "set", port, "master", "far")
	}
	labtest.Until(t, 30*time.Second, "the far member has all addresses", func() error {
		routes, err := labtest.RoutesOf(t, far)
		if err != nil {
			return err
		}
		for _, r := range routes {
			if !r.Announced {
				return fmt.Errorf("%s: %s", r.Address, r.Reason)
			}
		}
		return nil
	})
	time.Sleep(8 * time.Second)
	run(m.Switch, "ip", "link", "set", "trunk", "up")
	owners := m.Settled(t, m.Agents...)
	link, err := far.Run(t.Context(), "ip", "-br", "link", "show", "eth0")
	if err != nil || len(strings.Fields(link)) < 3 {
		t.Fatal(err, link)
	}
	mac := strings.Fields(link)[2]
	moved := 0
	labtest.Until(t, 20*time.Second, "the router has the MAC address of the owner", func() error {
		for _, vip := range m.VIPs {
			if owners[vip] != far {
				continue
			}
			moved++
			out, err := m.Topology.Router.Run(t.Context(), "ip", "neigh", "show", vip.String(), "dev", "segment")
			if err != nil || !strings.Contains(out, mac) {
				return fmt.Errorf("%s: %q, %v; want %s", vip, out, err, mac)
			}
		}
		return nil
	})
	if moved == 0 {
		t.Error("the far member has no address")
	}
	for _, vip := range m.VIPs {
		if _, err := m.Client().Get(t.Context(), labtest.URL(vip)); err != nil {
			t.Error(err)
		}
	}
}
