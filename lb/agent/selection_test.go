package agent

import (
	"fmt"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A node has the peers whose node_selector its labels meet, follows their changes and those of the configuration, and
// has them when it starts anew without the API server.
func TestPeersOfANode(t *testing.T) {
	const text = `
[kubernetes]
[bgp]
asn = 64512
listen_port = -1
peers = [
  { address = "127.0.0.1", asn = 64500 },
  { address = "127.0.0.2", asn = 64500, node_selector = "rack=a" },
  { address = "127.0.0.3", asn = 64500, node_selector = "rack in (b, c), !canary" },
]
`
	dir, cfg := t.TempDir(), parse(t, text)
	start := func() (setLabels func(map[string]string), want func(step string, peers ...string)) {
		t.Helper()
		a := must.Get(newAnnouncers(cfg, facts, dir, prometheus.NewRegistry(), nil, discard))(t)
		return a.setLabels, func(step string, peers ...string) {
			t.Helper()
			labtest.Until(t, 10*time.Second, step, func() error {
				var got []string
				for _, p := range a.peers() {
					got = append(got, p.Peer.String())
				}
				return labtest.ErrorIf(fmt.Sprint(got) != fmt.Sprint(peers), "peers %v", got)
			})
		}
	}
	setLabels, want := start()
	want("the labels are not known", "127.0.0.1")
	setLabels(map[string]string{"rack": "a"})
	want("rack a", "127.0.0.1", "127.0.0.2")
	setLabels(map[string]string{"rack": "b", "canary": ""})
	want("a canary", "127.0.0.1")
	setLabels(map[string]string{"rack": "b"})
	want("rack b", "127.0.0.1", "127.0.0.3")
	_, want = start()
	want("the next start", "127.0.0.1", "127.0.0.3")

	cfg.Kubernetes = nil
	_, want = start()
	want("without Kubernetes", "127.0.0.1", "127.0.0.2", "127.0.0.3")
}
