// Testsum counts the tests in gotestsum's events (--jsonfile), and prints the counts on the last line. The line before
// has the numbers of tests and of their cases, the leaves.
//
// It counts leaves. A test with subtests counts only if it is skipped, or fails although no subtest does. A package
// that fails without a failed test counts as one failure, as does a run that fails or has no test. The exit status is 1
// if anything failed and, with STEELYARD_CI=1, if anything was skipped. Before the counts, it repeats the last two
// messages of each failed test, because the logs of agents can fill pages.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"strings"
)

// Arguments: gotestsum's event file, and its exit status.
func main() { os.Exit(run(os.Stdout, os.Args[1], os.Args[2])) }

func run(out io.Writer, file, status string) int {
	text, err := os.ReadFile(file)
	if err != nil {
		fmt.Fprintln(out, err)
	}
	for _, line := range failures(bytes.NewReader(text)) {
		fmt.Fprintln(out, line)
	}
	tests, passed, failed, skipped := count(bytes.NewReader(text), status == "0")
	fmt.Fprintf(out, "\n%d tests, %d cases\n", tests, passed+failed+skipped)
	fmt.Fprintf(out, "%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	if failed > 0 || skipped > 0 && os.Getenv("STEELYARD_CI") == "1" {
		return 1
	}
	return 0
}

// source is the place of a test's message, "file_test.go:123: ".
var source = regexp.MustCompile(`^ +\w+_test\.go:\d+: `)

// failures returns, for each failed test with a message, its name and its last two messages.
func failures(events io.Reader) (lines []string) {
	said := map[test][]string{}
	for d := json.NewDecoder(events); ; {
		var e struct{ Action, Package, Test, Output string }
		if d.Decode(&e) != nil {
			return lines
		}
		t := test{e.Package, e.Test}
		switch {
		case e.Action == "output" && source.MatchString(e.Output):
			said[t] = append(said[t][max(0, len(said[t])-1):], strings.TrimSpace(e.Output))
		case e.Action == "fail" && len(said[t]) > 0:
			lines = append(lines, fmt.Sprintf("FAILED %s: %s", e.Test, strings.Join(said[t], "; ")))
		}
	}
}

type test struct{ pkg, name string } // name is empty for the package itself

// count reads events; ok says whether the whole run succeeded.
func count(events io.Reader, ok bool) (tests, passed, failed, skipped int) {
	result := map[test]string{} // stays empty for a test that was cut off
	d := json.NewDecoder(events)
	var err error
	for err == nil {
		var e struct{ Action, Package, Test string }
		err = d.Decode(&e)
		switch t := (test{e.Package, e.Test}); e.Action {
		case "start", "run":
			result[t] = ""
		case "pass", "fail", "skip":
			result[t] = e.Action
		}
	}
	isParent, explained := map[test]bool{}, map[test]bool{} // has subtests; has a failed subtest
	for t, r := range result {
		for bad := r == "" || r == "fail"; t.name != ""; {
			t.name = t.name[:max(0, strings.LastIndexByte(t.name, '/'))]
			isParent[t] = true
			explained[t] = explained[t] || bad
		}
	}
	for t, r := range result {
		if t.name != "" && !strings.Contains(t.name, "/") {
			tests++
		}
		switch {
		case r == "skip" && t.name != "": // a package without tests is not a skip
			skipped++
		case r == "pass" && t.name != "" && !isParent[t]:
			passed++
		case (r == "" || r == "fail") && !explained[t]:
			failed++
		}
	}
	if failed == 0 && (!ok || !errors.Is(err, io.EOF) || passed+skipped == 0) {
		failed++
	}
	return tests, passed, failed, skipped
}
