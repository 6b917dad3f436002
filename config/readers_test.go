package config

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// tableOf returns a table with the key k.
func tableOf(value any) *table {
	return &table{d: newDecoder("steelyard.toml"), values: map[string]any{"k": value}}
}

// Each method that reads a key returns the default for a value of the wrong type, and reports one error.
func TestWrongTypeIsDefault(t *testing.T) {
	method := func(t *table) any { return word(t, "k", "method", lb.MethodNAT, lb.Methods) }
	for _, c := range []struct {
		name  string
		value any
		read  func(*table) any
		want  any
	}{
		{"str", int64(7), func(t *table) any { return t.str("k", "def", "x") }, "def"},
		{"boolean", "true", func(t *table) any { return t.boolean("k", true) }, true},
		{"integer", "7", func(t *table) any { return integer(t, "k", 5, 1, 9) }, 5},
		{"integer below", int64(0), func(t *table) any { return integer(t, "k", 5, 1, 9) }, 5},
		{"integer above", int64(10), func(t *table) any { return integer(t, "k", 5, 1, 9) }, 5},
		{"duration", int64(7), func(t *table) any { return t.duration("k", 5, 1, 9) }, time.Duration(5)},
		{"not a duration", "7", func(t *table) any { return t.duration("k", 5, 1, 9) }, time.Duration(5)},
		{"duration below", "0s", func(t *table) any { return t.duration("k", 5, 1, 9) }, time.Duration(5)},
		{"duration above", "10ns", func(t *table) any { return t.duration("k", 5, 1, 9) }, time.Duration(5)},
		{"word", int64(7), method, lb.MethodNAT},
		{"unknown word", "x", method, lb.MethodNAT},
		{"list", "x", func(t *table) any { return len(t.list("k", "x")) }, 0},
		{"tables", "x", func(t *table) any { return len(t.tables("k")) }, 0},
		{"tables of a text", []any{"x"}, func(t *table) any { return len(t.tables("k")) }, 0},
		{"sub", "x", func(t *table) any { return t.sub("k") == nil }, true},
		{"secret", "", func(t *table) any { return t.secret("k", "x", 1, 80) }, Secret{}},
		{"selector", "=", func(t *table) any { return t.selector("k") }, ""},
		{"hold time", "2s", func(t *table) any { return t.holdTime(9 * time.Second) }, 9 * time.Second},
	} {
		table := tableOf(c.value)
		table.values["hold_time"] = c.value
		if got := c.read(table); got != c.want || len(table.d.errs) != 1 {
			t.Errorf("%s: got %v, errors %v; want %v and one error", c.name, got, table.d.errs, c.want)
		}
	}
}

// Each method that reads an item reports failure together with one error.
func TestWrongItemIsNotRead(t *testing.T) {
	second := func(_ any, ok bool) bool { return ok }
	port := func(i item) bool { return second(i.port()) }
	words := func(i item) bool { return second(i.word("word", []string{"a", "b"})) }
	for _, c := range []struct {
		name  string
		read  func(item) bool
		wrong []any
		right []any
	}{
		{"port", port, []any{int64(80), true, "", "0", "65536", "80:0", "80:65536", "90-80", "80:90-80", "1-2:3-5",
			"80/icmp"},
			[]any{"1", "65535", "80:80", "80-80:80-80", "65534-65535:1", "1-2:65534", "53/udp"}},
		{"word", words, []any{int64(7), "", "c"}, []any{"a", "b"}},
		{"digits", func(i item) bool { return second(i.digits("80")) }, []any{int64(7), 1.5}, []any{"", "80"}},
		{"str", func(i item) bool { return second(i.str("x")) }, []any{int64(7), true}, []any{"", "x"}},
		{"integer", func(i item) bool { return second(i.integer(1, 9)) }, []any{"7", 1.5, int64(0), int64(10)},
			[]any{int64(1), int64(9)}},
	} {
		for n, value := range append(c.wrong, c.right...) {
			d, want := newDecoder("steelyard.toml"), n >= len(c.wrong)
			if got := c.read(item{d: d, value: value}); got != want || (len(d.errs) == 0) != want || len(d.errs) > 1 {
				t.Errorf("%s of %v: %t, errors %v; want %t", c.name, value, got, d.errs, want)
			}
		}
	}
}

// The hint for a number in quotes proposes it without quotes if it is in range, also at the limits.
func TestHintOfQuotedNumber(t *testing.T) {
	for s, want := range map[string]string{
		"0": "write a number from 1 to 9", "1": "write 1, without quotes", "9": "write 9, without quotes",
		"10": "write a number from 1 to 9", "x": "write a number from 1 to 9",
	} {
		table := tableOf(s)
		if integer(table, "k", 5, 1, 9); table.d.errs[0].Hint != want {
			t.Errorf("%q: hint %s, want %s", s, table.d.errs[0].Hint, want)
		}
	}
}

// The hint for ports of two sizes is a range that ends at 65535 or before.
func TestHintOfRange(t *testing.T) {
	for s, want := range map[string]string{
		"8000-8009:65526": "", "8000-8009:65527": `"8000-8009:65526"`, "8000-8009:9000-9001": `"8000-8009:9000"`,
	} {
		d := newDecoder("steelyard.toml")
		p, ok := item{d: d, value: s}.port()
		if ok != (want == "") || ok && (p.Port != 8000 || p.Last != 8009 || p.Target != 65526) {
			t.Errorf("%s: %+v, %t", s, p, ok)
		}
		if !ok && !strings.HasSuffix(d.errs[0].Hint, want) {
			t.Errorf("%s: hint %s, want …%s", s, d.errs[0].Hint, want)
		}
	}
	if p, ok := (item{d: newDecoder(""), value: "80-80"}).port(); !ok || p.Last != 0 {
		t.Errorf("80-80: %+v, %t; want a single port", p, ok)
	}
}

// A string in three quotes may end with one or two quotes of its text, and at the end of the document.
func TestScanLongStrings(t *testing.T) {
	for text, want := range map[string]string{
		"a = \"\"\"x\"\"\"":            "1 a",
		"a = \"\"\"x\"\"\"\"":          "1 a",
		"a = \"\"\"x\"\"\"\"\"\nb = 1": "1 a, 2 b",
		"a = '''x''''\nb = 1":          "1 a, 2 b",
		"a = '''\n'\n'''\nb = 1":       "1 a, 4 b",
		"a = \"\"\nb = 1":              "1 a, 2 b",
		"a = ''\nb = 1":                "1 a, 2 b",
		"a = '\\'\nb = 1":              "1 a, 2 b",
		"a = \"\\\\\"\nb = 1":          "1 a, 2 b",
	} {
		var got []string
		for _, p := range scan(text) {
			got = append(got, fmt.Sprintf("%d %s", p.Line, p.Path))
		}
		must.Row(t, text, want, strings.Join(got, ", "))
	}
}

// A path that begins with a separator has no parent.
func TestParentPathOfTheFirstPart(t *testing.T) {
	for _, path := range []string{"[1]", ".a"} {
		if got, ok := parentPath(path); got != "" || ok {
			t.Errorf("%q: %q, %t, want no parent", path, got, ok)
		}
	}
}

// A file of secretMax bytes is read, and one byte more is not.
func TestSecretMax(t *testing.T) {
	dir := t.TempDir()
	for size, want := range map[int]string{
		secretMax: "s has more than 80 bytes", secretMax + 1: "s has 4097 bytes, more than 4096",
	} {
		must.Do(t, os.WriteFile(filepath.Join(dir, "s"), []byte(strings.Repeat("x", size)), 0o600))
		_, err := Parse(filepath.Join(dir, "steelyard.toml"), []byte("[l2]\nsecret_file = \"s\""))
		must.True(t, err != nil && strings.Contains(err.Error(), want), "%d bytes: %v, want %s", size, err, want)
	}
}

// A configuration of another machine, with all keys that name secrets, is valid without these files.
func TestElsewhere(t *testing.T) {
	text := `[datapath]
tunnel_key_file = "/nowhere/tunnel.key"
[bgp]
asn = 64512
peers = [{ address = "192.0.2.1", asn = 64500, password_file = "/nowhere/peer.key" }]
[l2]
members = ["192.0.2.12"]
secret_file = "/nowhere/gossip.key"
[admin]
listen = "192.0.2.11:9911"
token_file = "/nowhere/token"
tls_cert_file = "/nowhere/tls.crt"
tls_key_file = "/nowhere/tls.key"
[[service]]
name = "web"
address = "203.0.113.10"
ports = ["443/tcp"]
backends = ["10.0.0.1"]
forward = "tunnel"
check = { type = "https", host = "www.example.com", tls_ca_file = "/nowhere/ca.pem" }
`
	c := must.Get(ParseElsewhere("steelyard.toml", []byte(text)))(t)
	said := strings.Join(c.Warnings, "\n")
	for _, name := range []string{"tunnel.key", "peer.key", "gossip.key", "token", "tls.key", "ca.pem"} {
		must.True(t, strings.Contains(said, "/nowhere/"+name+" is not on this machine: its content is not checked"),
			"%s is not named in the warnings:\n%s", name, said)
	}
	_, err := Parse("steelyard.toml", []byte(text))
	must.True(t, err != nil && strings.Count(err.Error(), "cannot be read") == 6,
		"here: %v; want an error about each of 6 files", err)
}
