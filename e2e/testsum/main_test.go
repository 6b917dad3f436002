package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// The streams in testdata were recorded from "go test -json" (Go 1.26, -trimpath) over small packages that do what the
// name of the file says; cut.json is the beginning of fail.json.
func TestSummary(t *testing.T) {
	for _, tt := range []struct {
		file string
		code int
		last string
		has  []string
	}{
		{"pass", 0, "3 passed, 0 failed, 0 skipped", []string{"pass  example.org/rec/pass  "}},
		{"fail", 1, "3 passed, 2 failed, 0 skipped", []string{
			"=== FAIL example.org/rec/fail TestTable/bad\n", "this is wrong", "word of the parent",
			"=== FAIL example.org/rec/fail TestParentAlone\n", "something was left behind",
		}},
		{"cut", 1, "2 passed, 2 failed, 0 skipped", []string{"this is wrong", "=== FAIL example.org/rec/fail TestParentAlone\n"}},
		{"panics", 1, "1 passed, 1 failed, 0 skipped", []string{"=== FAIL example.org/rec/panics TestPanic/sub\n", "panic: out of order"}},
		{"goroutine", 1, "0 passed, 1 failed, 0 skipped", []string{"panic: behind the back"}},
		{"timeout", 1, "1 passed, 1 failed, 0 skipped", []string{
			"panic: test timed out after 1s", "=== FAIL example.org/rec/timeout TestSlow/sub\n",
		}},
		{"killed", 1, "0 passed, 1 failed, 0 skipped", []string{"signal: killed"}},
		{"main", 1, "1 passed, 1 failed, 0 skipped", []string{"=== FAIL example.org/rec/main\n", "3 namespaces were left behind"}},
		{"build", 1, "0 passed, 1 failed, 0 skipped", []string{"undefined: undefined"}},
		{"vet", 1, "0 passed, 1 failed, 0 skipped", []string{"wrong type string"}},
		{"setup", 1, "0 passed, 1 failed, 0 skipped", []string{"no required module provides package example.org/rec/missing"}},
		{"none", 1, "0 passed, 1 failed, 0 skipped", []string{"=== FAIL no test ran"}},
		{"skip", 0, "2 passed, 0 failed, 2 skipped", []string{
			"=== SKIP example.org/rec/skip TestSkipped\n", "needs a thing that is not here", "nor this one",
		}},
	} {
		t.Run(tt.file, func(t *testing.T) {
			check(t, recorded(t, tt.file), false, tt.code, tt.last, tt.has...)
		})
	}
}

func TestSkipsFailWhenStrict(t *testing.T) {
	check(t, recorded(t, "skip"), true, 1, "2 passed, 0 failed, 2 skipped")
	check(t, recorded(t, "pass"), true, 0, "3 passed, 0 failed, 0 skipped")
	// Neither a package without tests nor a parent of tests is a skip; a parent that skips the rest is one.
	check(t, append(recorded(t, "none"), recorded(t, "pass")...), true, 0, "3 passed, 0 failed, 0 skipped")
	check(t, []byte(`{"Action":"run","Package":"p","Test":"A"}
{"Action":"run","Package":"p","Test":"A/x"}
{"Action":"pass","Package":"p","Test":"A/x"}
{"Action":"skip","Package":"p","Test":"A"}
{"Action":"pass","Package":"p"}`), true, 1, "1 passed, 0 failed, 1 skipped")
}

func TestNamesWithSlashes(t *testing.T) {
	check(t, []byte(`{"Action":"run","Package":"p","Test":"A"}
{"Action":"run","Package":"p","Test":"A/x/v4"}
{"Action":"run","Package":"p","Test":"A/x/v4/r"}
{"Action":"pass","Package":"p","Test":"A/x/v4/r"}
{"Action":"pass","Package":"p","Test":"A/x/v4"}
{"Action":"pass","Package":"p","Test":"A"}
{"Action":"pass","Package":"p"}`), true, 0, "1 passed, 0 failed, 0 skipped")
}

func TestSeveralPackagesAtOnce(t *testing.T) {
	var all []byte
	for _, file := range []string{"pass", "panics", "build", "skip"} {
		all = append(all, recorded(t, file)...)
	}
	check(t, all, false, 1, "6 passed, 2 failed, 2 skipped", "panic: out of order", "undefined: undefined")
}

// What ended well is not shown, and neither is a package whose failed tests have said it all.
func TestNothingBesideWhatFailed(t *testing.T) {
	got := check(t, recorded(t, "fail"), false, 1, "3 passed, 2 failed, 0 skipped")
	for _, unwanted := range []string{"TestGood", "TestTable/good", "=== FAIL example.org/rec/fail\n"} {
		if strings.Contains(got, unwanted) {
			t.Errorf("%q is in:\n%s", unwanted, got)
		}
	}
}

func TestCutOffBetweenTests(t *testing.T) {
	check(t, []byte(`{"Action":"start","Package":"p"}
{"Action":"run","Package":"p","Test":"A"}
{"Action":"pass","Package":"p","Test":"A"}`), false, 1, "1 passed, 1 failed, 0 skipped", "=== FAIL p\n")
}

func TestWordsOfTheGoCommand(t *testing.T) {
	check(t, []byte("go: no such tool\n"), false, 1, "0 passed, 1 failed, 0 skipped", "go: no such tool")
	check(t, nil, false, 1, "0 passed, 1 failed, 0 skipped", "no test ran")
}

func TestSlowest(t *testing.T) {
	got := check(t, []byte(`{"Action":"pass","Package":"p","Test":"A","Elapsed":1.5}
{"Action":"pass","Package":"p","Test":"B","Elapsed":61}
{"Action":"pass","Package":"p","Test":"C","Elapsed":0.2}
{"Action":"pass","Package":"p","Elapsed":63}`), true, 0, "3 passed, 0 failed, 0 skipped", "pass  p  1m3s")
	if want := "slowest:\n    1m1s  p B\n    1.5s  p A\n\n3 passed"; !strings.Contains(got, want) {
		t.Errorf("want %q in:\n%s", want, got)
	}
}

func recorded(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

func check(t *testing.T, in []byte, strict bool, code int, last string, has ...string) string {
	t.Helper()
	var out strings.Builder
	got := run(bytes.NewReader(in), &out, strict)
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	if got != code || lines[len(lines)-1] != last {
		t.Errorf("code %d, last line %q; want %d, %q:\n%s", got, lines[len(lines)-1], code, last, &out)
	}
	for _, want := range has {
		if !strings.Contains(out.String(), want) {
			t.Errorf("want %q in:\n%s", want, &out)
		}
	}
	return out.String()
}
