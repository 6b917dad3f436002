package state

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestSaveAndLoad(t *testing.T) {
	f := New(filepath.Join(t.TempDir(), "new"), "things", 1)
	var got map[string]int
	found, err := f.Load(&got)
	must.True(t, !found && err == nil, "no file: %t, %v", found, err)
	for _, want := range []int{1, 2} {
		must.Do(t, f.Save(map[string]int{"a": want}))
		found, err := f.Load(&got)
		must.True(t, found && err == nil && got["a"] == want, "%t, %v, %v", found, err, got)
	}
}

// A truncated or changed file, or one with another version or name, is not loaded.
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
	found, err := number.Load(new([]string))
	must.True(t, !found && errors.Is(err, ErrDamaged), "another type: %t, %v", found, err)
	err = New("/proc/none", "things", 1).Save(1)
	must.True(t, err != nil, "a file was saved where none can be")
}

func TestPrivate(t *testing.T) {
	for _, tt := range []struct {
		name string
		make func(dir string) error
		want string // part of the error, or "" for none and mode 0700
	}{
		{"missing", os.Remove, ""},
		{"readable", func(dir string) error { return os.Chmod(dir, 0o755) }, ""},
		{"group may write", func(dir string) error { return os.Chmod(dir, 0o770) }, `(mode 0770); stop what uses it`},
		{"all may write", func(dir string) error { return os.Chmod(dir, 0o777) }, `"chmod 0700 `},
		{"a link", func(dir string) error {
			if err := os.Remove(dir); err != nil {
				return err
			}
			return os.Symlink(filepath.Dir(dir), dir)
		}, "is a symbolic link"},
		{"another owner", func(dir string) error { return os.Chown(dir, 65534, -1) }, "belongs to user 65534"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			must.Do(t, os.Mkdir(dir, 0o700))
			if err := tt.make(dir); err != nil {
				if os.IsPermission(err) {
					t.Skip("only root can give a directory away")
				}
				t.Fatal(err)
			}
			err := Private(dir)
			if tt.want != "" {
				must.Fail(t, err, tt.want)
				return
			}
			must.Do(t, err)
			if info, err := os.Stat(dir); err == nil && info.Mode().Perm() != 0o700 {
				t.Errorf("mode %04o; want 0700", info.Mode().Perm())
			}
		})
	}
}

// The last ten texts are kept, each once in a row, in files that nobody else can read.
func TestHistory(t *testing.T) {
	h := NewHistory(filepath.Join(t.TempDir(), "texts"), ".toml")
	_, found, err := h.Last()
	must.True(t, !found && err == nil, "an empty history: %t, %v", found, err)
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	for n := range 12 {
		text := fmt.Sprint("text ", n)
		for range 2 {
			if err := h.Add(text, at.Add(-time.Duration(n)*time.Minute)); err != nil { // the clock goes back
				t.Fatal(err)
			}
		}
		last, found, err := h.Last()
		must.True(t, last == text && found && err == nil, "the last text is %q, %t, %v", last, found, err)
	}
	names, err := h.names()
	must.True(t, err == nil && len(names) == historyMax && names[9] == "000012-20260102T025305Z.toml",
		"files %q, %v", names, err)
	must.Equal(t, 0o600, must.Get(os.Stat(filepath.Join(h.dir, names[0])))(t).Mode().Perm())
	err = NewHistory("/proc/none", ".toml").Add("x", at)
	must.True(t, err != nil, "text was kept where none can be")
}
