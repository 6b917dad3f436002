package e2e

import (
	"errors"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// tunnelKeyFile is where hosts have their keys.
const tunnelKeyFile = "/run/tunnel.key"

const keyA, keyB = "the first key of the tests", "the second key of the tests"

func writeTunnelKeys(t *testing.T, n lab.Node, keys ...string) {
	t.Helper()
	must.Do(t, n.WriteFile(tunnelKeyFile, strings.Join(keys, "\n"), 0o600))
}

// rotatesKeys: in the documented order of the steps all packets are accepted; servers with another key refuse them.
func (s *site) rotatesKeys(t *testing.T) {
	reload := func(agents []*lab.Agent, nodes []lab.Node, keys ...string) {
		t.Helper()
		for i, a := range agents {
			before := loadedAt(t, a)
			writeTunnelKeys(t, nodes[i], keys...)
			must.Do(t, a.Reload())
			labtest.Until(t, lab.Ready, "the configuration is reloaded", func() error {
				if loadedAt(t, a) == before {
					return errors.New("not yet")
				}
				return nil
			})
		}
	}
	for _, step := range [][]string{{keyA, keyB}, {keyB, keyA}, {keyB}} {
		reload(s.receivers, s.Servers, step...)
		s.checkAnswers(t, step)
		reload(s.Agents, s.Balancers, step...)
		s.checkAnswers(t, step)
	}
	reload(s.receivers, s.Servers, keyA)
	for _, a := range s.Agents {
		labtest.Until(t, lab.Ready, "no check gets through", func() error { return backends(t, a, "healthy", 0) })
	}
	reload(s.receivers, s.Servers, keyB)
	s.waitRoutes(t, s.Balancers...)
	s.checkAnswers(t, []string{"again", keyB})
}

// loadedAt returns when an agent loaded its configuration.
func loadedAt(t *testing.T, a *lab.Agent) string {
	t.Helper()
	var status struct {
		Loaded string `json:"loaded"`
	}
	must.Do(t, a.Get(t.Context(), "/v1/status", &status))
	return status.Loaded
}

func (s *site) checkAnswers(t *testing.T, keys []string) {
	t.Helper()
	for _, vip := range vips {
		if r := s.Load(t, vip, 40); r.Err() != nil {
			t.Errorf("%s, keys %q: %s, %v", vip, keys, r, r.Err())
		}
	}
}
