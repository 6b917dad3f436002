package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

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
		if strings.Contains(out.String(), form) {
			t.Errorf("%q is in:\n%s", form, &out)
		}
	}
	if got := fmt.Sprint(p.Password); got != "[redacted]" {
		t.Errorf("got %q, want [redacted]", got)
	}
}

func TestSecretIsAValue(t *testing.T) {
	a, b := NewSecret("x"), NewSecret(strings.Repeat("x", 1))
	if a != b {
		t.Error("equal secrets are not equal")
	}
	if a == NewSecret("y") || a == (Secret{}) {
		t.Error("different secrets are equal")
	}
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
	if got := c.BGP.Peers[0].Password.Reveal(); got != "password" {
		t.Errorf("password %q", got)
	}
	const warning = "open to every user of this machine (mode 0644)"
	if !slices.ContainsFunc(c.Warnings, func(w string) bool { return strings.Contains(w, warning) }) {
		t.Errorf("warnings %q; want one about the mode", c.Warnings)
	}
}
