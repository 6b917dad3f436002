package config

import (
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

var update = flag.Bool("update", false, "rewrite the want lines of testdata/bad; review the difference")

var wantLine = regexp.MustCompile(`(?m)^# want ?(.*)\n`)

// secrets makes a directory with good and bad secret files.
func secrets(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, f := range []struct {
		name, text string
		mode       os.FileMode
	}{
		{"peer.key", "good password\n", 0o600},
		{"gossip.key", "a good secret of enough bytes\n", 0o640},
		{"tunnel.key", "# of a test\nseed: the seed of the hashes\n\na good key of enough bytes\n", 0o600},
		{"empty.key", "\n", 0o600},
		{"open.key", "password\n", 0o644},
		{"short.key", "123456789012345\n", 0o600},
		{"long.key", strings.Repeat("x", 81), 0o600},
		{"lines.key", "one\ntwo\n", 0o600},
		{"ca.pem", authority(), 0o644},
		{"huge.key", strings.Repeat("x", secretMax+1), 0o600},
	} {
		name := filepath.Join(dir, f.name)
		must.Do(t, os.WriteFile(name, []byte(f.text), f.mode))
		if err := os.Chmod(name, f.mode); err != nil { // whatever the umask
			t.Fatal(err)
		}
	}
	must.Do(t, os.Mkdir(filepath.Join(dir, "directory.key"), 0o700))
	must.Do(t, syscall.Mkfifo(filepath.Join(dir, "pipe.key"), 0o600))
	return dir
}

// authority returns a certificate in PEM.
var authority = sync.OnceValue(func() string {
	s := httptest.NewTLSServer(nil)
	defer s.Close()
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}))
})

// TestBad compares the errors of each file in testdata/bad with its "# want line: …" comments.
func TestBad(t *testing.T) {
	files, err := filepath.Glob("testdata/bad/*.toml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	mistakes := 0
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text := must.Get(os.ReadFile(file))(t)
			var want strings.Builder
			for _, m := range wantLine.FindAllSubmatch(text, -1) {
				want.Write(append(m[1], '\n'))
			}
			got := errorsOf(t, secrets(t), text)
			mistakes += strings.Count(got, "\n")
			if diff := cmp.Diff(want.String(), got); diff != "" && *update {
				rewrite(t, file, text, got)
			} else if diff != "" {
				t.Errorf("want -, got +:\n%s", diff)
			}
		})
	}
	must.True(t, mistakes >= 60, "%d mistakes are covered, want at least 60", mistakes)
	t.Logf("%d mistakes in %d files", mistakes, len(files))
}

// errorsOf returns the errors of a text, without the name of its file.
func errorsOf(t *testing.T, dir string, text []byte) string {
	t.Helper()
	file := filepath.Join(dir, "steelyard.toml")
	c, err := Parse(file, text)
	var errs Errors
	if !errors.As(err, &errs) || c != nil {
		t.Fatalf("got %v and error %v, want only Errors", c, err)
	}
	for _, e := range errs {
		must.True(t, e.Hint != "" && e.Problem != "" && e.Line >= 1, "incomplete error: %#v", e)
	}
	got := strings.ReplaceAll(errs.Error()+"\n", file+":", "")
	return strings.ReplaceAll(got, dir, "DIR")
}

// rewrite replaces the want lines in their place: at the beginning of files with an error at the end.
func rewrite(t *testing.T, file string, text []byte, got string) {
	t.Helper()
	first := wantLine.FindIndex(text)
	bare := wantLine.ReplaceAllString(string(text), "")
	var wants strings.Builder
	for line := range strings.Lines(got) {
		fmt.Fprintf(&wants, "# want %s", line)
	}
	out := strings.TrimRight(bare, "\n") + "\n\n" + wants.String()
	if first != nil && first[0] == 0 {
		out = wants.String() + bare
	}
	must.Do(t, os.WriteFile(file, []byte(out), 0o644))
}
