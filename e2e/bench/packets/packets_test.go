package packets

import (
	"io"
	"regexp"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Cost checks some packets on each path, to ensure that it measures the right thing. This test does not check times.
func TestCost(t *testing.T) {
	labtest.Root(t)
	rows := regexp.MustCompile(`^(ipip|gue|dsr|spread|nat|nat, reply|delivery.*|tunnel.*|answer.*|foreign.*)$`)
	cells := must.Get(Cost(CostOptions{Rows: rows, Flows: flows64k, Packets: 1000, Rounds: 1, Log: io.Discard}))(t)
	n := map[string]int{}
	for _, c := range cells {
		n[c.Path]++
	}
	for path, want := range map[string]int{Floor: 4, "ipip": 4, "nat": 3, "tunnel to a pod, tc": 2} {
		must.True(t, n[path] == want, "%s: %d measurements; want %d", path, n[path], want)
	}
}

// With each way, packets arrive at the expected addresses.
func TestLive(t *testing.T) {
	labtest.Root(t)
	rates := must.Get(Live(LiveOptions{Packets: 2000, Rounds: 1, Log: io.Discard}))(t)
	must.Row(t, "measurements", len(ways())*len(LiveLoads), len(rates))
}
