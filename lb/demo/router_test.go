package demo

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// speakerOptions makes the test program a speaker that announces both VIPs.
const speakerOptions = "STEELYARD_DEMO_TEST_SPEAKER"

func speak(ctx context.Context, text string) error {
	var o bgp.Options
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return err
	}
	o.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	s, err := bgp.New(o)
	if err != nil {
		return err
	}
	var all []lb.Announcement
	for _, vip := range vips {
		all = append(all, lb.Announcement{VIP: vip, Weight: 1})
	}
	if err := s.Set(ctx, all); err != nil {
		return err
	}
	return s.Run(ctx)
}

func TestRouter(t *testing.T) {
	labtest.Root(t)
	self := must.Get(os.Executable())(t)
	n := must.Get(build(self))(t)
	t.Cleanup(func() { must.Do(t, n.close()) })
	must.Do(t, n.startRouter(n.routerConfig()))
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of the router:\n%s", n.router.Log.Tail(60))
		}
	})
	one, two := n.Balancers[0], n.Balancers[1]
	p1, p2 := speaker(t, one, self), speaker(t, two, self)
	via := func(within time.Duration, nodes ...lab.Node) {
		t.Helper()
		for _, vip := range vips {
			must.Get(n.Router.WaitNextHops(t.Context(), within, host(vip), hops(vip, nodes...)...))(t)
		}
	}
	via(20*time.Second, one, two)

	// If the speaker is killed without a NOTIFICATION, the routes stay, even after the hold time of 3 s, and while a
	// new speaker announces the same routes.
	p1.Kill()
	stays(t, n, 4*time.Second, one, two)
	speaker(t, one, self)
	stays(t, n, 4*time.Second, one, two)

	// Without power the link is down, and the routes are removed immediately.
	must.Do(t, one.PowerOff())
	via(time.Second, two)
	labtest.Within(t, time.Second, "the router has removed them, not only its kernel", func() error {
		_, after, _ := strings.Cut(n.router.Log.Tail(20), "interface=lb1 up=false")
		for _, vip := range vips {
			if !strings.Contains(after, fmt.Sprintf("prefix=%s via=[%s]", host(vip), hops(vip, two)[0])) {
				return fmt.Errorf("no route to %s via lb2 alone after the loss of the link:\n%s", vip, after)
			}
		}
		return nil
	})
	must.Do(t, one.PowerOn())
	p1 = speaker(t, one, self)
	via(20*time.Second, one, two)

	// The routes of a speaker that closes its session are removed.
	must.Do(t, p2.Stop())
	via(2*time.Second, one)
	must.Do(t, p1.Stop())
	via(2 * time.Second)
}

// stays fails the test unless the routes lead over nodes for the whole time.
func stays(t *testing.T, n *network, d time.Duration, nodes ...lab.Node) {
	t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(scanInterval) {
		for _, vip := range vips {
			must.Get(n.Router.WaitNextHops(t.Context(), 0, host(vip), hops(vip, nodes...)...))(t)
		}
	}
}

func speaker(t *testing.T, node lab.Node, self string) *lab.Process {
	t.Helper()
	o := bgp.Options{
		ASN: balancerASN, RouterID: node.V4, ListenPort: 179, NextHopV4: node.V4, NextHopV6: node.V6,
		AggregateV4: 32, AggregateV6: 128,
	}
	for _, g := range []netip.Addr{node.Gateway4, node.Gateway6} {
		o.Peers = append(o.Peers, bgp.Peer{
			Address: g, ASN: routerASN, Port: 179, HoldTime: 3 * time.Second, GracefulRestart: true,
		})
	}
	text := must.Get(json.Marshal(o))(t)
	p := must.Get(node.Start(lab.Command{Path: self, Env: []string{speakerOptions + "=" + string(text)}}))(t)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("log of %s:\n%s", node, p.Log.Tail(30))
		}
	})
	return p
}
