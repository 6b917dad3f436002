package datapath

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "rewrite docs/reasons.md")

const reasonsPage = "../docs/reasons.md"

// The page has every reason, in the words of the only list.
func TestReasonsAreDocumented(t *testing.T) {
	var page strings.Builder
	page.WriteString("# Why a packet went where it went\n\nThe label `reason` of `steelyard_datapath_packets_total`. Packets that are no concern of Steelyard are not counted.\n\n" +
		"| reason | who may want to act | what it means |\n|---|---|---|\n")
	names := map[string]bool{"none": true, "not_ours": true, "max": true}
	for _, r := range Reasons() {
		if r.Name == "not_ours" {
			continue
		}
		names[r.Name] = true
		fmt.Fprintf(&page, "| `%s` | %s | %s |\n", r.Name, r.Who, r.Text)
	}
	all, err := reasonNames()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range all {
		if !names[name] {
			t.Errorf("the comment of reason %q in bpf/types.h does not say who may want to act", name)
		}
	}
	if *update {
		if err := os.WriteFile(reasonsPage, []byte(page.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if have, err := os.ReadFile(reasonsPage); err != nil || string(have) != page.String() {
		t.Errorf("docs/reasons.md is not what bpf/types.h says (%v); run go test ./datapath -run Documented -update", err)
	}
}
