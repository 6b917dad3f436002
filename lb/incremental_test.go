package lb_test

import (
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// input is the complete input of an engine.
type input struct {
	services map[string]*lb.Service
	health   map[lb.CheckKey]lb.Health
	drains   lb.Drains
}

// tell passes all input to an engine.
func (in *input) tell(e *lb.Engine) {
	for _, s := range in.services {
		e.Put(s)
		for _, c := range lb.Checks(s) {
			if h, ok := in.health[c.Key]; ok {
				e.Health(h)
			}
		}
	}
	e.Drain(in.drains)
	e.Complete("file")
}

// random changes one thing of in and tells the engine only that.
func (in *input) random(r *rand.Rand, e *lb.Engine) {
	n := r.IntN(5)
	name := fmt.Sprint("s", n)
	s, known := in.services[name]
	switch k := r.IntN(10); {
	case k == 0 && known:
		delete(in.services, name)
		maps.DeleteFunc(in.health, func(c lb.CheckKey, _ lb.Health) bool { return c.Service == name })
		e.Delete(name)
	case k == 1:
		server := lb.DrainTarget{Service: name, Address: netip.AddrFrom4([4]byte{10, 0, 0, byte(r.IntN(4))})}
		in.drains = in.drains.With([]lb.DrainTarget{{}, {Service: name}, server}[r.IntN(3)], r.IntN(2) == 0)
		e.Drain(in.drains)
	case k < 5 || !known:
		vips := [][]netip.Addr{{vip1}, {vip2}, {vip1, vip2}}[r.IntN(3)]
		s = service(name, vips)
		var backends []lb.Backend
		for i := range r.IntN(4) {
			addr := netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})
			backends = append(backends, lb.Backend{Addr: addr, Weight: 1 + r.IntN(2)})
		}
		ports := []lb.Port{{Port: 80 + uint16(n), Target: 8080, Protocol: lb.TCP}}
		if r.IntN(2) == 0 {
			ports = append(ports, lb.Port{Port: 90 + uint16(n), Target: 8081, Protocol: lb.UDP})
		}
		s.Ports, s.Check.ServicePort = lb.PortsOn(backends, ports...), ports[0]
		s.MinHealthy = 1 + r.IntN(2)
		in.services[name] = s
		checks := map[lb.CheckKey]bool{}
		for _, c := range lb.Checks(s) {
			checks[c.Key] = true
		}
		maps.DeleteFunc(in.health, func(c lb.CheckKey, _ lb.Health) bool { return c.Service == name && !checks[c] })
		e.Put(s)
	default:
		if checks := lb.Checks(s); len(checks) > 0 {
			h := lb.Health{
				Key: checks[r.IntN(len(checks))].Key, State: []lb.State{lb.StateHealthy, lb.StateUnhealthy}[r.IntN(2)],
				Weight: -1,
			}
			in.health[h.Key] = h
			e.Health(h)
		}
	}
}

// inForce describes what an engine's consumers hold.
func inForce(fx *lbtest.Fixture, in *input) (text []string) {
	for n := range uint16(20) {
		for _, vip := range []netip.Addr{vip1, vip2} {
			for _, protocol := range []lb.Protocol{lb.TCP, lb.UDP} {
				f := lb.Frontend{VIP: vip, Port: 80 + n, Protocol: protocol}
				if p, ok := fx.Served(f); ok {
					text = append(text, fmt.Sprint(f, " of ", p.Service, " to ", p.Targets, ", down ", p.Down))
				}
			}
		}
	}
	return append(text, fmt.Sprint(fx.Announcements()))
}

// After each of many random changes, the datapath, the announcers and the status are the same as with an engine that
// receives everything at its start.
func TestIncrementalPlans(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := rand.New(rand.NewPCG(7, 8))
		in := &input{services: map[string]*lb.Service{}, health: map[lb.CheckKey]lb.Health{}}
		start := func(fx *lbtest.Fixture) (*lb.Engine, func()) {
			e := must.Get(lb.NewEngine(lb.EngineOptions{
				Datapath: fx, Announcer: fx, Prober: fx, Sources: []string{"file"}, Settle: 1,
				Retry: time.Second, Withdraw: time.Second, Log: slog.New(slog.DiscardHandler),
			}))(t)
			return e, must.Run(t, e.Run)
		}
		status := func(e *lb.Engine) lb.Status {
			st := must.Get(e.Status(t.Context()))(t)
			for i := range st.Routes { // times differ
				st.Routes[i].Since = time.Time{}
			}
			return st
		}
		fx := lbtest.New()
		e, stop := start(fx)
		defer stop()
		e.Complete("file")
		for step := range 3000 {
			in.random(r, e)
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
			ref := lbtest.New()
			fresh, stop := start(ref)
			in.tell(fresh)
			time.Sleep(10 * time.Millisecond)
			synctest.Wait()
			got, want := inForce(fx, in), inForce(ref, in)
			must.Need(t, slices.Equal(got, want), "step %d:\n%s\nwant\n%s", step, got, want)
			if got, want := status(e), status(fresh); !reflect.DeepEqual(got, want) {
				t.Fatalf("step %d: status\n%+v\nwant\n%+v", step, got, want)
			}
			stop()
		}
	})
}
