package config

import (
	"fmt"
	"strings"

	"github.com/xrash/smetrics"
)

// Error is one error in a configuration.
type Error struct {
	File string
	// Line is the line, counted from 1, or 0 if it is unknown. For a missing key, it is the line where the section
	// begins.
	Line int
	// Key is the path of the key, such as service[0].check.interval, or "" if the file itself is the problem.
	Key string
	// Object names the object that Key belongs to, such as service "web". It may be "".
	Object  string
	Problem string
	// Hint says how to fix it.
	Hint string

	cause error
}

// Error returns "file:line: key (object): problem; hint" and omits empty parts.
func (e Error) Error() string {
	var b strings.Builder
	b.WriteString(e.File)
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d", e.Line)
	}
	b.WriteString(": ")
	if e.Key != "" {
		b.WriteString(e.Key)
		if e.Object != "" {
			fmt.Fprintf(&b, " (%s)", e.Object)
		}
		b.WriteString(": ")
	}
	b.WriteString(e.Problem)
	if e.Hint != "" {
		b.WriteString("; " + e.Hint)
	}
	return b.String()
}

// Unwrap returns the operating system's error, or nil if there is none.
func (e Error) Unwrap() error { return e.cause }

// Errors are all errors in a configuration file, sorted by line.
type Errors []Error

// Error returns one line per error, without a newline at the end.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i := range e {
		lines[i] = e[i].Error()
	}
	return strings.Join(lines, "\n")
}

func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i := range e {
		errs[i] = e[i]
	}
	return errs
}

// suggest returns the word that the user probably meant, the nearest to written by edit distance, or "" if none is
// near.
func suggest(written string, words []string) string {
	best, bestDistance := "", len(written)/3+2
	for _, w := range words {
		// The last part of a key is sufficient, such as interval for check.interval.
		last := w[strings.LastIndexByte(w, '.')+1:]
		d := smetrics.WagnerFischer(normal(written[:min(len(written), 64)]), normal(last), 1, 1, 1) // no key is longer
		if short := min(len(written), len(last)); short >= 3 && written[:short] == last[:short] {
			d = 1 // addr for address, password for password_file
		}
		if d < bestDistance && d < len(last) {
			best, bestDistance = w, d
		}
	}
	return best
}

// normal removes insignificant differences: hold-time and HoldTime become holdtime.
func normal(s string) string {
	s = strings.NewReplacer("-", "", "_", "", " ", "").Replace(s)
	return strings.ToLower(s)
}
