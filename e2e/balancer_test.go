package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestOneBalancer covers what happens to a balancer that is alone: nothing hides its failures. One network serves all.
func TestOneBalancer(t *testing.T) {
	t.Parallel()
	variants(t, func(t *testing.T, kind peers.RouterKind, mode string) {
		t.Parallel()
		s := newSite(t, kind, mode, 1, 3)
		t.Run("path MTU", s.pathMTU)
		t.Run("carries datagrams of 60 KB", func(t *testing.T) {
			for _, vip := range vips {
				s.largeDatagrams(t, vip)
			}
		})
		t.Run("the agent is killed", s.killed)
		t.Run("the agent restarts by a signal", s.restartsBySignal)
		t.Run("the agent restarts by a command", s.restartsByCommand)
		t.Run("an address becomes the machine's own", s.addressBecomesOwn)
		t.Run("the uplink is deleted and created again", func(t *testing.T) { s.uplinkRecreated(t, mode) })
		t.Run("several uplinks", func(t *testing.T) { s.severalUplinks(t, mode) })
		t.Run("cleanup", s.cleansUp)
	})
}

// addressBecomesOwn: an address of a service that the machine gets is withdrawn, and its packets reach the machine;
// without it the service has the address again. check and a reload refuse such an address.
func (s *site) addressBecomesOwn(t *testing.T) {
	b, a := s.Balancers[0], s.Agents[0]
	s.checkAnswered(t, 20)
	must.Do(t, b.AddAddress("eth0", labtest.HostRoute(vip4)))
	const reason = "refused: 203.0.113.10 is the address of eth0"
	labtest.Until(t, lab.Ready, "the address is refused", func() error { return shows(t, a, reason, "routes") })
	must.Get(s.Topology.Router.WaitNextHops(t.Context(), lab.Ready, labtest.HostRoute(vip4)))(t)
	own := must.Get(traffic.ServeHTTP(b.Host, "the balancer", netip.AddrPortFrom(vip4, 7000)))(t)
	must.Do(t, s.Topology.Router.AddRoute(labtest.HostRoute(vip4), b.V4))
	labtest.Until(t, lab.Ready, "the machine itself answers there", func() error {
		got, err := s.Client().Get(t.Context(), fmt.Sprintf("http://%s:7000/", vip4))
		return errors.Join(err, labtest.ErrorIf(got.Server != own.Name, "%s answered", got.Server))
	})
	if err := shows(t, a, reason, "check", lab.AgentConfigPath); err == nil {
		t.Error("check accepts the address of this machine")
	}
	if out, err := a.CLI(t.Context(), "reload"); err == nil {
		t.Errorf("a reload accepts the address of this machine: %s", out)
	}
	must.Do(t, errors.Join(
		s.Topology.Router.DeleteRoute(labtest.HostRoute(vip4)), b.DeleteAddress("eth0", labtest.HostRoute(vip4))))
	s.waitRoutes(t, b)
	s.waitAnswered(t)
}

// shows fails unless the output of a command has text.
func shows(t *testing.T, a *lab.Agent, text string, command ...string) error {
	out, err := a.CLI(t.Context(), command...)
	return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, text), "%s", out))
}

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
