//go:build browser

package e2e

import (
	"context"
	"net/http"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/admin"
	"github.com/steelyard-lb/steelyard/lb/events"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestDashboardShowsTextAsText checks that the page shows texts from outside as they are, even if they look like HTML,
// in each place where the API has one.
func TestDashboardShowsTextAsText(t *testing.T) {
	t.Parallel()
	const text = `<img src=x onerror="document.title='owned'"><script>document.title='owned'</script>`
	status := func(context.Context) (lb.Status, error) {
		b := lb.BackendStatus{Service: text, Address: vip6, Port: 8080, State: lb.StateUnhealthy, Reason: text}
		return lb.Status{
			Settled: true, Backends: []lb.BackendStatus{b},
			Services: []lb.ServiceStatus{{
				Service: text, Address: vip4, Forward: text, Algorithm: text, Reason: text,
				Backends: []lb.BackendStatus{b},
			}},
			Routes: []lb.RouteStatus{{
				Address: vip4, Services: []string{text}, Reason: text, By: []lb.AnnouncerKind{text},
			}},
		}, nil
	}
	server := admin.New(admin.Options{
		Status:   status,
		StatusOf: func(ctx context.Context, _ netip.Addr) (lb.Status, error) { return status(ctx) },
		Peers:    func() []lb.PeerStatus { return []lb.PeerStatus{{Peer: vip6, State: text, LastError: text}} },
		Info: func() admin.Info {
			return admin.Info{
				Node: text, Version: text, Config: text, LoadError: text, Cluster: &admin.Cluster{Leader: text},
				Findings:   lb.FoundInterface.Each([]string{text}),
				Interfaces: []admin.Interface{{Name: text, Mode: text, Hook: text, Err: text}},
			}
		},
		Events: func(int, events.Filter) ([]events.Event, int, <-chan struct{}) {
			e := events.Event{
				Time: time.Now(), Level: text, Kind: text, Text: text, Fields: map[string]string{text: text},
			}
			return []events.Event{e}, 1, nil
		},
		Metrics: http.NotFoundHandler(),
	})
	h := labtest.Host(t, labtest.New(t), "lb1")
	l := must.Get(h.Listen(t.Context(), "tcp", "127.0.0.1:9911"))(t)
	go http.Serve(l, server.Handler(false))

	d := openDashboard(t, h, "http://127.0.0.1:9911/")
	d.untilVerdict("DOWN", text)
	d.until(`document.querySelectorAll("#events tbody tr").length == 1`)
	for _, name := range []string{"services", "backends", "routes", "peers", "members", "interfaces", "events"} {
		shown := d.text("#" + name + " tbody tr")
		must.True(t, strings.Count(shown, text) > 1, "%s shows %s", name, shown)
	}
	d.write("#filter input", "<IMG")
	d.until(`document.querySelectorAll("main tbody tr").length == 6`)
	d.until(`document.images.length == 0 && document.scripts.length == 1`)
	d.until(`document.title.startsWith("DOWN <img")`)
	must.Equal(t, nil, d.Problems("favicon"))

	// The policy refuses what a text that became HTML would contain.
	const inject = `document.body.insertAdjacentHTML("beforeend", "<img src=x onerror='owned = 1'>")`
	must.Do(t, d.Eval(t.Context(), inject, nil))
	d.until(`typeof owned == "undefined"`)
	labtest.Until(t, "the browser reports a violation of the policy", func() error {
		all := strings.Join(d.Problems(), "\n")
		return labtest.ErrorIf(!strings.Contains(all, "Content Security Policy"), "it reports: %s", all)
	})
}
