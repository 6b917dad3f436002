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
		if !r.Contains(r.From) || !r.Contains(r.To) || r.Contains(r.From.Prev()) || r.Contains(r.To.Next()) {
			t.Errorf("%s has other limits", c.want)
		}
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

// Each key of the reference with any value: a configuration, or complete errors.
func FuzzValues(f *testing.F) {
	b := must.Get(os.ReadFile("reference.toml"))(f)
	var keys []int // the lines "key = value"
	lines := strings.Split(string(b), "\n")
	for i, line := range lines {
		if key, _, ok := strings.Cut(line, "="); ok && !strings.ContainsAny(strings.TrimSpace(key), " #\"") {
			keys = append(keys, i)
		}
	}
	if len(keys) < 50 {
		f.Fatalf("%d keys in the reference", len(keys))
	}
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
		// fmt does not call methods of what is in an unexported field.
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
	if a.Reveal() != "x" || !a.IsSet() {
		t.Errorf("got %q", a.Reveal())
	}
	if zero := NewSecret(""); zero.IsSet() || zero.Reveal() != "" || zero.String() != "" {
		t.Errorf("the zero secret is %q", zero.Reveal())
	}
}

func TestSecretOpenToAllWorksWithAWarning(t *testing.T) {
	dir := t.TempDir()
	must.Do(t, os.WriteFile(filepath.Join(dir, "open.key"), []byte("password\n"), 0o644))
	const text = "[bgp]\nasn = 64512\n" +
		"peers = [{ address = \"192.0.2.1\", asn = 64500, password_file = \"open.key\" }]\n"
	c := must.Get(Parse(filepath.Join(dir, "steelyard.toml"), []byte(text)))(t)
	must.Equal(t, "password", c.BGP.Peers[0].Password.Reveal())
	const warning = "open to every user of this machine (mode 0644)"
	must.True(t, slices.ContainsFunc(c.Warnings, func(w string) bool { return strings.Contains(w, warning) }),
		"warnings %q; want one about the mode", c.Warnings)
}
