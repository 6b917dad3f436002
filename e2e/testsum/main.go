// Testsum reads what "go test -json" says on standard input and tells a person: the output of what failed, a line for
// each package, the slowest tests, and, alone on the last line, how many tests passed, failed and were skipped.
//
// Only leaves are counted: a test with subtests is as good as they are, unless it fails by itself. A package that does
// not build, panics or runs out of time counts as a failure. It exits with 1 when anything failed and, with
// STEELYARD_CI=1, when anything was skipped: a check that is skipped for good is no check.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
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
	pkg, name string
	action    string
	elapsed   float64
	output    []string
	ran       bool
	parent    bool // it has subtests
}

type summary struct {
	tests    map[string]*test // by package and name; "" is the package itself
	packages []string         // in the order they ended
	builds   map[string][]string
	stray    []string // lines that are no events
}

func run(in io.Reader, out io.Writer, strict bool) int {
	s := summary{tests: map[string]*test{}, builds: map[string][]string{}}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) != nil || e.Action == "" {
			s.stray = append(s.stray, lines.Text())
			continue
		}
		s.take(e, out)
	}
	return s.report(out, lines.Err(), strict)
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
		if e.FailedBuild != "" {
			t.output = append(s.builds[e.FailedBuild], t.output...)
		}
		if e.Test == "" {
			s.packages = append(s.packages, e.Package)
			fmt.Fprintf(out, "%-4s  %s  %s\n", e.Action, e.Package, seconds(e.Elapsed))
		}
	}
}

func (s *summary) report(out io.Writer, broken error, strict bool) int {
	var passed, failed, skipped int
	var all []*test
	failedIn := map[string]bool{} // packages and parents in which a leaf failed
	for _, t := range s.tests {
		all = append(all, t)
	}
	slices.SortFunc(all, func(a, b *test) int { // children before parents
		return cmp.Or(cmp.Compare(a.pkg, b.pkg), -cmp.Compare(a.name, b.name))
	})
	for _, t := range all {
		if t.ran && t.action == "" {
			t.action = "fail" // it never ended: panic or timeout
		}
		leaf := !t.parent && t.name != ""
		switch {
		case t.action == "fail" && (leaf || !failedIn[t.pkg+" "+t.name]):
			failed++
			fmt.Fprintf(out, "\n=== FAIL %s %s\n%s", t.pkg, t.name, strings.Join(t.output, ""))
		case t.action == "pass" && leaf:
			passed++
		case t.action == "skip" && leaf:
			skipped++
			fmt.Fprintf(out, "\n=== SKIP %s %s\n%s", t.pkg, t.name, strings.Join(t.output, ""))
		}
		if t.action == "fail" {
			for name := t.name; name != ""; {
				name = name[:max(0, strings.LastIndexByte(name, '/'))]
				failedIn[t.pkg+" "+name] = true
			}
		}
	}
	if broken != nil {
		failed++
		fmt.Fprintf(out, "\n=== FAIL reading the test output: %v\n", broken)
	}
	if len(s.packages) == 0 {
		failed++
		fmt.Fprintf(out, "\n=== FAIL no package was tested\n%s\n", strings.Join(s.stray, "\n"))
	}
	slowest(out, all)
	fmt.Fprintf(out, "\n%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	if failed > 0 || strict && skipped > 0 {
		return 1
	}
	return 0
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
