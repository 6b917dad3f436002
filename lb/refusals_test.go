package lb_test

import (
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// An address that moves from one service to another is not an error, in whatever order the two are put. An address that
// two services want permanently is reported once.
func TestRefusedFrontends(t *testing.T) {
	for _, tt := range []struct {
		name   string
		puts   []string // of service and VIP, after web has vip1 and mail has vip2
		apart  time.Duration
		errors []string
	}{
		{"swapped", []string{"web 2", "mail 1"}, 0, nil},
		{"swapped, one after the other", []string{"web 2", "mail 1"}, 100 * time.Millisecond, nil},
		{"moved", []string{"web 2", "mail 3"}, 100 * time.Millisecond, nil},
		{"twice", []string{"web 2"}, 0, []string{"web 203.0.113.11:80/tcp"}},
		{"twice, changed again", []string{"web 2", "web 2", "web 2"}, 500 * time.Millisecond,
			[]string{"web 203.0.113.11:80/tcp"}},
		{"twice, with a pause", []string{"web 2", "web 1", "web 2"}, 2 * time.Second,
			[]string{"web 203.0.113.11:80/tcp", "web 203.0.113.11:80/tcp"}},
		{"another address later", []string{"web 2", "web 3", "dns 4", "web 4"}, 2 * time.Second,
			[]string{"web 203.0.113.11:80/tcp", "web 203.0.113.13:80/tcp"}},
		{"twice, then deleted", []string{"web 2", "web"}, 100 * time.Millisecond, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var log strings.Builder
			vips := map[string]netip.Addr{"1": vip1, "2": vip2, "3": vip2.Next(), "4": vip2.Next().Next()}
			inEngine(t, lbtest.New(), func(t *testing.T, e *lb.Engine) {
				put := func(what string) {
					name, vip, _ := strings.Cut(what, " ")
					if vip == "" {
						e.Delete(name)
						return
					}
					s := service(name, []netip.Addr{vips[vip]}, "10.0.0.1")
					s.Check = lb.CheckSpec{Type: lb.CheckNone}
					e.Put(s)
				}
				put("web 1")
				put("mail 2")
				e.Complete("file")
				synctest.Wait()
				for _, what := range tt.puts {
					put(what)
					if tt.apart > 0 {
						synctest.Wait()
						time.Sleep(tt.apart)
					}
				}
				time.Sleep(5 * time.Second)
				synctest.Wait()
			}, func(o *lb.EngineOptions) {
				o.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelError}))
			})
			var got []string
			for line := range strings.Lines(log.String()) {
				_, after, _ := strings.Cut(line, `msg="frontend refused" component=engine service=`)
				after = strings.Replace(after, "frontend=", "", 1)
				got = append(got, strings.Join(strings.Fields(after)[:2], " "))
			}
			must.True(t, slices.Equal(got, tt.errors), "errors %q; want %q\n%s", got, tt.errors, log.String())
		})
	}
}

// Names are as "steelyard services" prints them: Services of Kubernetes have the namespace.
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
		must.Row(t, name, want, got)
	}
}
