package e2e

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestFilesAreShort: a Go file of the end-to-end tests and of the lab has at most 400 lines, one topic each.
func TestFilesAreShort(t *testing.T) {
	const most = 400
	must.Do(t, filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(path) != ".go" {
			return err
		}
		text, err := os.ReadFile(path)
		if n := bytes.Count(text, []byte("\n")); n > most {
			t.Errorf("%s has %d lines; at most %d, so split it by topic", path, n, most)
		}
		return err
	}))
}
