package peers_test

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var (
	vip4 = netip.MustParsePrefix("203.0.113.1/32")
	vip6 = netip.MustParsePrefix("2001:db8:1::1/128")
)

// announcer makes a host announce both VIPs to the router with its own BIRD, over both sessions with graceful restart,
// and serve HTTP on them.
func announcer(t *testing.T, n lab.Node, password string) func() *lab.Process {
	t.Helper()
	conf := fmt.Sprintf(`router id %s; log stderr all;
protocol device {}
protocol static { ipv4; route %s blackhole; }
protocol static { ipv6; route %s blackhole; }
`, n.V4, vip4, vip6)
	for i, g := range n.Gateways() {
		conf += fmt.Sprintf(`protocol bgp p%d { local as 64512; neighbor %s as 64500; hold time 3;
  connect delay time 1; connect retry time 1; error wait time 1,1;
  graceful restart on; graceful restart time 20; %s
`, i, g, password)
		if g.Is4() {
			conf += "  ipv4 { import none; export all; next hop self; };\n"
		}
		conf += "  ipv6 { import none; export all; next hop self; };\n}\n"
	}
	must.Do(t, n.WriteFile("/run/announcer.conf", conf, 0o600))
	for _, vip := range []netip.Prefix{vip4, vip6} {
		must.Do(t, n.AddAddress("lo", vip))
		must.Get(traffic.ServeHTTP(n.Host, n.Name(), netip.AddrPortFrom(vip.Addr(), 80)))(t)
	}
	return func() *lab.Process {
		args := []string{"-f", "-c", "/run/announcer.conf", "-s", "/run/announcer.ctl"}
		p := must.Get(n.Start(lab.Command{Path: "/usr/sbin/bird", Args: args}))(t)
		return p
	}
}

func TestRoutersImportSpreadRetainAndWithdraw(t *testing.T) {
	for _, kind := range peers.RouterKinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			topo := labtest.Topology(t, lab.Shape{Balancers: 2})
			conf := peers.RouterConfig{ID: topo.Balancers[0].Gateway4, ASN: 64500, HoldTime: 3 * time.Second}
			for _, b := range topo.Balancers {
				for _, a := range []netip.Addr{b.V4, b.V6} {
					conf.Neighbors = append(conf.Neighbors, peers.Neighbor{Address: a, ASN: 64512})
				}
			}
			r := labtest.Router(t, topo.Router, kind, conf)
			one, two := topo.Balancers[0], topo.Balancers[1]
			start := announcer(t, one, "")
			p1, p2 := start(), announcer(t, two, "")()
			must.Do(t, r.WaitEstablished(t.Context(), lab.Ready))

			hops := func(want4, want6 []netip.Addr) {
				t.Helper()
				must.Get(r.WaitNextHops(t.Context(), 10*time.Second, vip4, want4...))(t)
				must.Get(r.WaitNextHops(t.Context(), 10*time.Second, vip6, want6...))(t)
			}
			hops([]netip.Addr{one.V4, two.V4}, []netip.Addr{one.V6, two.V6})
			for _, vip := range []netip.Prefix{vip4, vip6} {
				url := "http://" + netip.AddrPortFrom(vip.Addr(), 80).String()
				load := traffic.From(topo.Clients[0].Host).Load(t.Context(), traffic.Load{URL: url, Requests: 100})
				must.True(t, load.Err() == nil && load.Servers["lb1"] >= 25 && load.Servers["lb2"] >= 25,
					"want about 50 answers each from lb1 and lb2, got %v (%v)", load, load.Err())
			}

			// The routes of a neighbour that crashes and restarts stay installed (RFC 4724).
			p1.Kill()
			labtest.Until(t, "the router has closed the session", func() error {
				peers, err := r.Peers(t.Context())
				return errors.Join(err, labtest.ErrorIf(peers[one.V4].Established,
					"the session is %q", peers[one.V4].Info))
			})
			hops([]netip.Addr{one.V4, two.V4}, []netip.Addr{one.V6, two.V6})
			p1 = start()
			must.Do(t, r.WaitEstablished(t.Context(), lab.Ready))
			hops([]netip.Addr{one.V4, two.V4}, []netip.Addr{one.V6, two.V6})

			// The routes of a neighbour that closes its session (CEASE) are removed.
			must.Do(t, p2.Stop())
			hops([]netip.Addr{one.V4}, []netip.Addr{one.V6})
			must.Do(t, r.Reset(t.Context(), one.V4))
			must.Do(t, r.WaitEstablished(t.Context(), lab.Ready, one.V4, one.V6))
			// The session must not have just come up. If BIRD exits with unread data in a socket, it resets the
			// connection, the NOTIFICATION is lost, and the router treats this as a crash.
			hops([]netip.Addr{one.V4}, []netip.Addr{one.V6})
			must.Do(t, p1.Stop())
			hops(nil, nil)
			show := map[peers.RouterKind]string{peers.BIRD: "show route", peers.FRR: "show ip route"}[kind]
			must.Get(r.Show(t.Context(), show))(t)
		})
	}
}

func TestRouterPasswords(t *testing.T) {
	for _, kind := range peers.RouterKinds {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			topo := labtest.Topology(t, lab.Shape{Balancers: 2})
			one, two := topo.Balancers[0], topo.Balancers[1]
			conf := peers.RouterConfig{ID: one.Gateway4, ASN: 64500, HoldTime: 3 * time.Second}
			for _, b := range topo.Balancers {
				for _, a := range []netip.Addr{b.V4, b.V6} {
					n := peers.Neighbor{Address: a, ASN: 64512, Password: "right", Passive: true}
					conf.Neighbors = append(conf.Neighbors, n)
				}
			}
			r := labtest.Router(t, topo.Router, kind, conf)
			announcer(t, one, `password "right";`)()
			announcer(t, two, `password "wrong";`)()
			must.Do(t, r.WaitEstablished(t.Context(), lab.Ready, one.V4, one.V6))
			peers := must.Get(r.Peers(t.Context()))(t)
			must.True(t, !peers[two.V4].Established && !peers[two.V6].Established && peers[two.V4].Info != "",
				"want no session with a wrong password, and a reason, got %+v", peers)
		})
	}
}
