package main

import (
	"fmt"
	"strings"
	"testing"
)

func ev(action, test string, more ...string) string {
	return fmt.Sprintf(`{"Action":%q,"Package":"p","Test":%q%s}`, action, test, strings.Join(more, ""))
}

func out(test, text string) string {
	return fmt.Sprintf(`{"Action":"output","Package":"p","Test":%q,"Output":%q}`, test, text)
}

func TestSummary(t *testing.T) {
	for _, tt := range []struct {
		name   string
		in     []string
		strict bool
		code   int
		last   string
		has    string
	}{
		{"all pass; parents are not counted", []string{
			ev("run", "TestA"), ev("run", "TestA/x"), ev("run", "TestA/y"), ev("pass", "TestA/x"), ev("pass", "TestA/y"), ev("pass", "TestA"), ev("pass", ""),
		}, true, 0, "2 passed, 0 failed, 0 skipped", "pass  p"},
		{"names with slashes", []string{
			ev("run", "TestA"), ev("run", "TestA/x/v4"), ev("run", "TestA/x/v4/r"), ev("pass", "TestA/x/v4/r"), ev("pass", "TestA/x/v4"), ev("pass", "TestA"), ev("pass", ""),
		}, true, 0, "1 passed, 0 failed, 0 skipped", "pass  p"},
		{"a subtest fails", []string{
			ev("run", "TestA"), ev("run", "TestA/x"), out("TestA/x", "boom\n"), ev("fail", "TestA/x"), ev("fail", "TestA"), ev("fail", ""),
		}, false, 1, "0 passed, 1 failed, 0 skipped", "=== FAIL p TestA/x\nboom"},
		{"a parent fails by itself", []string{
			ev("run", "TestA"), ev("run", "TestA/x"), ev("pass", "TestA/x"), out("TestA", "leak\n"), ev("fail", "TestA"), ev("fail", ""),
		}, false, 1, "1 passed, 1 failed, 0 skipped", "=== FAIL p TestA\nleak"},
		{"panic: a test never ends", []string{
			ev("run", "TestA"), out("TestA", "panic: x\n"), ev("fail", ""),
		}, false, 1, "0 passed, 1 failed, 0 skipped", "panic: x"},
		{"build failure", []string{
			`{"Action":"build-output","ImportPath":"p","Output":"undefined: x\n"}`, `{"Action":"fail","Package":"p","FailedBuild":"p"}`,
		}, false, 1, "0 passed, 1 failed, 0 skipped", "undefined: x"},
		{"skip is fine for a person", []string{ev("run", "TestA"), ev("skip", "TestA"), ev("pass", "")}, false, 0, "0 passed, 0 failed, 1 skipped", "=== SKIP p TestA"},
		{"skip fails CI", []string{ev("run", "TestA"), ev("skip", "TestA"), ev("pass", "")}, true, 1, "0 passed, 0 failed, 1 skipped", ""},
		{"package without tests", []string{ev("skip", ""), ev("run", "TestA"), ev("pass", "TestA"), ev("pass", "")}, true, 0, "1 passed, 0 failed, 0 skipped", ""},
		{"nothing ran", []string{"go: no such tool"}, false, 1, "0 passed, 1 failed, 0 skipped", "go: no such tool"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b strings.Builder
			code := run(strings.NewReader(strings.Join(tt.in, "\n")), &b, tt.strict)
			lines := strings.Split(strings.TrimSpace(b.String()), "\n")
			if code != tt.code || lines[len(lines)-1] != tt.last || !strings.Contains(b.String(), tt.has) {
				t.Errorf("code %d, want %d; last line %q, want %q; want %q in:\n%s", code, tt.code, lines[len(lines)-1], tt.last, tt.has, &b)
			}
		})
	}
}
