package bgp_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
)

// After the time of graceful restart, a router that has it keeps the routes as stale ones for the long-lived time (RFC
// 9494), and then removes them.
func TestLongLivedGracefulRestart(t *testing.T) {
	const longLived = 8 * time.Second
	stale := func(t *testing.T, show func() (string, error), word string) {
		t.Helper()
		labtest.Until(t, timeout, "the route is stale", func() error {
			out, err := show()
			if err == nil && !strings.Contains(out, word) {
				err = fmt.Errorf("the output is %s", out)
			}
			return err
		})
		labtest.Until(t, longLived+timeout, "the route is removed", func() error {
			if out, err := show(); err == nil && strings.Contains(out, word) { // birdc fails when there is no route
				return fmt.Errorf("the output is %s", out)
			}
			return nil
		})
	}
	t.Run("bird", func(t *testing.T) {
		b, h, o := oneLink(t)
		r := startBIRD(t, h, "neighbor 192.0.2.2 as 64512; graceful restart aware; long lived graceful restart aware; "+
			bothFamilies, "")
		o.RestartTime, o.LongLivedRestartTime = time.Second, longLived
		c := startChild(t, b.host, o)
		c.set(vip4)
		r.await("show route all for "+vip4.String(), "BGP.as_path: 64512")
		c.Kill()
		stale(t, func() (string, error) { return r.birdc("show route all for " + vip4.String()) }, "(65535,6)")
	})
	t.Run("frr", func(t *testing.T) {
		b := newBench(t)
		r := b.router(peers.FRR, nil)
		if out, err := r.Run(t.Context(), "vtysh", "--vty_socket", "/run/frr", "-d", "bgpd", "-c", "configure terminal",
			"-c", "router bgp 64500", "-c", "bgp long-lived-graceful-restart stale-time 3600"); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		o := b.options()
		o.RestartTime, o.LongLivedRestartTime = time.Second, longLived
		c := startChild(t, b.host, o)
		c.set(vip4)
		want(t, r, vip4, b.ours[0][0])
		c.Kill()
		show := func() (string, error) { return r.Show(t.Context(), "show bgp ipv4 unicast "+vip4.String()) }
		stale(t, show, "llgr-stale")
		want(t, r, vip4)
	})
}
