package config

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
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
	if err := json.NewEncoder(&out).Encode(p); err != nil {
		t.Fatal(err)
	}
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
	if a != b || (Peer{Password: a}) != (Peer{Password: b}) {
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
