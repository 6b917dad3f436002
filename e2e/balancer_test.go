package e2e

import (
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
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
