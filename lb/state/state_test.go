package state

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestSaveAndLoad(t *testing.T) {
	f := New(filepath.Join(t.TempDir(), "new"), "things", 1)
	var got map[string]int
	if found, err := f.Load(&got); found || err != nil {
		t.Errorf("no file: %t, %v", found, err)
	}
	for _, want := range []int{1, 2} {
		must.Do(t, f.Save(map[string]int{"a": want}))
		if found, err := f.Load(&got); !found || err != nil || got["a"] != want {
			t.Errorf("%t, %v, %v", found, err, got)
		}
	}
}

// A file that is cut off, changed, of another version or of another name is not loaded.
func TestDamagedFilesAreNotLoaded(t *testing.T) {
	f := New(t.TempDir(), "things", 1)
	must.Do(t, f.Save([]string{"one", "two"}))
	whole := must.Get(os.ReadFile(f.Path()))(t)
	for what, text := range map[string][]byte{
		"empty":           {},
		"cut off":         whole[:len(whole)-2],
		"changed":         bytes.Replace(whole, []byte("two"), []byte("owt"), 1),
		"another version": bytes.Replace(whole, []byte("things 1"), []byte("things 2"), 1),
		"another name":    bytes.Replace(whole, []byte("things"), []byte("others"), 1),
		"no header":       []byte(`["one"]`),
	} {
		must.Do(t, os.WriteFile(f.Path(), text, 0o600))
		got := []string{"before"}
		if found, err := f.Load(&got); found || !errors.Is(err, ErrDamaged) || got[0] != "before" {
			t.Errorf("%s: %t, %v, %q", what, found, err, got)
		}
	}
	number := New(t.TempDir(), "things", 1)
	must.Do(t, number.Save(1))
	if found, err := number.Load(new([]string)); found || !errors.Is(err, ErrDamaged) {
		t.Errorf("another type: %t, %v", found, err)
	}
	if err := New("/proc/none", "things", 1).Save(1); err == nil {
		t.Error("a file was saved where none can be")
	}
}
