package agent

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// Addresses that cannot be stored are a problem in the status, and are stored when that is possible.
func TestAssignedThatCannotBeStored(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "state")
	must.Do(t, os.WriteFile(dir, nil, 0o600))
	text := `
[l2]
[[pool]]
name = "p"
addresses = ["203.0.113.16/28"]
[[service]]
name = "web"
pool = "p"
ports = ["80"]
backends = ["10.0.0.21"]
check = "none"
`
	a, _, err := newInMemory(t, text, func(o *Options) { o.KeepDir = dir })
	must.Do(t, err)
	defer a.close()
	const problem = "addresses not stored, services may get others from their pools at the next start"
	stored := func() bool {
		return !slices.ContainsFunc(a.problems.findings(), func(f lb.Finding) bool { return f.Object == problem })
	}
	if stored() {
		t.Fatalf("problems %q; want %q", lbtest.Texts(a.problems.findings()), problem)
	}
	i := slices.IndexFunc(a.tasks, func(t task) bool { return t.name == "addresses to store" })
	go a.tasks[i].run(t.Context())
	must.Do(t, os.Remove(dir))
	eventually(t, "no problem", stored)
	content, err := os.ReadFile(filepath.Join(dir, "addresses.json"))
	if err != nil || !strings.Contains(string(content), `"web":["203.0.113.1`) {
		t.Errorf("stored %q, %v", content, err)
	}
}
