package docs

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// generated pages are as long as the code that they show.
var generated = []string{"datapath.md", "findings.md", "metrics.md", "reasons.md", "reference.md"}

// What is longer is not read: README is one screen, the change log one page, and a page takes a few minutes.
func TestWords(t *testing.T) {
	limits := map[string]int{"../README.md": 700, "../CHANGELOG.md": 600}
	sum := 0
	for _, pattern := range []string{"*.md", "development/*.md"} {
		paths, err := filepath.Glob(pattern)
		if err != nil || len(paths) == 0 {
			t.Fatalf("%s: %d pages, %v", pattern, len(paths), err)
		}
		for _, path := range paths {
			if !slices.Contains(generated, path) {
				limits[path] = 1500
				sum += len(strings.Fields(read(t, path)))
			}
		}
	}
	for path, limit := range limits {
		if n := len(strings.Fields(read(t, path))); n > limit {
			t.Errorf("%s has %d words; the limit is %d", path, n, limit)
		}
	}
	if limit := 24_000; sum > limit {
		t.Errorf("docs has %d words without generated pages; the limit is %d", sum, limit)
	}
}
