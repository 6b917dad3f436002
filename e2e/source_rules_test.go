package e2e

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestRepliesFollowSourceRules checks that replies of a backend on this machine take the route from the VIP. The VIPs
// belong to the network of eth1, the default route leads through eth0, and the router drops packets from the wrong one.
func TestRepliesFollowSourceRules(t *testing.T) {
	t.Parallel()
	variants(t, func(t *testing.T, kind peers.RouterKind, mode string) {
		t.Parallel()
		s := newBareSite(t, lab.Shape{
			Clients: 1, Balancers: 1, Wired: true, Links: lab.LinkOptions{SoftwareChecksums: mode == "xdp"},
		})
		b, router := s.Balancers[0], s.Topology.Router
		run := func(h *lab.Host, command string) {
			t.Helper()
			args := strings.Fields(command)
			must.Get(h.Run(t.Context(), args[0], args[1:]...))(t)
		}
		second := func(h *lab.Host, name, v4, v6 string) lab.End {
			return lab.End{Host: h, Name: name, Addresses: []netip.Prefix{
				netip.MustParsePrefix(v4), netip.MustParsePrefix(v6),
			}}
		}
		must.Do(t, s.Topology.Link(second(b.Host, "eth1", "198.51.100.2/30", "2001:db8:9::2/64"),
			second(router, "vips", "198.51.100.1/30", "2001:db8:9::1/64"), lab.LinkOptions{}))
		run(router, "ip route add 203.0.113.10 via 198.51.100.2 metric 1")
		run(router, "ip route add 2001:db8:1::10 via 2001:db8:9::2 metric 1")
		run(router, "nft add table inet strict")
		run(router, "nft add chain inet strict in { type filter hook prerouting priority -300 ; }")
		run(router, "nft add rule inet strict in ip saddr 203.0.113.0/24 iifname != vips drop")
		run(router, "nft add rule inet strict in ip6 saddr 2001:db8:1::/64 iifname != vips drop")

		labtest.HTTP(t, b, 8080)
		s.Daemon = labtest.Router(t, router, kind, s.RouterConfig())
		c := lab.BGPAgent(b, labtest.ASN, labtest.RouterASN, lab.AgentService{
			Name: "web", Addresses: vips, Ports: []string{"80:8080"}, Backends: lab.Backends(b), Check: s.check,
		})
		c.Mode, c.Interfaces = mode, []string{"eth0", "eth1"}
		run(b.Host, "ip route add default via 198.51.100.1 table 100")
		run(b.Host, "ip -6 route add default via 2001:db8:9::1 table 100")
		run(b.Host, "ip rule add from 203.0.113.0/24 table 100")
		run(b.Host, "ip -6 rule add from 2001:db8:1::/64 table 100")
		a := labtest.Agent(t, b.Host, binary, c)
		s.Agents = append(s.Agents, a)

		load := func(vip netip.Addr, n int, limit time.Duration) traffic.Result {
			return s.Client().Load(t.Context(), traffic.Load{URL: labtest.URL(vip), Requests: n, Timeout: limit})
		}
		for i, vip := range vips {
			labtest.Until(t, "the VIP answers", func() error { return load(vip, 1, time.Second).Err() })
			must.Do(t, load(vip, 100, 4*time.Second).Err())
			client := []netip.Addr{s.Clients[0].V4, s.Clients[0].V6}[i]
			out, err := a.CLI(t.Context(), "explain", client.String(), netip.AddrPortFrom(vip, 80).String())
			must.True(t, err == nil && strings.Contains(out, "sent to the client by eth1"), "%v\n%s", err, out)
		}
		labtest.Until(t, "status is OK", func() error { return shows(t, a, "OK", "status") })
		run(b.Host, "ip link set eth1 mtu 1400") // the server is told by an ICMP error
		for _, vip := range vips {
			long := traffic.Load{URL: labtest.URL(vip) + "?size=20000", Requests: 20, Timeout: 4 * time.Second}
			must.Do(t, s.Client().Load(t.Context(), long).Err())
		}
		run(b.Host, "ip link set eth1 mtu 1500")
		ask := []string{"explain", s.Clients[0].V4.String(), netip.AddrPortFrom(vip4, 80).String()}
		for _, rule := range []string{"from 203.0.113.0/24", "from 203.0.113.10"} {
			run(b.Host, "ip rule del from 203.0.113.0/24 table 100")
			run(b.Host, "ip rule add from 10.9.0.0/16 table 100") // not of the VIP
			labtest.Until(t, "replies leave by eth0", func() error {
				return shows(t, a, "sent to the client by eth0", ask...)
			})
			must.True(t, load(vip4, 1, time.Second).Err() != nil, "the client is served without a rule for the VIP")
			run(b.Host, "ip rule del from 10.9.0.0/16 table 100")
			run(b.Host, "ip rule add "+rule+" table 100")
			labtest.Until(t, "by eth1 again", func() error { return shows(t, a, "sent to the client by eth1", ask...) })
			must.Do(t, load(vip4, 20, 4*time.Second).Err())
		}
		run(b.Host, "ip route replace unreachable default table 100")
		labtest.Until(t, "a route that refuses is in force", func() error {
			out, _ := a.CLI(t.Context(), ask...) // fails if the client is not served
			return labtest.ErrorIf(!strings.Contains(out, "no route"), "%s", out)
		})
	})
}
