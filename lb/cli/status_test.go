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
