package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

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
