package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestUnitCapabilitiesSuffice checks that with the unit's capabilities the agent starts, runs exec checks, announces
// over BGP and L2, traces packets, reuses its pinned maps, stops and cleans up.
func TestUnitCapabilitiesSuffice(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	confined := confine(t, unitCapabilities(t))
	for _, mode := range []string{"tc", "xdp"} {
		t.Run(mode, func(t *testing.T) {
			s, config := newUnitSite(t, mode)
			agent := labtest.Agent(t, s.Balancers[0].Host, confined, config)
			s.waitRoutes(t, s.Balancers[0])
			s.checkAnswered(t, 100)
			traced := s.traced(t)
			s.checkAnswered(t, 10)
			lines := ended(t, traced)
			must.True(t, len(lines) > 100, "only %d lines of a trace: %s", len(lines), traced.Log.Tail(3))
			checkReload(t, agent, config)
			s.checkAnswered(t, 100)
			agent.Kill()
			must.Do(t, agent.Start())
			must.Do(t, agent.WaitReady(t.Context(), lab.Ready))
			s.checkAnswered(t, 100)
			must.Do(t, agent.Terminate(t.Context(), lab.Ready))
			must.Get(agent.CLI(t.Context(), "cleanup"))(t)
		})
	}
}

// checkReload runs the unit's ExecReload. It succeeds with a valid file; with an invalid one, it fails and changes
// nothing.
func checkReload(t *testing.T, agent *lab.Agent, config lab.AgentConfig) {
	must.Get(agent.CLI(t.Context(), "reload"))(t)
	must.Do(t, agent.Configure(config.TOML()+"\n[nonsense]\n"))
	out, err := agent.CLI(t.Context(), "reload")
	must.True(t, err != nil && strings.Contains(out+err.Error(), "nonsense: no such section"),
		"reload of an invalid file: %v\n%s", err, out)
	must.Do(t, agent.Configure(config.TOML()))
}

// TestUnitCapabilitiesAreNeeded checks that without any one of them, the agent exits with an error that names it, or
// its status or log shows the problem.
func TestUnitCapabilitiesAreNeeded(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	degrades := map[string]string{ // without the others, the agent exits
		"CAP_NET_BIND_SERVICE": "does not listen on port 179: permission denied",
		"CAP_NET_RAW":          "datapath: open a raw socket (CAP_NET_RAW): ",
		"CAP_SETUID":           "run /bin/true as user nobody: the agent lacks CAP_SETUID",
		"CAP_SETGID":           "run /bin/true as user nobody: the agent lacks CAP_SETGID",
		"CAP_KILL":             "run /bin/true as user nobody: the agent lacks CAP_KILL",
		"CAP_SYS_NICE":         "running BFD without real-time priority (CAP_SYS_NICE)",
	}
	all := unitCapabilities(t)
	s, config := newUnitSite(t, "tc")
	for i, missing := range all {
		t.Run(missing, func(t *testing.T) {
			binary := confine(t, slices.Delete(slices.Clone(all), i, i+1))
			agent, err := lab.StartAgent(s.Balancers[0].Host, lab.AgentOptions{Binary: binary, Config: config.TOML()})
			must.Do(t, err)
			defer agent.Kill()
			if problem := degrades[missing]; problem != "" {
				labtest.Until(t, "a problem in the status or the log", func() error {
					out, err := agent.CLI(t.Context(), "status")
					out += agent.Process().Log.FailureTail(1000)
					return errors.Join(err, labtest.ErrorIf(!strings.Contains(out, problem), "%s", out))
				})
				return
			}
			ctx, cancel := context.WithTimeout(t.Context(), lab.Ready)
			defer cancel()
			err = agent.Process().Wait(ctx)
			exit := new(exec.ExitError)
			must.True(t, errors.As(err, &exit) && exit.ExitCode() == 1, "the agent: %v; want exit status 1", err)
			line := agent.Process().Log.FailureTail(1)
			must.True(t, strings.HasPrefix(line, "steelyard: ") && strings.Contains(line, " lacks "+missing+";"),
				"the end of its log: %q; want an error that names it", line)
			t.Log(line)
		})
	}
}

// newUnitSite returns a site with one load balancer, and the configuration of its agent, which is not started.
func newUnitSite(t *testing.T, mode string) (*site, lab.AgentConfig) {
	s := newBareSite(t, lab.Shape{
		Clients: 1, Balancers: 1, Servers: 3, Wired: true, Links: lab.LinkOptions{SoftwareChecksums: mode == "xdp"},
	})
	for _, n := range s.Servers {
		s.web = append(s.web, labtest.HTTP(t, n, 8080))
	}
	s.Daemon = labtest.Router(t, s.Topology.Router, peers.BIRD, s.RouterConfig())
	c := lab.BGPAgent(s.Balancers[0], labtest.ASN, labtest.RouterASN, s.services(3)...)
	c.Mode, c.L2 = mode, []string{"eth0"}
	for i := range c.Peers {
		c.Peers[i].Extra = "bfd = true"
	}
	check := &c.Services[0].Check
	check.Type, check.Path = "exec", "/bin/true"
	return s, c
}

var boundingSet = regexp.MustCompile(`(?m)^CapabilityBoundingSet=(.*)$`)

// unitCapabilities returns the unit's CapabilityBoundingSet.
func unitCapabilities(t *testing.T) []string {
	unit := must.Get(os.ReadFile("../systemd/steelyard.service"))(t)
	var all []string
	for _, m := range boundingSet.FindAllSubmatch(unit, -1) {
		all = append(all, strings.Fields(string(m[1]))...)
	}
	must.Need(t, len(all) > 0, "the unit has no CapabilityBoundingSet")
	return all
}

// confine returns a program that runs steelyard with these capabilities as its bounding set.
func confine(t *testing.T, capabilities []string) string {
	set := "-all"
	for _, c := range capabilities { // in the notation of setpriv(1)
		set += ",+" + strings.ToLower(strings.TrimPrefix(c, "CAP_"))
	}
	path := filepath.Join(t.TempDir(), "steelyard")
	script := fmt.Sprintf("#!/bin/sh\nexec setpriv --no-new-privs --bounding-set=%s -- '%s' \"$@\"\n", set, binary)
	must.Do(t, os.WriteFile(path, []byte(script), 0o755))
	return path
}
