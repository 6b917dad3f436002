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

	"github.com/BurntSushi/toml"
	"github.com/google/go-cmp/cmp"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

const positions = `# comment
[node]
name = "lb1"   # x
[bgp]
asn = 64512
peers = [   # list
  { address = "192.0.2.1", asn = 64500,
    hold_time = "9s" },
  { address = "192.0.2.2", ports = ["1",
    "2"] },
]
[[service]]
name = "a"
check = { interval = "nonsense" }
text = """
x = 3 ""\"
"""
[[service]]
name = "b"
[service.check]
interval = "1s"
[[service.backends]]
address = "10.0.0.1"
[[service.backends]]
address = '10.0.0.2'
a.b."c.d" = [[1], [2]]
"\"e\"" = 1
`

func TestScan(t *testing.T) {
	want := []position{
		{"node", "node", 2},
		{"node.name", "node.name", 3},
		{"bgp", "bgp", 4},
		{"bgp.asn", "bgp.asn", 5},
		{"bgp.peers", "bgp.peers", 6},
		{"bgp.peers[0]", "", 7},
		{"bgp.peers[0].address", "bgp.peers.address", 7},
		{"bgp.peers[0].asn", "bgp.peers.asn", 7},
		{"bgp.peers[0].hold_time", "bgp.peers.hold_time", 8},
		{"bgp.peers[1]", "", 9},
		{"bgp.peers[1].address", "bgp.peers.address", 9},
		{"bgp.peers[1].ports", "bgp.peers.ports", 9},
		{"bgp.peers[1].ports[0]", "", 9},
		{"bgp.peers[1].ports[1]", "", 10},
		{"service[0]", "service", 12},
		{"service[0].name", "service.name", 13},
		{"service[0].check", "service.check", 14},
		{"service[0].check.interval", "service.check.interval", 14},
		{"service[0].text", "service.text", 15},
		{"service[1]", "service", 18},
		{"service[1].name", "service.name", 19},
		{"service[1].check", "service.check", 20},
		{"service[1].check.interval", "service.check.interval", 21},
		{"service[1].backends[0]", "service.backends", 22},
		{"service[1].backends[0].address", "service.backends.address", 23},
		{"service[1].backends[1]", "service.backends", 24},
		{"service[1].backends[1].address", "service.backends.address", 25},
		{`service[1].backends[1].a.b."c.d"`, `service.backends.a.b."c.d"`, 26},
		{`service[1].backends[1].a.b."c.d"[0]`, "", 26},
		{`service[1].backends[1].a.b."c.d"[0][0]`, "", 26},
		{`service[1].backends[1].a.b."c.d"[1]`, "", 26},
		{`service[1].backends[1].a.b."c.d"[1][0]`, "", 26},
		{`service[1].backends[1]."\"e\""`, `service.backends."\"e\""`, 27},
	}
	must.Equal(t, want, scan(positions))
}

// A file is scanned only up to its findings, because scanning takes as long as parsing.
func TestPositionsAreOfFindings(t *testing.T) {
	const valid = "[admin]\n[[service]]\nname = \"web\"\naddress = \"203.0.113.10\"\nports = [\"80\"]\n" +
		"backends = [\"10.0.0.1\"]\n%s[bgp]\nasn = 64512\n[[bgp.peers]]\naddress = \"192.0.2.1\"\nasn = 64513\n%s"
	for _, tt := range []struct {
		service, peer string
		lines         int
	}{{"", "", 1}, {"check = 1\n", "", 7}, {"", "weighted = 1\n", 12}} {
		d := newDecoder("f")
		c, err := d.decode(fmt.Appendf(nil, valid, tt.service, tt.peer))
		must.True(t, d.scanner.line == tt.lines,
			"%q, %q: scanned to line %d; %v, %v", tt.service, tt.peer, d.scanner.line, c, err)
	}
}

// keys returns a document's keys according to the parser and the scanner, or false if it is not TOML.
func keys(text string) (parser, scanner []string, ok bool) {
	var m map[string]any
	md, err := toml.Decode(text, &m)
	if err != nil {
		return nil, nil, false
	}
	for _, k := range md.Keys() {
		path := ""
		for _, part := range k {
			path = joinKey(path, part)
		}
		parser = append(parser, path)
	}
	for _, p := range scan(text) {
		if p.Key != "" {
			scanner = append(scanner, p.Key)
		}
	}
	return parser, scanner, true
}

func tomlFiles(t testing.TB) []string {
	t.Helper()
	var texts []string
	for _, pattern := range []string{"*.toml", "testdata/*.toml", "testdata/bad/*.toml"} {
		files, err := filepath.Glob(pattern)
		must.Need(t, err == nil && len(files) != 0, "%s: no files: %v", pattern, err)
		for _, f := range files {
			text := must.Get(os.ReadFile(f))(t)
			texts = append(texts, string(text))
		}
	}
	return append(texts, positions)
}

// FuzzScan checks that the scanner finds the same keys as the parser, in the same order.
func FuzzScan(f *testing.F) {
	for _, text := range tomlFiles(f) {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, p := range scan(text) {
			must.Need(t, p.Line >= 1 && p.Line <= strings.Count(text, "\n")+1, "%+v is not a line of the text", p)
		}
		parser, scanner, ok := keys(text)
		if ok && !cmp.Equal(parser, scanner) {
			t.Fatalf("parser -, scanner +:\n%s", cmp.Diff(parser, scanner))
		}
	})
}

// FuzzParse finds panics and incomplete errors.
func FuzzParse(f *testing.F) {
	for _, text := range tomlFiles(f) {
		f.Add(text)
	}
	f.Fuzz(checkParse)
}

// checkParse fails if an error is incomplete.
func checkParse(t *testing.T, text string) {
	c, err := Parse("/nowhere/steelyard.toml", []byte(text))
	if err == nil {
		must.Need(t, c != nil, "neither a configuration nor an error")
		return
	}
	errs, ok := err.(Errors)
	must.Need(t, ok && len(errs) != 0 && c == nil, "got %v and %#v", c, err)
	for i, e := range errs {
		must.True(t, e.Problem != "" && e.Hint != "" && e.Line >= 1 && e.Line <= strings.Count(text, "\n")+1,
			"incomplete error: %#v", e)
		if i > 0 && errs[i-1].Line > e.Line {
			t.Errorf("line %d comes after line %d", e.Line, errs[i-1].Line)
		}
	}
}

var update = flag.Bool("update", false, "rewrite the want lines of testdata/bad; review the difference")

var wantLine = regexp.MustCompile(`(?m)^# want ?(.*)\n`)

// secrets creates a directory with good and bad secret files.
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
		if err := os.Chmod(name, f.mode); err != nil { // regardless of the umask
			t.Fatal(err)
		}
	}
	must.Do(t, os.Mkdir(filepath.Join(dir, "directory.key"), 0o700))
	must.Do(t, syscall.Mkfifo(filepath.Join(dir, "pipe.key"), 0o600))
	return dir
}

// authority returns a PEM certificate.
var authority = sync.OnceValue(func() string {
	s := httptest.NewTLSServer(nil)
	defer s.Close()
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}))
})

// TestBad compares the errors of each file in testdata/bad with its "# want line: …" comments.
func TestBad(t *testing.T) {
	files, err := filepath.Glob("testdata/bad/*.toml")
	must.Need(t, err == nil && len(files) != 0, "no files: %v", err)
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

// errorsOf returns the errors in text, without the file name.
func errorsOf(t *testing.T, dir string, text []byte) string {
	t.Helper()
	file := filepath.Join(dir, "steelyard.toml")
	c, err := Parse(file, text)
	var errs Errors
	must.Need(t, errors.As(err, &errs) && c == nil, "got %v and error %v, want only Errors", c, err)
	for _, e := range errs {
		must.True(t, e.Hint != "" && e.Problem != "" && e.Line >= 1, "incomplete error: %#v", e)
	}
	got := strings.ReplaceAll(errs.Error()+"\n", file+":", "")
	return strings.ReplaceAll(got, dir, "DIR")
}

// rewrite replaces the want lines, at the beginning of the file if an error is at its end.
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
