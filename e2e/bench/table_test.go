package main

import (
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/bench/packets"
	"github.com/steelyard-lb/steelyard/e2e/bench/scale"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The page has the measured tables, and the targets, met or missed.
func TestPage(t *testing.T) {
	r := result{
		Machine: "a machine",
		Cost: []packets.Cell{
			{Path: packets.Floor, Load: "1 flow", Min: 20, TimesFloor: 1},
			{Path: "nat", Load: "1 flow", Min: 60, TimesFloor: 3},
		},
		Agent: []scale.Running{{Services: 10_000, Start: 2 * time.Second, Resident: 300e6}},
	}
	got := r.page()
	must.True(t, strings.HasPrefix(got, "# Measurements\n\na machine.\n\n### Targets\n"),
		"the head of the page is wrong:\n%s", got)
	for _, line := range []string{
		"| nat, 1 flow | ≤ 2.2 × floor | 3.00 | missed by a factor of 1.4 |",
		"| start with 10,000 services until in force | ≤ 5 s | 2.00 | met |",
		"| resident memory with 10,000 services | ≤ 150 MB | 300.00 | missed by a factor of 2.0 |",
		"| nat | 60 (3.0) | – | – | – | – |",
	} {
		must.True(t, strings.Contains(got, "\n"+line+"\n"), "there is no line %s in\n%s", line, got)
	}
	must.True(t, !strings.Contains(got, "NaN") && !strings.Contains(got, "nat, 64k"),
		"the page has what was not measured:\n%s", got)
}
