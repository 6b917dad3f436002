package docs

import (
	"os"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The page has config/reference.toml as it is.
func TestReferenceIsDocumentedWhole(t *testing.T) {
	page := "# Every key\n\n" +
		"[Configuration](configuration.md) describes how to use them.\n\n" +
		"```toml\n" + read(t, "../config/reference.toml") + "```\n"
	if *update {
		must.Do(t, os.WriteFile("reference.md", []byte(page), 0o644))
	}
	if have, err := os.ReadFile("reference.md"); err != nil || string(have) != page {
		t.Errorf("docs/reference.md is not config/reference.toml (%v); run go test ./docs -update", err)
	}
}
