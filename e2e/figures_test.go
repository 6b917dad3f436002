package e2e

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestFigures checks that one command names the slow server of a service, and that the figures agree with the clients'
// traffic: that of the servers adds up to that of the frontends.
func TestFigures(t *testing.T) {
	t.Parallel()
	s := newCheckedSite(t, peers.BIRD, "tc", 1, 3, patient)
	a := s.Agents[0]
	slow := func(line string) bool {
		return strings.Contains(line, s.Servers[1].V4.String()) || strings.Contains(line, s.Servers[1].V6.String())
	}
	s.web[1].SetDelay(200 * time.Millisecond)
	var services []lb.ServiceStatus
	for _, vip := range vips { // rates begin when the agent has read the counters of a frontend
		must.Do(t, s.Load(t, vip, 1).Err())
		labtest.Until(t, "the frontend is known", func() error {
			err := a.Get(t.Context(), "/v1/services", &services)
			return errors.Join(err, labtest.ErrorIf(!slices.ContainsFunc(services, func(x lb.ServiceStatus) bool {
				return x.Address == vip && x.Packets > 0
			}), "no packets"))
		})
	}
	for _, vip := range vips {
		must.Do(t, s.Load(t, vip, 300).Err())
	}
	var backends []lb.BackendStatus
	labtest.Until(t, "all connections are counted", func() error {
		err := errors.Join(a.Get(t.Context(), "/v1/services", &services), a.Get(t.Context(), "/v1/backends", &backends))
		var web, servers lb.Traffic
		for _, x := range services {
			web.Add(x.Traffic)
		}
		for _, b := range backends {
			servers.Add(b.Traffic)
		}
		ok := web.Flows == 602 && servers.Flows == 602 && web.Packets == servers.Packets &&
			web.Bytes == servers.Bytes && web.FlowRate > 1 && web.BitRate > 1000 &&
			servers.Last.Equal(web.Last) && !web.Last.IsZero()
		return errors.Join(err, labtest.ErrorIf(!ok, "frontends: %+v\nservers: %+v", web, servers))
	})

	first := func(args ...string) (server string) { // that top lists
		out := must.Get(a.CLI(t.Context(), append([]string{"top", "--sort", "probe"}, args...)...))(t)
		_, table, _ := strings.Cut(out[strings.LastIndex(out, "SERVICE  BACKEND"):], "\n")
		return strings.Fields(table)[2] // after the duration, by which it sorts, and the service
	}
	labtest.Until(t, "the slow server is named", func() error {
		got := first()
		return labtest.ErrorIf(!slow(got), "top names %s first", got)
	})
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	go func() {
		for ctx.Err() == nil {
			s.Client().Load(ctx, traffic.Load{URL: labtest.URL(vip4), Requests: 20})
		}
	}()
	must.True(t, slow(first("-n", "3", "--interval", "500ms")), "top names another server after a while")

	out := must.Get(a.CLI(t.Context(), "backends", "web"))(t)
	t.Logf("%s\n%s", out, must.Get(a.CLI(t.Context(), "services", "web"))(t))
	_, rows, _ := strings.Cut(out, "\n")
	for line := range strings.Lines(rows) {
		took := must.Get(time.ParseDuration(strings.Fields(line)[9]))(t) // PROBE
		must.True(t, took >= 200*time.Millisecond == slow(line), "the probe of a server took %s:\n%s", took, out)
	}
	out, err := a.CLI(t.Context(), "services", "--unhealthy", "web")
	must.True(t, err == nil && !strings.Contains(out, vip4.String()), "healthy services are listed: %v\n%s", err, out)

	s.Config[0].Extra = "[[pool]]\nname = \"public\"\n" +
		"addresses = [\"203.0.113.8/29\", \"2001:db8:1::10/124\"]\n"
	must.Do(t, errors.Join(a.Configure(s.Config[0].TOML()), a.Reload()))
	labtest.Until(t, "the addresses of the new pool are counted", func() error {
		got := labtest.Metrics(t, a, "steelyard_pool_addresses")
		const want = `steelyard_pool_addresses{pool="public",state="assigned"} 2
steelyard_pool_addresses{pool="public",state="free"} 22
`
		return labtest.ErrorIf(got != want, "%s", got)
	})
}
