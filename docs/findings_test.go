package docs

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The page has every kind of finding.
func TestFindingsAreDocumented(t *testing.T) {
	var page strings.Builder
	page.WriteString("# Findings\n\n" +
		"The findings that `steelyard status` can report. Each has a code, a severity, a text that names the object\n" +
		"and the cause, and a remedy. The verdict is `DOWN` with a finding of severity `down`, `DEGRADED` with one\n" +
		"of severity `degraded`, and `OK` otherwise. The log reports each change of the verdict as\n" +
		"`verdict changed`, and `steelyard_findings{code,severity}` counts the findings.\n\n" +
		"| code | severity | meaning | remedy |\n|---|---|---|---|\n")
	for _, k := range lb.FindingKinds {
		fmt.Fprintf(&page, "| `%s` | %s | %s | %s |\n", k.Code, k.Severity, k.Meaning, k.Remedy)
	}
	if *update {
		must.Do(t, os.WriteFile("findings.md", []byte(page.String()), 0o644))
	}
	if have, err := os.ReadFile("findings.md"); err != nil || string(have) != page.String() {
		t.Errorf("docs/findings.md is not the table of lb/findings.go (%v); run go test ./docs -update", err)
	}
}
