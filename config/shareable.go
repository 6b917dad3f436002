package config

import (
	"errors"
	"regexp"
	"strings"

	"github.com/BurntSushi/toml"
)

// Shareable returns a configuration's text for a report: without comments, and without what a check may send as a
// password, namely payloads, the query of paths, and the user and query of URLs. Valid files contain no other secrets,
// but name files with them. Invalid ones may have tried, so the values of keys that sound like secrets are left out,
// and the error does not quote the text.
func Shareable(text string) (string, error) {
	var all map[string]any
	if _, err := toml.Decode(text, &all); err != nil {
		return "", errors.New("the configuration is not valid TOML")
	}
	shareable("", all)
	var b strings.Builder
	err := toml.NewEncoder(&b).Encode(all)
	return b.String(), err
}

var (
	secretKey = regexp.MustCompile(`(?i)^(send|expect_body|.*(password|secret|token|key))$`)
	secretURL = regexp.MustCompile(`(?s)://.*@`)
	query     = regexp.MustCompile(`(?s)[?#].*`)
)

// shareable returns the value of a key, or of an element of its list, without secrets. It changes tables in place.
func shareable(key string, value any) any {
	if value != "" && secretKey.MatchString(key) {
		return redacted
	}
	switch x := value.(type) {
	case map[string]any:
		for k := range x {
			x[k] = shareable(k, x[k])
		}
	case []map[string]any:
		for _, table := range x {
			shareable(key, table)
		}
	case []any:
		for i := range x {
			x[i] = shareable(key, x[i])
		}
	case string:
		return query.ReplaceAllString(secretURL.ReplaceAllString(x, "://"+redacted+"@"), "?"+redacted)
	}
	return value
}
