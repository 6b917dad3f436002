package cli

import (
	"strings"
	"testing"
)

// Without an agent, the table is the verdict alone.
func TestStatusWithoutAgent(t *testing.T) {
	for _, tt := range []struct {
		args, out string
		code      int
	}{
		{"", "DOWN: no agent listens on /nowhere.sock; ", 1},
		{"--check", "DOWN: no agent listens on /nowhere.sock; ", 2},
		{"--ready", "DOWN: no agent listens on /nowhere.sock; ", 1},
		{"-o json", "", 1}, {"-o json --check", "", 2}, {"-o yaml", "", 2},
	} {
		code, out, errOut := steelyard(t, append([]string{"status", "--socket", "/nowhere.sock"},
			strings.Fields(tt.args)...)...)
		if code != tt.code || !strings.HasPrefix(out, tt.out) || strings.Count(out, "\n") != min(len(tt.out), 1) ||
			errOut == "" || tt.args != "-o yaml" && !strings.Contains(errOut, "no agent listens on /nowhere.sock") {
			t.Errorf("status %s without an agent: code %d, stderr %q, stdout %q", tt.args, code, errOut, out)
		}
	}
}

// A problem is a reason and a warning of the response. The table has it once.
func TestStatusHasProblemsOnce(t *testing.T) {
	const text = `{"reasons":["first","second"],"warnings":["of the file","first","second"]}`
	var out strings.Builder
	if err := statusTable(&out, []byte(text)); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"first", "also      second\n", "warning   of the file\n"} {
		if strings.Count(out.String(), want) != 1 {
			t.Errorf("%q not once:\n%s", want, out.String())
		}
	}
	if strings.Count(out.String(), "second") != 1 {
		t.Errorf("\"second\" not once:\n%s", out.String())
	}
}

// An agent that assigns no addresses does not know who does, and says nothing about it.
func TestStatusOfLeader(t *testing.T) {
	for text, want := range map[string]string{
		`{"cluster":{"leader":"n1"}}`: "cluster  connected, addresses are assigned by n1\n",
		`{"cluster":{}}`:              "cluster  connected\n",
	} {
		var out strings.Builder
		if err := statusTable(&out, []byte(text)); err != nil ||
			!strings.Contains(strings.ReplaceAll(out.String(), "   ", "  "), want) {
			t.Errorf("%s: %v\n%s", text, err, out.String())
		}
	}
}
