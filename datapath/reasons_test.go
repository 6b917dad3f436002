package datapath

import (
	"flag"
	"fmt"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/datapath/internal/bpf"
)

var update = flag.Bool("update", false, "rewrite the generated pages in docs")

const reasonsPage = "../docs/reasons.md"

// docs/reasons.md lists every reason with the comment of enum reason (bpf/types.h).
func TestReasonsAreDocumented(t *testing.T) {
	var page strings.Builder
	page.WriteString("# Reasons\n\n" +
		"The label `reason` of `steelyard_datapath_packets_total` and the reason in `steelyard explain`. " +
		"Packets to other destinations are not counted.\n\n" +
		"| reason | who must act | meaning and remedy |\n|---|---|---|\n")
	names := map[string]bool{"none": true, "not_ours": true, "max": true}
	for _, r := range Reasons() {
		if r.Name == "not_ours" {
			continue
		}
		names[r.Name] = true
		fmt.Fprintf(&page, "| `%s` | %s | %s |\n", r.Name, r.Who, r.Text)
	}
	all, err := bpf.ReadNames()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range all.Reasons {
		if !names[name] {
			t.Errorf("the comment of reason %q in bpf/types.h does not say who must act", name)
		}
	}
	checkPage(t, reasonsPage, page.String())
}
