package datapath

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// onHost is a datapath that is called in its host's namespace.
type onHost struct{ fx *fixture }

func (o onHost) Held() ([]lb.Frontend, error) { return o.fx.d.Held() }

func (o onHost) Apply(ctx context.Context, d lb.Delta) (failed map[lb.Frontend]error) {
	if err := o.fx.host.Do(func() error { failed = o.fx.d.Apply(ctx, d); return nil }); err != nil {
		o.fx.t.Error(err)
	}
	return failed
}

// A service that would use up all entries, with 140,000 pairs of endpoint and port, is refused before any of it is
// written. While a service with 40,000 pairs is written, the engine answers, and removes another service's failed
// server.
func TestServiceThatNeedsAllRoom(t *testing.T) {
	fx := newFixture(t, hookTC, false, nil)
	fake := lbtest.New()
	e, err := lb.NewEngine(lb.EngineOptions{
		Datapath: onHost{fx}, Announcer: fake, Prober: fake, Sources: []string{"file"}, Settle: 10 * time.Second,
		Retry: 500 * time.Millisecond, Withdraw: 5 * time.Second, Log: quiet, Boundary: &lb.Boundary{Log: quiet},
	})
	must.Do(t, err)
	must.Run(t, e.Run)
	small := pairs("small", "203.0.113.11", 1, 3)
	e.Put(small)
	e.Complete("file")
	await := func(what string, within time.Duration, ok func() bool) {
		t.Helper()
		for start := time.Now(); !ok(); time.Sleep(time.Millisecond) {
			must.Need(t, time.Since(start) <= within, "%s: not within %s", what, within)
		}
	}
	backends := func() int {
		fx.d.services.Mu.Lock()
		defer fx.d.services.Mu.Unlock()
		return len(fx.d.services.Backends.ByID)
	}
	targets := func() int {
		fx.d.services.Mu.Lock()
		defer fx.d.services.Mu.Unlock()
		f := fx.d.services.Frontends[lb.Frontend{VIP: small.VIPs[0], Port: 1000, Protocol: lb.TCP}]
		if f == nil || f.Plan == nil {
			return 0
		}
		return len(f.Plan.Targets)
	}
	fail := func() { // another of the small service's servers
		next := *small
		next.Ports = []lb.ServicePort{small.Ports[0]}
		next.Ports[0].Backends = next.Ports[0].Backends[1:]
		small = &next
		e.Put(small)
	}
	await("small is served", time.Minute, func() bool { return targets() == 3 })

	e.Put(pairs("too large", "203.0.113.12", 140, 1000))
	await("it is refused", time.Minute, func() bool { return reasonOf(t, e, "too large") != "" })
	restricted := pairs("restricted", "203.0.113.14", 100, 1)
	for i := range 12000 {
		source := netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})
		restricted.Allow = append(restricted.Allow, netip.PrefixFrom(source, 32))
	}
	e.Put(restricted)
	await("too many sources are refused", time.Minute, func() bool { return reasonOf(t, e, "restricted") != "" })
	must.Row(t, "backends, none of the refused services", 3, backends())
	await("nothing is behind", time.Minute, func() bool { return e.Progress().Behind.IsZero() }) // all calls are done
	must.True(t, !e.InForce("too large") && e.InForce("small"),
		"in force %t and %t; only the refused service is not", e.InForce("too large"), e.InForce("small"))

	start := time.Now()
	e.Put(pairs("large", "203.0.113.13", 40, 1000))
	await("large is being written", 20*time.Second, func() bool { return backends() > 5000 })
	fail()
	await("the failed server is taken out", 2*time.Second, func() bool { return targets() == 2 })
	n := backends()
	must.True(t, n <= 36000, "%d backends were written before it", n)
	for range 10 {
		start := time.Now()
		must.Get(e.StatusOf(t.Context(), small.VIPs[0]))(t)
		took := time.Since(start)
		must.True(t, took <= time.Second, "a status took %s", took)
	}
	await("large is served", 2*time.Minute, func() bool { return e.InForce("large") })
	t.Logf("40,000 pairs took %s", time.Since(start))
}

// Port ranges that do not fit into their map are refused, and leave nothing in it: smaller ones are served.
func TestTooManyRanges(t *testing.T) {
	t.Parallel()
	fx := newFixture(t, hookTC, false, nil)
	put := func(port lb.Port, vips ...netip.Addr) map[lb.Frontend]error {
		s := &lb.Service{
			Name: "web", VIPs: vips, Ports: lb.PortsOn([]lb.Backend{{Addr: fx.addr("b1"), Weight: 1}}, port),
			Algorithm: lb.AlgorithmRandom, Method: lb.MethodNAT, Check: lb.CheckSpec{Type: lb.CheckNone},
		}
		return onHost{fx}.Apply(t.Context(), lb.Delta{Put: lb.Build(s, nil, lb.Drains{}).Frontends})
	}
	var vips []netip.Addr
	for i := range 2300 { // of 30 prefixes
		vips = append(vips, netip.AddrFrom4([4]byte{203, 0, byte(i >> 8), byte(i)}))
	}
	failed := put(lb.Port{Port: 1, Last: 65534, Target: 1, Protocol: lb.TCP}, vips...)
	for _, err := range failed {
		must.True(t, errors.Is(err, lb.ErrRefused), "%v", err)
	}
	must.Row(t, "refused", 2300-65535/30, len(failed))
	must.Row(t, "smaller ones", 0, len(put(lb.Port{Port: 80, Last: 95, Target: 80, Protocol: lb.UDP}, vips[:15]...)))
	must.Row(t, "one more", 1, len(put(lb.Port{Port: 80, Last: 95, Target: 80, Protocol: lb.UDP}, vips[15])))
}

// reasonOf returns why the datapath has refused a service, or "".
func reasonOf(t *testing.T, e *lb.Engine, name string) string {
	t.Helper()
	st, err := e.Status(t.Context())
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	for _, s := range st.Services {
		if s.Service == name && len(s.Reason) > 7 && s.Reason[:7] == "refused" {
			return s.Reason
		}
	}
	return ""
}

// pairs is a service with this many ports and backends.
func pairs(name, vip string, ports uint16, backends int) *lb.Service {
	s := &lb.Service{
		Name: name, Source: "file", VIPs: []netip.Addr{netip.MustParseAddr(vip)}, Method: lb.MethodNAT, MinHealthy: 1,
		Algorithm: lb.AlgorithmMaglev, Check: lb.CheckSpec{Type: lb.CheckNone},
	}
	host := s.VIPs[0].As4()[3]
	for p := range ports {
		port := lb.ServicePort{Port: lb.Port{Port: 1000 + p, Target: 1000 + p, Protocol: lb.TCP}}
		for b := range backends {
			port.Backends = append(port.Backends, lb.Backend{
				Addr: netip.AddrFrom4([4]byte{10, host, byte(b >> 8), byte(b)}), Port: 1000 + p, Weight: 1,
			})
		}
		s.Ports = append(s.Ports, port)
	}
	return s
}

// If a table cannot be computed, its frontend is refused before any of it is written. Other frontends are applied.
func TestPanicOfATable(t *testing.T) {
	on := true
	b := &lb.Boundary{Log: slog.New(slog.DiscardHandler), Before: func(part lb.Part, object string) {
		if part == lb.PartTable && strings.HasPrefix(object, "bad ") && on {
			panic("injected")
		}
	}}
	fx := newFixture(t, hookTC, false, func(o *Options) { o.Boundary = b })
	var delta lb.Delta
	for _, s := range []*lb.Service{pairs("bad", "203.0.113.21", 1, 2), pairs("good", "203.0.113.22", 2, 2)} {
		delta.Put = append(delta.Put, lb.Build(s, nil, lb.Drains{}).Frontends...)
	}
	failed := onHost{fx}.Apply(t.Context(), delta)
	must.True(t, len(failed) == 1 && errors.Is(failed[delta.Put[0].Frontend], lb.ErrRefused),
		"failed %v; want the one with the panic", failed)
	must.Row(t, "frontends of the other service", 2, len(must.Get(fx.d.Held())(t)))
	on = false
	failed = onHost{fx}.Apply(t.Context(), delta)
	must.True(t, len(failed)+len(b.Troubles()) == 0, "failed %v, troubles %q without the panic", failed, b.Troubles())
}
