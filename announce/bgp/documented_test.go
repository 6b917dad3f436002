package bgp_test

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/announce/bgp"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// FRR accepts the documented configuration, first that of a router, then that of BFD, and both are in force.
func TestDocumentedFRR(t *testing.T) {
	text := must.Get(os.ReadFile("../../docs/bgp.md"))(t)
	_, router, ok := strings.Cut(string(text), "```\n# FRR\n")
	_, withBFD, ok2 := strings.Cut(router, "```\n# FRR (bfdd=yes in /etc/frr/daemons)\n")
	if !ok || !ok2 {
		t.Fatal("an example is missing")
	}
	b := newBench(t)
	r := b.router(peers.FRR, func(c *peers.RouterConfig) {
		// Any neighbour with BFD makes bfdd run.
		c.Neighbors[0] = peers.Neighbor{Address: netip.MustParseAddr("192.0.2.254"), ASN: ourASN, BFD: true}
	})
	enter := func(config string) {
		t.Helper()
		config, _, _ = strings.Cut(config, "```")
		must.Do(t, r.WriteFile("/run/frr/documented.conf", config, 0o600))
		out, err := r.Run(t.Context(), "vtysh", "--vty_socket", "/run/frr", "-f", "/run/frr/documented.conf")
		if err != nil || strings.Contains(out, "%") {
			t.Errorf("%v\n%s\n%s", err, config, out)
		}
	}
	enter("no router bgp 64500\nno bfd\n")
	enter(router)
	enter(withBFD)
	o := b.options()
	o.Peers[0].Password, o.Peers[0].BFD = "of-the-file", bgp.BFD{Interval: 100 * time.Millisecond, Multiplier: 3}
	s := startChild(t, b.host, o)
	s.set(vip4)
	both := func(p lb.PeerStatus) bool { return isEstablished(p) && p.BFD == "up" }
	s.until(b.theirs[0][0], "both sessions are up", both)
	want(t, r, vip4, b.ours[0][0])
	if out, err := r.Show(t.Context(), "show bfd peer 192.0.2.2 json"); err != nil ||
		!strings.Contains(out, `"receive-interval":100,`) {
		t.Errorf("the profile is not in force: %v\n%s", err, out)
	}
}
