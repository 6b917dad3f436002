package config

import (
	"os"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

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
