package config

import (
	"fmt"
	"strings"
)

// Error is one thing wrong with a configuration file.
type Error struct {
	File string
	// Line is where it is, counted from 1; for a key that is missing, where its section begins. 0: not known.
	Line int
	// Key is the path of the key, such as service[0].check.interval; "" when the file itself is the problem.
	Key string
	// Object names the thing the key belongs to, such as service "web", for people who do not count from 0; may be "".
	Object string
	// Problem is what is wrong.
	Problem string
	// Hint is what would be right.
	Hint string

	cause error
}

// Error is "file:line: key (object): problem; hint", without the parts that are empty.
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

// Unwrap returns what the operating system said, when that is the problem.
func (e Error) Unwrap() error { return e.cause }

// Errors is everything wrong with a configuration file, in the order of its lines.
type Errors []Error

// Error has one line for each error, and no newline at the end.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i := range e {
		lines[i] = e[i].Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap makes errors.Is and errors.As see each error.
func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i := range e {
		errs[i] = e[i]
	}
	return errs
}

// suggest returns the word that was probably meant by what was written; "" when none is near.
func suggest(written string, words []string) string {
	best, bestDistance := "", len(written)/3+2
	for _, w := range words {
		// A key one level down is meant when its last part is what was written: interval for check.interval.
		last := w[strings.LastIndexByte(w, '.')+1:]
		d := distance(normal(written), normal(last))
		if short := min(len(written), len(last)); short >= 3 && written[:short] == last[:short] {
			d = 1 // addr for address, password for password_file
		}
		if d < bestDistance && d < len(last) {
			best, bestDistance = w, d
		}
	}
	return best
}

// normal removes differences that are not worth a letter: hold-time and HoldTime are hold_time.
func normal(s string) string {
	s = strings.NewReplacer("-", "", "_", "", " ", "").Replace(s)
	return strings.ToLower(s)
}

// distance is the number of letters to insert, delete, replace or swap with a neighbour to get from a to b (optimal
// string alignment).
func distance(a, b string) int {
	const far = 64 // no key is that long
	if len(a) > far || len(b) > far {
		return far
	}
	var before, above, row []int
	for j := 0; j <= len(b); j++ {
		above = append(above, j)
	}
	for i := 1; i <= len(a); i++ {
		row = append(make([]int, 0, len(b)+1), i)
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			d := min(above[j]+1, row[j-1]+1, above[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d = min(d, before[j-2]+1)
			}
			row = append(row, d)
		}
		before, above = above, row
	}
	return above[len(b)]
}
