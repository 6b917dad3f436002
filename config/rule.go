package config

import (
	"fmt"
	"strings"
)

// Rule is an additional validation of a configuration, for example against the machine or this version's features. It
// also runs on configurations with errors, which may be incomplete (see Report.Valid).
type Rule func(c *Config, r *Report)

// Report collects a Rule's errors and warnings. Keys are paths as in Error.Key; key[0] is the first element of a list.
type Report struct{ d *decoder }

// Valid reports whether the configuration has no errors so far.
func (r *Report) Valid() bool { return len(r.d.errs) == 0 }

// Errorf reports an error. hint says how to fix it.
func (r *Report) Errorf(key, hint, problem string, args ...any) {
	r.item(key).errorf(hint, problem, args...)
}

// Warnf reports a warning.
func (r *Report) Warnf(key, hint, problem string, args ...any) {
	r.item(key).warnf(hint, problem, args...)
}

// item returns the item of a key. If a one-element list is written without brackets, as in address = "192.0.2.1", the
// key has no [0].
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

// KeyOf returns the path of a key in element n of a list of tables, such as service[0].address.
func KeyOf(list string, n int, key string) string { return fmt.Sprintf("%s[%d].%s", list, n, key) }
