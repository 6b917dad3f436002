package lb_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"github.com/steelyard-lb/steelyard/lb"
	"github.com/steelyard-lb/steelyard/lb/lbtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// A frontend has the policy of its service.
func TestStatusHasThePolicy(t *testing.T) {
	for _, policy := range lb.Policies {
		t.Run(string(policy), func(t *testing.T) {
			inEngine(t, lbtest.New(), func(t *testing.T, e *lb.Engine) {
				s := service("web", []netip.Addr{vip1}, "10.0.0.1")
				s.Policy = policy
				e.Put(s)
				synctest.Wait()
				st := must.Get(e.Status(t.Context()))(t)
				must.True(t, len(st.Services) == 1 && st.Services[0].Policy == policy,
					"services %+v; want one with policy %s", st.Services, policy)
			})
		})
	}
}

// If packets may be sent to other nodes, the status shows the tunnel to them, however these nodes deliver the packets.
func TestStatusHasTheTunnelBetweenNodes(t *testing.T) {
	for _, tt := range []struct {
		name         string
		nodes, local bool
		policy       lb.Policy
		want         lb.Method
	}{
		{"Cluster", true, false, lb.PolicyCluster, lb.MethodTunnel},
		{"Cluster, all backends here for now", true, true, lb.PolicyCluster, lb.MethodTunnel},
		{"Local", true, true, lb.PolicyLocal, lb.MethodNAT},
		{"Local, spread by one node", true, false, lb.PolicyLocal, lb.MethodTunnel},
		{"no tunnels", false, false, lb.PolicyCluster, lb.MethodNAT},
	} {
		inEngine(t, lbtest.New(), func(t *testing.T, e *lb.Engine) {
			s := service("web", []netip.Addr{vip1}, "10.0.0.1")
			s.Policy, s.NodeForwarding.Enabled = tt.policy, tt.nodes
			b := &s.Ports[0].Backends[0]
			b.Node, b.Local = netip.MustParseAddr("192.0.2.1"), tt.local
			s.Refused = []lb.RefusedVIP{{VIP: vip2, Reason: "refused"}}
			e.Put(s)
			synctest.Wait()
			st := must.Get(e.Status(t.Context()))(t)
			for _, x := range st.Services {
				must.True(t, x.Forward == tt.want,
					"%s: %s is forwarded by %s; want %s", tt.name, x.Address, x.Forward, tt.want)
			}
		})
	}
}

// A deleted backend stays in the plan for a while, so that its flows end. The status omits it, because nobody can
// repair it.
func TestStatusHasNoDeletedBackends(t *testing.T) {
	inEngine(t, lbtest.New(), func(t *testing.T, e *lb.Engine) {
		s := service("web", []netip.Addr{vip1}, "10.0.0.1", "10.0.0.2")
		s.Check = lb.CheckSpec{Type: lb.CheckNone}
		s.Ports[0].Backends[0].Deleted = true
		e.Put(s)
		synctest.Wait()
		st := must.Get(e.Status(t.Context()))(t)
		want := "[10.0.0.2 healthy]"
		got := []string{}
		for _, b := range st.Backends {
			got = append(got, fmt.Sprint(b.Address, " ", b.State))
		}
		must.True(t, fmt.Sprint(got) == want && len(st.Services) == 1 && len(st.Services[0].Backends) == 1,
			"backends %s, services %+v; want %s", got, st.Services, want)
	})
}

// Every port of a service has its own state: a port that no backend serves is not healthy and receives no flows, and
// the other ports keep the address.
func TestStatusOfEachPort(t *testing.T) {
	fx := lbtest.New()
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		s := service("web", []netip.Addr{vip1}, "10.0.0.1", "10.0.0.2")
		tls := lb.Port{Port: 443, Target: 8443, Protocol: lb.TCP}
		s.Ports = append(s.Ports, lb.PortsOn(s.Ports[0].Backends, tls)...)
		e.Put(s)
		e.Complete("file")
		for _, c := range lb.Checks(s) {
			state := lb.StateHealthy
			if c.Target.Port() == 8443 {
				state = lb.StateUnhealthy
			}
			e.Health(lb.Health{Key: c.Key, State: state, Weight: -1, Reason: "test"})
		}
		synctest.Wait()
		st := must.Get(e.Status(t.Context()))(t)
		got := []string{}
		for _, x := range st.Services {
			got = append(got, fmt.Sprintf("%d %s %v %q %v", x.Port, x.State, x.Announced, x.Reason, len(x.Backends)))
		}
		for _, b := range st.Backends {
			got = append(got, fmt.Sprintf("%s:%d %s", b.Address, b.Port, b.State))
		}
		want := []string{
			`80 healthy true "" 2`, `443 unhealthy true "0 of 2 backends healthy, min_healthy is 1" 2`,
			"10.0.0.1:8080 healthy", "10.0.0.2:8080 healthy", "10.0.0.1:8443 unhealthy", "10.0.0.2:8443 unhealthy",
		}
		must.Equal(t, want, got)
	})
}

// A change of the ports of a service, or of the port of its check, keeps the states of its backends: the address stays
// announced.
func TestStatesOutliveAChangeOfPorts(t *testing.T) {
	fx := lbtest.New()
	inEngine(t, fx, func(t *testing.T, e *lb.Engine) {
		first := service("web", []netip.Addr{vip1}, "10.0.0.1")
		e.Put(first)
		e.Complete("file")
		answer(e, first, lb.StateHealthy, 0)
		synctest.Wait()
		for name, change := range map[string]func(*lb.Service){
			"a port of the check": func(s *lb.Service) { s.Check.Port = 9000 },
			"another target":      func(s *lb.Service) { s.Ports[0].Target = 9000 },
			"another port": func(s *lb.Service) {
				tls := lb.Port{Port: 443, Target: 443, Protocol: lb.TCP}
				s.Ports = append(s.Ports, lb.PortsOn(s.Ports[0].Backends, tls)...)
			},
			"none": func(*lb.Service) {},
		} {
			s := service("web", []netip.Addr{vip1}, "10.0.0.1")
			change(s)
			e.Put(s)
			synctest.Wait()
			st := must.Get(e.Status(t.Context()))(t)
			if r := st.Services[0]; r.State != lb.StateHealthy || !st.Routes[0].Announced {
				t.Errorf("%s: %+v, announced %t; want healthy and announced", name, r, st.Routes[0].Announced)
			}
		}
	})
}

func settled(e *lb.Engine) bool {
	synctest.Wait()
	select {
	case <-e.Settled():
		return true
	default:
		return false
	}
}

// Settled is closed once every source is complete and every service has had a plan, and stays closed.
func TestSettled(t *testing.T) {
	for _, tt := range []struct {
		name            string
		source, results bool
		wait            time.Duration
		want            bool
	}{
		{"nothing yet", false, false, time.Hour, false},
		{"results, the source is not complete", false, true, time.Hour, false},
		{"source complete, no results", true, false, 9 * time.Second, false},
		{"source complete and results", true, true, 0, true},
		{"source complete, no results for longer than Settle", true, false, 11 * time.Second, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inEngine(t, lbtest.New(), func(t *testing.T, e *lb.Engine) {
				s := service("web", []netip.Addr{vip1}, "10.0.0.1")
				e.Put(s)
				if tt.source {
					e.Complete("file")
				}
				if tt.results {
					answer(e, s, lb.StateHealthy)
				}
				time.Sleep(tt.wait)
				must.Equal(t, tt.want, settled(e))
				must.Equal(t, tt.want, must.Get(e.Status(t.Context()))(t).Settled)
				if tt.want {
					e.Put(service("more", []netip.Addr{vip2}, "10.0.0.2"))
					must.True(t, settled(e), "not settled after another service; want settled for good")
				}
			})
		})
	}
}

// A query to an engine that does not run fails when its context ends.
func TestQueriesEndWithTheirContext(t *testing.T) {
	fx := lbtest.New()
	e := must.Get(lb.NewEngine(lb.EngineOptions{Datapath: fx, Announcer: fx, Prober: fx}))(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := e.Behind(ctx)
	must.True(t, errors.Is(err, context.Canceled), "Behind: %v; want canceled", err)
	_, err = e.Status(ctx)
	must.True(t, errors.Is(err, context.Canceled), "Status: %v; want canceled", err)
}

// The status of a service whose addresses have just changed is complete, although its plan is for the previous ones.
func TestStatusDuringAChangeOfAddresses(t *testing.T) {
	inEngine(t, lbtest.New(), func(t *testing.T, e *lb.Engine) {
		for _, vips := range [][]netip.Addr{{vip1}, {vip2, vip1}} { // the second is handled together with the query
			synctest.Wait()
			s := service("web", vips, "10.0.0.1")
			s.Check = lb.CheckSpec{Type: lb.CheckNone}
			e.Put(s)
			if len(vips) == 1 {
				synctest.Wait()
			}
		}
		st := must.Get(e.StatusOf(t.Context(), vip1))(t)
		must.True(t, len(st.Services) == 1, "services %+v", st.Services)
	})
}
