package e2e

import (
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// uplinkRecreated: an uplink that is deleted and created again, as by a driver reload, is attached again.
func (s *site) uplinkRecreated(t *testing.T, mode string) {
	balancer, router := s.Balancers[0], s.Topology.Router
	s.checkAnswered(t, 20)
	must.Get(balancer.Run(t.Context(), "ip", "link", "delete", "eth0"))(t)
	attached := func(want string) func() error {
		return func() error {
			out, err := s.Agents[0].CLI(t.Context(), "status")
			return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, want), "%s", out))
		}
	}
	labtest.Until(t, lab.Ready, "status shows that it does not exist", attached("interface not found"))
	near := []netip.Prefix{netip.PrefixFrom(balancer.V4, 30), netip.PrefixFrom(balancer.V6, 64)}
	far := []netip.Prefix{netip.PrefixFrom(balancer.Gateway4, 30), netip.PrefixFrom(balancer.Gateway6, 64)}
	err := s.Link(
		lab.End{Host: balancer.Host, Name: "eth0", Addresses: near},
		lab.End{Host: router, Name: balancer.Port, Addresses: far},
		lab.LinkOptions{SoftwareChecksums: mode == "xdp"})
	must.Do(t, errors.Join(err, balancer.AddRoute(lab.Default, balancer.Gateway4),
		balancer.AddRoute(lab.Default6, balancer.Gateway6)))
	labtest.Until(t, lab.Ready, "it is attached again", attached(mode+" (tcx)"))
	s.waitRoutes(t, s.Balancers...)
	s.waitAnswered(t)
}

// severalUplinks: the balancer receives requests on one uplink and reaches the servers by another.
func (s *site) severalUplinks(t *testing.T, mode string) {
	balancer := s.Balancers[0]
	inside := []netip.Prefix{
		netip.MustParsePrefix("192.0.2.100/25"), netip.MustParsePrefix("2001:db8:2::100/64"),
	}
	must.Do(t, s.Link(
		lab.End{Host: balancer.Host, Name: "eth1", Addresses: inside},
		lab.End{Host: s.Switch, Name: "lb1", Bridge: "switch"},
		lab.LinkOptions{SoftwareChecksums: mode == "xdp"}))
	must.Do(t, s.Agents[0].Terminate(t.Context(), lab.Ready))
	s.Config[0].Interfaces = []string{"eth0", "eth1"}
	must.Do(t, errors.Join(s.Agents[0].Configure(s.Config[0].TOML()), s.Agents[0].Start()))
	s.waitRoutes(t, balancer)
	s.waitAnswered(t)
	s.checkAnswered(t, 200)
	for _, w := range s.web {
		clients := w.Clients()
		if clients[inside[0].Addr()] == 0 || clients[inside[1].Addr()] == 0 {
			t.Errorf("%s had requests from %v; want the balancer's addresses on eth1", w.Name, clients)
		}
	}
	labtest.Exchange(t, labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip4, 9000), 50), "over two uplinks")
}
