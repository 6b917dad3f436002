package config

import (
	"fmt"
	"regexp"
	"strings"
	"unicode/utf8"
)

// Limits for the tunnel key file. The datapath accepts three keys, as many as a rotation needs.
const (
	tunnelKeysMax = 3
	tunnelKeyMin  = 16 // bytes, for each key and the seed
)

// seedWord begins the line with the hash seed.
const seedWord = "seed:"

// otherWord matches the start of a line with another word instead of seedWord. Such a line is an error, not a key.
var otherWord = regexp.MustCompile(`^[A-Za-z_-]+:\s`)

// tunnelKeys reads the tunnel key file that a key names: one key per line, and at most one line with the hash seed.
// Empty lines and lines that begin with # are skipped.
func (t *table) tunnelKeys(key string) (keys []Secret, seed Secret) {
	if i, ok := t.get(key); ok && i.value == "" {
		return nil, Secret{}
	}
	i, name, text, ok := t.secretText(key, "/etc/steelyard/tunnel.key")
	if !ok {
		return nil, Secret{}
	}
	if !utf8.Valid(text) || strings.ContainsRune(string(text), 0) {
		i.errorf("write one key a line, as text", "%s is not text", name)
		return nil, Secret{}
	}
	failed := false
	refuse := func(line int, hint, problem string) {
		i.errorf(hint, "%s, line %d: %s", name, line, problem)
		failed = true
	}
	for n, line := range strings.Split(string(text), "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		value, isSeed := strings.CutPrefix(line, seedWord)
		value = strings.TrimSpace(value)
		switch secret := NewSecret(value); {
		case !isSeed && otherWord.MatchString(line):
			refuse(n+1, `write "seed:" before the hash seed, and nothing before a key`,
				"begins with a word and a colon, but not with \"seed:\"")
		case len(value) < tunnelKeyMin:
			refuse(n+1, fmt.Sprintf("write at least %d, as \"openssl rand -hex 32\" does", tunnelKeyMin),
				fmt.Sprintf("has only %d bytes", len(value)))
		case isSeed && seed.IsSet():
			refuse(n+1, "write one", "is a second seed")
		case isSeed:
			seed = secret
		case len(keys) == tunnelKeysMax:
			refuse(n+1, "remove the oldest", fmt.Sprintf("is one key too many; at most %d are accepted", tunnelKeysMax))
		default:
			keys = append(keys, secret)
		}
	}
	if !failed && len(keys) == 0 {
		i.errorf("write one key a line, as text", "%s has no key", name)
		failed = true
	}
	if failed {
		return nil, Secret{}
	}
	return keys, seed
}
