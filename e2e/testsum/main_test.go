package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// The streams in testdata were recorded from "go test -json" (Go 1.26, -trimpath) with small packages that behave as
// the file name says. cut.json is the beginning of fail.json. The failures are found only from the events.
func TestCount(t *testing.T) {
	for file, want := range map[string]string{
		"pass":      "3 passed, 0 failed, 0 skipped",
		"fail":      "3 passed, 2 failed, 0 skipped",
		"cut":       "2 passed, 2 failed, 0 skipped",
		"panics":    "1 passed, 1 failed, 0 skipped",
		"goroutine": "0 passed, 1 failed, 0 skipped",
		"timeout":   "1 passed, 1 failed, 0 skipped",
		"killed":    "0 passed, 1 failed, 0 skipped",
		"main":      "1 passed, 1 failed, 0 skipped",
		"build":     "0 passed, 1 failed, 0 skipped",
		"vet":       "0 passed, 1 failed, 0 skipped",
		"setup":     "0 passed, 1 failed, 0 skipped",
		"none":      "0 passed, 1 failed, 0 skipped",
		"skip":      "2 passed, 0 failed, 2 skipped",
	} {
		t.Run(file, func(t *testing.T) { check(t, recorded(t, file), true, want) })
	}
}

func TestSeveralPackages(t *testing.T) {
	var all []byte
	for _, file := range []string{"pass", "panics", "build", "skip"} {
		all = append(all, recorded(t, file)...)
	}
	check(t, all, true, "6 passed, 2 failed, 2 skipped")
	check(t, append(recorded(t, "none"), recorded(t, "pass")...), true, "3 passed, 0 failed, 0 skipped")
}

func TestParentsAreNoLeaves(t *testing.T) {
	check(t, []byte(`{"Action":"run","Package":"p","Test":"A"}
{"Action":"run","Package":"p","Test":"A/x/v4"}
{"Action":"run","Package":"p","Test":"A/x/v4/r"}
{"Action":"pass","Package":"p","Test":"A/x/v4/r"}
{"Action":"pass","Package":"p","Test":"A/x/v4"}
{"Action":"pass","Package":"p","Test":"A"}
{"Action":"pass","Package":"p"}`), true, "1 passed, 0 failed, 0 skipped")
	// A parent that skips its rest after a subtest counts as a skip.
	check(t, []byte(`{"Action":"run","Package":"p","Test":"A"}
{"Action":"run","Package":"p","Test":"A/x"}
{"Action":"pass","Package":"p","Test":"A/x"}
{"Action":"skip","Package":"p","Test":"A"}
{"Action":"pass","Package":"p"}`), true, "1 passed, 0 failed, 1 skipped")
}

func TestCutOffBetweenTests(t *testing.T) {
	check(t, []byte(`{"Action":"start","Package":"p"}
{"Action":"run","Package":"p","Test":"A"}
{"Action":"pass","Package":"p","Test":"A"}`), true, "1 passed, 1 failed, 0 skipped")
}

func TestFailureWithoutEvents(t *testing.T) {
	check(t, nil, true, "0 passed, 1 failed, 0 skipped")
	check(t, []byte("go: no such tool\n"), true, "0 passed, 1 failed, 0 skipped")
	check(t, append(recorded(t, "pass"), "{"...), true, "3 passed, 1 failed, 0 skipped")
	check(t, recorded(t, "pass"), false, "3 passed, 1 failed, 0 skipped")
	check(t, recorded(t, "panics"), false, "1 passed, 1 failed, 0 skipped") // not counted twice
}

// The summary repeats the last messages of each failed test.
func TestSummary(t *testing.T) {
	var out strings.Builder
	run(&out, path("fail"), "1")
	want := "FAILED TestTable/bad: a_test.go:9: this is wrong\nFAILED TestTable: a_test.go:8: word of the " +
		"parent\nFAILED TestParentAlone: a_test.go:15: something was left behind\n\n" +
		"3 tests, 5 cases\n3 passed, 2 failed, 0 skipped\n"
	must.True(t, out.String() == want, "%q, want %q", out.String(), want)
}

func TestExitStatus(t *testing.T) {
	for _, tt := range []struct {
		file, status, ci string
		want             int
	}{
		{"pass", "0", "", 0}, {"pass", "0", "1", 0}, {"pass", "1", "", 1}, {"fail", "1", "", 1},
		{"skip", "0", "", 0}, {"skip", "0", "1", 1}, {"missing", "0", "", 1},
	} {
		t.Setenv("STEELYARD_CI", tt.ci)
		var out strings.Builder
		got := run(&out, path(tt.file), tt.status)
		must.True(t, got == tt.want, "%+v: exit status %d:\n%s", tt, got, &out)
		must.True(t, regexp.MustCompile(`\n\d+ passed, \d+ failed, \d+ skipped\n$`).MatchString(out.String()),
			"%s: the counts are not alone on the last line:\n%s", tt.file, &out)
	}
}

func path(name string) string { return filepath.Join("testdata", name+".json") }

func recorded(t *testing.T, name string) []byte {
	t.Helper()
	text := must.Get(os.ReadFile(path(name)))(t)
	return text
}

func check(t *testing.T, events []byte, ok bool, want string) {
	t.Helper()
	_, passed, failed, skipped := count(bytes.NewReader(events), ok)
	got := fmt.Sprintf("%d passed, %d failed, %d skipped", passed, failed, skipped)
	must.True(t, got == want, "%s, want %s", got, want)
}
