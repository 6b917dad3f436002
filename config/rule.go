package config

import (
	"fmt"
	"strings"
)

// Rule is an additional validation of a configuration, against what this version implements or against the machine. It
// also runs on configurations with errors, in which parts may be missing (see Report.Valid).
type Rule func(c *Config, r *Report)

// Report collects the findings of a Rule. Keys are paths as in Error.Key; an element of a list is key[0].
type Report struct{ d *decoder }

// Valid reports whether the configuration has no errors so far.
func (r *Report) Valid() bool { return len(r.d.errs) == 0 }

// Errorf reports an error. hint says what would be right.
func (r *Report) Errorf(key, hint, problem string, args ...any) {
	r.item(key).errorf(hint, problem, args...)
}

// Warnf reports a warning.
func (r *Report) Warnf(key, hint, problem string, args ...any) {
	r.item(key).warnf(hint, problem, args...)
}

// item returns the item of a key. For a list with one element written without brackets, as in address = "192.0.2.1",
// this is the key without [0].
func (r *Report) item(key string) item {
	if list, ok := strings.CutSuffix(key, "[0]"); ok && r.d.lineOf(key) == 0 {
		key = list
	}
	i := item{d: r.d, path: key}
	for path, ok := key, true; ok && i.object == ""; path, ok = parentPath(path) {
		i.object = r.d.objects[path]
	}
	return i
}

// KeyOf returns the path of a key of the nth element of a list of tables, such as service[0].address.
func KeyOf(list string, n int, key string) string { return fmt.Sprintf("%s[%d].%s", list, n, key) }
