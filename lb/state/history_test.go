package state

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// The last ten texts are kept, each once in a row, in files that nobody else can read.
func TestHistory(t *testing.T) {
	h := NewHistory(filepath.Join(t.TempDir(), "texts"), ".toml")
	if _, found, err := h.Last(); found || err != nil {
		t.Errorf("an empty history: %t, %v", found, err)
	}
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for n := range 12 {
		text := fmt.Sprint("text ", n)
		for range 2 {
			if err := h.Add(text, at.Add(-time.Duration(n)*time.Minute)); err != nil { // the clock goes back
				t.Fatal(err)
			}
		}
		if last, found, err := h.Last(); last != text || !found || err != nil {
			t.Errorf("the last text is %q, %t, %v; want %q", last, found, err, text)
		}
	}
	names, err := h.names()
	if err != nil || len(names) != historyMax || names[9] != "000012-20260102T025305Z.toml" {
		t.Errorf("files %q, %v", names, err)
	}
	if info, err := os.Stat(filepath.Join(h.dir, names[0])); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v; want mode 0600", info, err)
	}
	if err := NewHistory("/proc/none", ".toml").Add("x", at); err == nil {
		t.Error("a text was kept where none can be")
	}
}
