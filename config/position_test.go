package config

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
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

// A file is scanned for positions up to its findings: to scan it takes as long as to parse it.
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

// keys returns the keys of a document as the parser and as the scanner see them; false when it is not TOML.
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
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: no files: %v", pattern, err)
		}
		for _, f := range files {
			text := must.Get(os.ReadFile(f))(t)
			texts = append(texts, string(text))
		}
	}
	return append(texts, positions)
}

// FuzzScan compares the scanner with the parser: the same keys in the same order.
func FuzzScan(f *testing.F) {
	for _, text := range tomlFiles(f) {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, p := range scan(text) {
			if p.Line < 1 || p.Line > strings.Count(text, "\n")+1 {
				t.Fatalf("%+v is not a line of the text", p)
			}
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

// checkParse finds an incomplete error.
func checkParse(t *testing.T, text string) {
	c, err := Parse("/nowhere/steelyard.toml", []byte(text))
	if err == nil {
		if c == nil {
			t.Fatal("neither a configuration nor an error")
		}
		return
	}
	errs, ok := err.(Errors)
	if !ok || len(errs) == 0 || c != nil {
		t.Fatalf("got %v and %#v", c, err)
	}
	for i, e := range errs {
		if e.Problem == "" || e.Hint == "" || e.Line < 1 || e.Line > strings.Count(text, "\n")+1 {
			t.Errorf("incomplete error: %#v", e)
		}
		if i > 0 && errs[i-1].Line > e.Line {
			t.Errorf("line %d comes after line %d", e.Line, errs[i-1].Line)
		}
	}
}
