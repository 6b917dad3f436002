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

// TestApply checks that a configuration that nobody confirms goes back by itself: when its time ends, when the
// operator's connection is cut, and when the agent is killed. A confirmed one replaces the file. Connections that no
// change concerns continue all the time.
func TestApply(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	s, c := newUnitSite(t, "tc")
	for _, n := range s.Servers {
		s.echo = append(s.echo, labtest.TCPEcho(t, n, 9000))
	}
	c.Services[0].Check = lab.AgentCheck{Type: "tcp"}
	before := c.TOML()
	a := labtest.Agent(t, s.Balancers[0].Host, binary, c)
	s.waitRoutes(t, s.Balancers[0])
	conns := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip4, 9000), 20)
	after := before + "\n[[service]]\nname = \"night\"\naddress = \"203.0.113.99\"\nports = [\"80:8080\"]\n" +
		"backends = [\"" + s.Servers[0].V4.String() + "\"]\n"
	const file = "/run/steelyard-lab/new.toml"
	must.Do(t, a.WriteFile(file, after, 0o600))
	night := labtest.HostRoute(netip.MustParseAddr("203.0.113.99"))
	tries := func(args ...string) {
		t.Helper()
		out := must.Get(a.CLI(t.Context(), append([]string{"apply", file}, args...)...))(t)
		must.True(t, strings.HasPrefix(out, "+ service night"), "apply: %s", out)
		must.Get(s.Topology.Router.WaitNextHops(t.Context(), lab.Ready, night, s.Balancers[0].V4))(t)
	}
	gone := func(why string) {
		t.Helper()
		must.Get(s.Topology.Router.WaitNextHops(t.Context(), lab.Ready, night))(t)
		text := must.Get(a.ReadFile(lab.AgentConfigPath))(t)
		shown := must.Get(a.CLI(t.Context(), "config", "show"))(t)
		must.True(t, text == before && strings.TrimSpace(shown) == strings.TrimSpace(before),
			"%s: on the disk\n%s\nactive\n%s", why, text, shown)
		labtest.Exchange(t, conns, why)
	}

	tries("--confirm", "5s")
	must.Do(t, shows(t, a, "the active configuration ends at", "status"))
	gone("not confirmed")
	must.True(t, a.Process().Log.Contains("configuration not confirmed in time"), "%s", a.Process().Log.Tail(20))

	terminal := must.Get(a.Host.Start(lab.Command{
		Path: "script", Args: []string{"-qec", binary + " apply " + file + " --confirm 6s", "/dev/null"}, Abrupt: true,
	}))(t)
	labtest.Until(t, "the command waits on its terminal", func() error {
		return labtest.ErrorIf(!terminal.Log.Contains("Press Enter"), "%s", terminal.Log.Tail(9))
	})
	must.Get(s.Topology.Router.WaitNextHops(t.Context(), lab.Ready, night, s.Balancers[0].V4))(t)
	terminal.Kill()
	gone("the connection is cut")

	tries("--confirm", "1h")
	a.Kill()
	must.Do(t, errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready)))
	gone("the agent is killed")

	tries("--confirm", "1h")
	must.Get(a.CLI(t.Context(), "confirm"))(t)
	text := must.Get(a.ReadFile(lab.AgentConfigPath))(t)
	must.True(t, text == after, "confirmed: on the disk\n%s", text)
	must.Do(t, a.Configure(text))
	a.Kill()
	must.Do(t, errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready)))
	must.Get(s.Topology.Router.WaitNextHops(t.Context(), lab.Ready, night, s.Balancers[0].V4))(t)
	labtest.Exchange(t, conns, "confirmed")
}
