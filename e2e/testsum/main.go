// Testsum reads what "go test -json" says on standard input and tells a person: the output of what failed, a line for
// each package, the slowest tests, and, alone on the last line, how many tests passed, failed and were skipped.
//
// Only leaves are counted: a test with subtests is as good as they are, unless it fails or is skipped by itself. A package
// that does not build, panics, runs out of time or is cut off counts as a failure, and so does it when no test ran. The
// exit status is 1 when anything failed and, with STEELYARD_CI=1, when anything was skipped: a check that is skipped for
// good is no check.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"
)

func main() {
	os.Exit(run(os.Stdin, os.Stdout, os.Getenv("STEELYARD_CI") == "1"))
}

// event is one line of test2json, or of "go build -json".
type event struct {
	Action      string
	Package     string
	ImportPath  string
	Test        string
	Elapsed     float64
	Output      string
	FailedBuild string
}

type test struct {
	pkg, name string // name is empty for the package itself
	action    string // how it ended; empty while it runs
	elapsed   float64
	output    []string
	ran       bool
	parent    bool // it has subtests
}

type summary struct {
	tests  map[string]*test    // by package and name
	builds map[string][]string // what the compiler said, by import path

	passed, failed, skipped int
}

func run(in io.Reader, out io.Writer, strict bool) int {
	s := summary{tests: map[string]*test{}, builds: map[string][]string{}}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil || e.Action == "" {
			fmt.Fprintln(out, lines.Text()) // the go command itself speaks
			continue
		}
		s.take(e, out)
	}
	s.report(out)
	if err := lines.Err(); err != nil {
		s.failed++
		fmt.Fprintf(out, "\n=== FAIL reading the test output: %v\n", err)
	}
	if s.passed+s.failed+s.skipped == 0 {
		s.failed++
		fmt.Fprintln(out, "\n=== FAIL no test ran")
	}
	fmt.Fprintf(out, "\n%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped)
	if s.failed > 0 || strict && s.skipped > 0 {
		return 1
	}
	return 0
}

func (s *summary) test(pkg, name string) *test {
	key := pkg + " " + name
	if s.tests[key] == nil {
		s.tests[key] = &test{pkg: pkg, name: name}
	}
	return s.tests[key]
}

func (s *summary) take(e event, out io.Writer) {
	if e.Action == "build-output" || e.Action == "build-fail" {
		s.builds[e.ImportPath] = append(s.builds[e.ImportPath], e.Output)
		return
	}
	t := s.test(e.Package, e.Test)
	switch e.Action {
	case "run":
		t.ran = true
		// A name may have slashes of its own, so not every prefix is a test.
		for i, c := range e.Test {
			if c == '/' {
				s.test(e.Package, e.Test[:i]).parent = true
			}
		}
	case "output":
		t.output = append(t.output, e.Output)
	case "pass", "fail", "skip":
		t.action, t.elapsed = e.Action, e.Elapsed
		if e.Action == "pass" {
			t.output = nil
		}
		if e.FailedBuild != "" {
			t.output = append(s.builds[e.FailedBuild], t.output...)
		}
		if e.Test == "" {
			fmt.Fprintf(out, "%-4s  %s  %s\n", e.Action, e.Package, seconds(e.Elapsed))
		}
	}
}

// report counts, and shows what failed or was skipped and the tests that took longest.
func (s *summary) report(out io.Writer) {
	all := slices.SortedFunc(maps.Values(s.tests), func(a, b *test) int { // children before parents
		return cmp.Or(cmp.Compare(a.pkg, b.pkg), -cmp.Compare(a.name, b.name))
	})
	explained := map[string]bool{} // packages and parents in which something counted failed
	for _, t := range all {
		if t.name != "" && t.action == "" && !t.ran {
			continue // a prefix of a name, and no test
		}
		switch leaf := t.name != "" && !t.parent; t.action {
		case "pass":
			if leaf {
				s.passed++
			}
		case "skip":
			if t.name != "" { // a package without tests is no skip
				s.skipped++
				t.show(out, "SKIP")
			}
		case "fail", "": // what never ended was cut off: by a panic, a timeout, the end of the go command
			by := explained[t.pkg+" "+t.name]
			if !by {
				s.failed++
			}
			if !by || t.says() {
				t.show(out, "FAIL")
			}
			for name := t.name; name != ""; {
				name = name[:max(0, strings.LastIndexByte(name, '/'))]
				explained[t.pkg+" "+name] = true
			}
		}
	}
	slowest(out, all)
}

func (t *test) show(out io.Writer, what string) {
	fmt.Fprintf(out, "\n=== %s %s\n%s", what, strings.TrimSpace(t.pkg+" "+t.name), strings.Join(t.output, ""))
}

// noise is what package testing and the go command say of every test.
var noise = regexp.MustCompile(`^\s*(=== (RUN|PAUSE|CONT|NAME) |--- (PASS|FAIL|SKIP): |(PASS|FAIL)\s*$|FAIL\t|exit status |coverage: |\s*$)`)

// says reports whether there is anything in the output that the failures of subtests do not tell: a panic in a subtest
// is in the output of its parent, for one.
func (t *test) says() bool {
	return slices.ContainsFunc(t.output, func(line string) bool { return !noise.MatchString(line) })
}

func slowest(out io.Writer, all []*test) {
	var leaves []*test
	for _, t := range all {
		if t.name != "" && !t.parent && t.elapsed >= 1 {
			leaves = append(leaves, t)
		}
	}
	slices.SortStableFunc(leaves, func(a, b *test) int { return -cmp.Compare(a.elapsed, b.elapsed) })
	if len(leaves) > 0 {
		fmt.Fprintln(out, "\nslowest:")
	}
	for _, t := range leaves[:min(10, len(leaves))] {
		fmt.Fprintf(out, "  %6s  %s %s\n", seconds(t.elapsed), t.pkg, t.name)
	}
}

func seconds(s float64) string {
	return time.Duration(s * float64(time.Second)).Round(10 * time.Millisecond).String()
}
