package lb_test

import (
	"testing"

	"github.com/steelyard-lb/steelyard/lb"
)

// Names are as "services" prints them: those of Kubernetes have the namespace.
func TestNoService(t *testing.T) {
	rows := []lb.ServiceStatus{{Service: "a/web"}, {Service: "b/web"}, {Service: "b/web"}, {Service: "b/mail"}}
	for name, want := range map[string]string{
		"a/web": "", "b/mail": "",
		"web":   `there is no service "web"; did you mean "a/web" or "b/web"?`,
		"mail":  `there is no service "mail"; did you mean "b/mail"?`,
		"eb":    `there is no service "eb"; see "steelyard services"`,
		"c/web": `there is no service "c/web"; see "steelyard services"`,
	} {
		got := ""
		if err := lb.NoService(name, rows); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %q; want %q", name, got, want)
		}
	}
}
