package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestCommunity(t *testing.T) {
	for _, c := range []struct {
		text string
		want Community
	}{
		{"64512:100", Community{parts: [3]uint32{64512<<16 | 100}}},
		{"0:0", Community{}},
		{"no-export", Community{parts: [3]uint32{0xffffff01}}},
		{"graceful-shutdown", Community{parts: [3]uint32{0xffff0000}}},
		{"4294967295:0:2", Community{kind: large, parts: [3]uint32{4294967295, 0, 2}}},
		{"rt:64512:4294967295", Community{kind: extended, extended: [8]byte{0, 2, 252, 0, 255, 255, 255, 255}}},
		{"soo:192.0.2.1:7", Community{kind: extended, extended: [8]byte{1, 3, 192, 0, 2, 1, 0, 7}}},
		{"rt:4200000000:7", Community{kind: extended, extended: [8]byte{2, 2, 250, 86, 234, 0, 0, 7}}},
	} {
		got, err := ParseCommunity(c.text)
		must.True(t, err == nil && got == c.want && got.String() == c.text,
			"%s: got %#v (%s), %v", c.text, got, got, err)
		_, standard := got.Standard()
		_, large := got.Large()
		if _, extended := got.Extended(); count(standard)+count(large)+count(extended) != 1 {
			t.Errorf("%s: is standard %t, large %t, extended %t", c.text, standard, large, extended)
		}
	}
	must.Equal(t, "no-export", must.Get(ParseCommunity("65535:65281"))(t).String())
}

func count(b bool) int {
	if b {
		return 1
	}
	return 0
}

func TestRange(t *testing.T) {
	for _, c := range []struct{ from, to, want string }{
		{"203.0.113.0", "203.0.113.15", "203.0.113.0/28"},
		{"203.0.113.1", "203.0.113.1", "203.0.113.1"},
		{"203.0.113.1", "203.0.113.2", "203.0.113.1-203.0.113.2"},
		{"2001:db8::", "2001:db8::ffff:ffff:ffff:ffff", "2001:db8::/64"},
	} {
		r := lb.AddrRange{From: netip.MustParseAddr(c.from), To: netip.MustParseAddr(c.to)}
		must.Equal(t, c.want, formatRange(r))
		must.True(t, r.Contains(r.From) && r.Contains(r.To) && !r.Contains(r.From.Prev()) && !r.Contains(r.To.Next()),
			"%s has other limits", c.want)
	}
	v4 := lb.AddrRange{From: netip.MustParseAddr("0.0.0.0"), To: netip.MustParseAddr("255.255.255.255")}
	v6 := lb.AddrRange{From: netip.IPv6Unspecified(), To: netip.IPv6Unspecified()}
	must.True(t, !v4.Contains(v6.From) && !overlap(v4, v6), "an IPv4 range has IPv6 addresses")
}

func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		time.Hour: "1h", 90 * time.Minute: "1h30m", 20 * time.Minute: "20m", 10 * time.Second: "10s",
		time.Hour + time.Second: "1h0m1s", 0: "0s", 500 * time.Millisecond: "500ms", 100 * time.Second: "1m40s",
	} {
		must.Row(t, d, want, short(d))
	}
}

func TestSelector(t *testing.T) {
	for s, want := range map[string]bool{
		"rack=a": true, "rack==a": true, "rack != a": true, "rack": true, "!rack": true,
		"a in (b, c),d notin (e)": true,
		"example.net/rack=a,b":    true, "cpus>4": true, "rack=": true,
		"rack=a b": false, ",": false, "a in b": false, "a=b,": false, "=a": false, "(a)": false, "-a=b": false,
	} {
		must.Row(t, s, want, selectorSyntax.MatchString(s))
	}
}

func TestSuggest(t *testing.T) {
	words := []string{"interval", "timeout", "hold_time", "address", "ports", "password_file", "check.path", "asn"}
	for written, want := range map[string]string{
		"intervall": "interval", "hold-time": "hold_time", "HoldTime": "hold_time", "adress": "address",
		"addr":    "address",
		"tiemout": "timeout", "port": "ports", "path": "check.path", "password": "password_file", "as": "asn",
		"colour": "", "x": "", "": "",
	} {
		must.Row(t, written, want, suggest(written, words))
	}
}

// FuzzValues sets each key of the reference to any value. The result is a configuration or complete errors.
func FuzzValues(f *testing.F) {
	b := must.Get(os.ReadFile("reference.toml"))(f)
	var keys []int // indexes of the lines "key = value"
	lines := strings.Split(string(b), "\n")
	for i, line := range lines {
		if key, _, ok := strings.Cut(line, "="); ok && !strings.ContainsAny(strings.TrimSpace(key), " #\"") {
			keys = append(keys, i)
		}
	}
	must.Need(f, len(keys) >= 50, "%d keys in the reference", len(keys))
	for i, value := range []string{
		`""`, "0", "-1", "9223372036854775807", "1.5", "true", "[]", "{}", `[""]`, "[{}]", `"203.0.113.0/24"`, `"::/0"`,
		`"80:8080"`, `["1-65535:1"]`, `"-1s"`, `"9999999h"`, `{ type = "http", path = "%" }`, `"64512:1"`, "2026-01-01",
	} {
		f.Add(uint16(i*7), value)
	}
	f.Fuzz(func(t *testing.T, n uint16, value string) {
		changed := append([]string(nil), lines...)
		at := keys[int(n)%len(keys)]
		key, _, _ := strings.Cut(changed[at], "=")
		changed[at] = key + "= " + value
		checkParse(t, strings.Join(changed, "\n"))
	})
}

func TestSecretDoesNotPrint(t *testing.T) {
	const hidden = "hunter2"
	p := Peer{Password: NewSecret(hidden)}
	var out bytes.Buffer
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%d", "%x"} {
		fmt.Fprintf(&out, verb+"\n", p.Password)
		fmt.Fprintf(&out, verb+"\n", p)
		fmt.Fprintf(&out, verb+"\n", &p)
		// fmt calls no methods on values in unexported fields.
		fmt.Fprintf(&out, verb+"\n", struct{ inner Peer }{p})
	}
	for _, h := range []slog.Handler{slog.NewTextHandler(&out, nil), slog.NewJSONHandler(&out, nil)} {
		slog.New(h).Info("peer", "password", p.Password, "peer", p, "list", []Peer{p})
	}
	must.Do(t, json.NewEncoder(&out).Encode(p))
	for _, form := range []string{hidden, fmt.Sprintf("%x", hidden)} {
		must.True(t, !strings.Contains(out.String(), form), "%q is in:\n%s", form, &out)
	}
	must.Equal(t, "[redacted]", fmt.Sprint(p.Password))
}

func TestSecretIsAValue(t *testing.T) {
	a, b := NewSecret("x"), NewSecret(strings.Repeat("x", 1))
	must.True(t, a == b, "equal secrets are not equal")
	must.True(t, a != NewSecret("y") && a != (Secret{}), "different secrets are equal")
	must.True(t, a.Reveal() == "x" && a.IsSet(), "got %q", a.Reveal())
	zero := NewSecret("")
	must.True(t, !zero.IsSet() && zero.Reveal() == "" && zero.String() == "", "the zero secret is %q", zero.Reveal())
}

func TestSecretOpenToAllWorksWithAWarning(t *testing.T) {
	dir := t.TempDir()
	must.Do(t, os.WriteFile(filepath.Join(dir, "open.key"), []byte("password\n"), 0o644))
	const text = "[bgp]\nasn = 64512\n" +
		"peers = [{ address = \"192.0.2.1\", asn = 64500, password_file = \"open.key\" }]\n"
	c := must.Get(Parse(filepath.Join(dir, "steelyard.toml"), []byte(text)))(t)
	must.Equal(t, "password", c.BGP.Peers[0].Password.Reveal())
	const warning = "accessible to every user of this machine (mode 0644)"
	must.True(t, slices.ContainsFunc(c.Warnings, func(w string) bool { return strings.Contains(w, warning) }),
		"warnings %q; want one about the mode", c.Warnings)
}

// tableOf returns a table in which the key k has this value.
func tableOf(value any) *table {
	return &table{d: newDecoder("steelyard.toml"), values: map[string]any{"k": value}}
}

// For a value of the wrong type, each method that reads a key returns the default and reports one error.
func TestWrongTypeIsDefault(t *testing.T) {
	method := func(t *table) any { return word(t, "k", "method", lb.MethodNAT, lb.Methods) }
	for _, c := range []struct {
		name  string
		value any
		read  func(*table) any
		want  any
	}{
		{"str", int64(7), func(t *table) any { return t.str("k", "x") }, ""},
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

// Each method that reads an item and fails reports exactly one error.
func TestWrongItemIsNotRead(t *testing.T) {
	second := func(_ any, ok bool) bool { return ok }
	port := func(i item) bool { return second(i.port()) }
	words := func(i item) bool { return second(i.word("word", []string{"a", "b"})) }
	for _, c := range []struct {
		name         string
		read         func(item) bool
		wrong, right []any
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

// The hint for a number in quotes suggests it without quotes if it is in range, including the limits.
func TestHintOfQuotedNumber(t *testing.T) {
	for s, want := range map[string]string{
		"0": "write a number from 1 to 9", "1": "write 1, without quotes", "9": "write 9, without quotes",
		"10": "write a number from 1 to 9", "x": "write a number from 1 to 9",
	} {
		table := tableOf(s)
		integer(table, "k", 5, 1, 9)
		must.True(t, table.d.errs[0].Hint == want, "%q: hint %s, want %s", s, table.d.errs[0].Hint, want)
	}
}

// If the ranges' sizes differ, the hint suggests a range that ends at 65535 or before.
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
	p, ok := (item{d: newDecoder(""), value: "80-80"}).port()
	must.True(t, ok && p.Last == 0, "80-80: %+v, %t; want a single port", p, ok)
}

// A triple-quoted string may end with one or two quotes that belong to its text, also at the end of the document.
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
		got, ok := parentPath(path)
		must.True(t, got == "" && !ok, "%q: %q, %t, want no parent", path, got, ok)
	}
}

// A secret file may have secretMax bytes, but no more.
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

// Another machine's configuration is valid without its secret files, for all keys that name them.
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
		must.True(t, strings.Contains(said, "/nowhere/"+name+" is not on this machine, so its content is not checked"),
			"%s is not named in the warnings:\n%s", name, said)
	}
	_, err := Parse("steelyard.toml", []byte(text))
	must.True(t, err != nil && strings.Count(err.Error(), "cannot be read") == 6,
		"here: %v; want an error about each of 6 files", err)
}
