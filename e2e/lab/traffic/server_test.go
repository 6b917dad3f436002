package traffic_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestStoppedServerResetsAndStartsAgain(t *testing.T) {
	topo := labtest.Topology(t, lab.Shape{})
	client, server := traffic.From(topo.Clients[0].Host), topo.Servers[0]
	echo := labtest.TCPEcho(t, server, 7)
	web := labtest.HTTP(t, server, 80)
	conns := labtest.Connect(t, client, server.At(7)[0], 10)
	must.Do(t, errors.Join(echo.Stop(), web.Stop()))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	for _, err := range conns.Exchange(ctx) {
		must.True(t, strings.Contains(err.Error(), "reset") || strings.Contains(err.Error(), "broken pipe"),
			"want a reset, got %v", err)
	}
	must.True(t, conns.Alive() == 0 && echo.Connections() == 0,
		"want no connection, got %d at the client and %d at the server", conns.Alive(), echo.Connections())
	if _, err := client.Get(ctx, "http://"+server.At(80)[0].String()); err == nil ||
		!strings.Contains(err.Error(), "refused") {
		t.Errorf("want connection refused, got %v", err)
	}
	must.Do(t, errors.Join(echo.Start(), web.Start()))
	web.SetHealthy(false)
	a, err := client.Get(ctx, "http://"+server.At(80)[1].String()+"/healthz")
	must.True(t, err == nil && a.Status == 503, "want status 503 from /healthz, got %+v, %v", a, err)
	labtest.Connect(t, client, server.At(7)[1], 1)
}
