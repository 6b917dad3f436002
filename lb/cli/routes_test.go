package cli

import (
	"strings"
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
)

func TestRoutesOfAPeer(t *testing.T) {
	socket := serve(t, lb.Status{})
	const sent = "PREFIX NEXT HOP AS PATH MED LOCAL PREF COMMUNITIES BANDWIDTH SINCE " +
		"203.0.113.10/32 192.0.2.2 64512 64512 0 - no-export,64512:1:2 3 Gbit/s -"
	for _, tt := range []struct {
		peer, want, problem string
		code                int
	}{
		{"192.0.2.1", sent, "", 0},
		{"192.0.2.9", "", "there is no BGP peer 192.0.2.9", 1},
		{"router", "", "--peer router: want an address", 2},
	} {
		code, out, errOut := steelyard(t, "routes", "--peer", tt.peer, "--socket", socket)
		words := strings.Join(strings.Fields(out), " ")
		if code != tt.code || words != tt.want || !strings.Contains(errOut, tt.problem) {
			t.Errorf("routes --peer %s: code %d, stderr %q, stdout:\n%s", tt.peer, code, errOut, out)
		}
	}
}

// Drained services are not counted as services that should be healthy.
func TestStatusOfDrainedServices(t *testing.T) {
	for text, want := range map[string]string{
		`{"services":3,"services_healthy":2,"services_drained":1}`: "services  2 of 2 healthy, 1 drained",
		`{"services":3,"services_healthy":2}`:                      "services  2 of 3 healthy",
	} {
		var out strings.Builder
		if err := statusTable(&out, []byte(text)); err != nil || !strings.Contains(out.String(), want+"\n") {
			t.Errorf("%s: %v\n%s", text, err, out.String())
		}
	}
}
