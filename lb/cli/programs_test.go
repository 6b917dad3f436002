package cli

import (
	"strings"
	"testing"
)

// A flag of the cleanup of a cluster does not clean the node when --cluster was forgotten.
func TestCleanupNeedsCluster(t *testing.T) {
	for _, tt := range []struct {
		args     string
		code     int
		out, err string
	}{
		{"--kubeconfig k", 2, "", "steelyard: --kubeconfig needs --cluster\n"},
		{"--kubeconfig=", 2, "", "steelyard: --kubeconfig needs --cluster\n"},
		{"--namespace steelyard", 2, "", "steelyard: --namespace needs --cluster\n"},
		{"--cluster --wait", 2, "", "steelyard: --wait is for the cleanup of a node\n"},
		{"--cluster --namespace n", 0, "cleanup  n\n", ""},
	} {
		code, out, errOut := steelyard(t, append([]string{"cleanup"}, strings.Fields(tt.args)...)...)
		if code != tt.code || out != tt.out || !strings.HasPrefix(errOut, tt.err) {
			t.Errorf("cleanup %s: code %d, stdout %q, stderr %q; want %+v", tt.args, code, out, errOut, tt)
		}
	}
}
