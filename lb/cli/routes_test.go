package cli

import (
	"strings"
	"testing"
)

// Drained services are not counted as services that should be healthy.
func TestStatusOfDrainedServices(t *testing.T) {
	for text, want := range map[string]string{
		`{"services":3,"services_healthy":2,"services_drained":1}`: "2 of 2 frontends can be announced, 1 drained",
		`{"services":3,"services_healthy":2}`:                      "2 of 3 frontends can be announced",
	} {
		want = "services  " + want
		var out strings.Builder
		if err := statusTable(&out, []byte(text)); err != nil || !strings.Contains(out.String(), want+"\n") {
			t.Errorf("%s: %v\n%s", text, err, out.String())
		}
	}
}
