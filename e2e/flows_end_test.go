package e2e

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestFlowsEnd checks that the connections to one server end, that their clients learn it without sending, and that
// the others continue.
func TestFlowsEnd(t *testing.T) {
	t.Parallel()
	labtest.Root(t)
	s, c := newUnitSite(t, "tc")
	c.Services[0].Check = lab.AgentCheck{Type: "tcp"}
	for _, n := range s.Servers {
		s.echo = append(s.echo, labtest.TCPEcho(t, n, 9000))
	}
	a := labtest.Agent(t, s.Balancers[0].Host, binary, c)
	s.waitRoutes(t, s.Balancers[0])
	conns := labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip4, 9000), 60)
	server := s.Servers[0]
	to := conns.Servers()[server.Name()]
	must.Need(t, to > 0 && to < 60, "%v", conns.Servers())
	_, err := a.CLI(t.Context(), "flows", "end")
	must.True(t, err != nil, "flows end without a filter")
	out := must.Get(a.CLI(t.Context(), "flows", "end", "--backend", server.V4.String(), "--service", "web"))(t)
	must.True(t, strings.HasPrefix(out, "ended: "), "%s", out)
	left := must.Get(a.CLI(t.Context(), "flows", "--backend", server.V4.String(), "--state", "established"))(t)
	must.True(t, !strings.Contains(left, server.V4.String()), "left:\n%s", left)
	time.Sleep(time.Second)
	errs := conns.Exchange(t.Context())
	must.True(t, len(errs) == to && conns.Alive() == 60-to, "%d of %d failed: %v", len(errs), to, errs)
	for _, err := range errs {
		must.True(t, strings.Contains(err.Error(), "reset"), "%v", err)
	}
	labtest.Exchange(t, conns, "the others")
	s.checkAnswered(t, 40)
}
