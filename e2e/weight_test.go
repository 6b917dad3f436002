package e2e

import (
	"errors"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestWeight checks that a weight that an operator sets applies at once and after a restart, until it is unset or the
// server's entry in the file changes.
func TestWeight(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	s, c := newUnitSite(t, "tc")
	c.Services[0].Check = lab.AgentCheck{Type: "tcp"}
	a := labtest.Agent(t, s.Balancers[0].Host, binary, c)
	s.waitRoutes(t, s.Balancers[0])
	server := s.Servers[0]
	command := func(want string, args ...string) {
		t.Helper()
		out, err := a.CLI(t.Context(), args...)
		must.True(t, err == nil && strings.Contains(out, want), "%v: %v: %q; want %q", args, err, out, want)
	}
	used := func(when string, want bool) {
		t.Helper()
		labtest.Until(t, when, func() error {
			r := s.Load(t, vip4, 60)
			return errors.Join(r.Err(), labtest.ErrorIf((r.Servers[server.Name()] > 0) != want, "%v", r.Servers))
		})
	}
	used("at first", true)
	command("weights: 0 for "+server.V4.String()+" of web", "weight", "web", server.V4.String(), "0")
	used("with weight 0", false)
	command("weights set by the operator: 0 for", "status")
	command("weight set by the operator; configured: 1", "backends")
	a.Kill()
	must.Do(t, errors.Join(a.Start(), a.WaitReady(t.Context(), lab.Ready)))
	s.waitRoutes(t, s.Balancers[0])
	used("after a restart", false)
	command("weights: as configured", "weight", "web", server.V4.String(), "default")
	used("with the default", true)
	command("weights: 0 for", "weight", "web", server.V4.String(), "0")
	used("with weight 0 again", false)
	for i := range c.Services[0].Backends {
		c.Services[0].Backends[i].Weight = 2
	}
	must.Do(t, a.Configure(c.TOML()))
	command("weight no longer 0, set by the operator", "reload")
	used("with a changed entry", true)
}
