package docs

import (
	"os"
	"testing"
)

// The page has config/reference.toml as it is.
func TestReferenceIsDocumentedWhole(t *testing.T) {
	page := "# Every key\n\n" +
		"[Configuration](configuration.md) describes how to use them.\n\n" +
		"```toml\n" + read(t, "../config/reference.toml") + "```\n"
	if *update {
		if err := os.WriteFile("reference.md", []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if have, err := os.ReadFile("reference.md"); err != nil || string(have) != page {
		t.Errorf("docs/reference.md is not config/reference.toml (%v); run go test ./docs -update", err)
	}
}
