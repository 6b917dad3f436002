package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb"
)

const gossipKeyFile = "/run/steelyard-lab/gossip.key"

// members are balancers that share addresses by [l2] members. Their servers reply to clients directly (dsr), so that a
// connection survives a change of the balancer.
type members struct {
	*site
	vips []netip.Addr
}

func newMembers(t *testing.T, balancers int) *members {
	m := &members{site: &site{Topology: labtest.Topology(t, lab.Shape{Clients: 1, Balancers: balancers, Servers: 2})}}
	for i := range 4 {
		m.vips = append(m.vips, netip.MustParseAddr(fmt.Sprintf("203.0.113.%d", 10+i)),
			netip.MustParseAddr(fmt.Sprintf("2001:db8:1::%d", 10+i)))
	}
	for _, n := range m.Servers {
		for i := 0; i < len(m.vips); i += 2 {
			for _, vip := range m.vips[i : i+2] {
				if err := traffic.OwnVIP(n.Host, vip); err != nil {
					t.Fatal(err)
				}
			}
			n.V4, n.V6 = m.vips[i], m.vips[i+1] // the servers listen on the VIPs
			m.web = append(m.web, labtest.HTTP(t, n, 80))
		}
	}
	for _, p := range []string{"203.0.113.1/24", "2001:db8:1::1/64"} {
		if err := m.Topology.Router.AddAddress("segment", netip.MustParsePrefix(p)); err != nil {
			t.Fatal(err)
		}
	}
	service := m.directService(method{forward: "dsr"}, 2)
	service.Addresses, service.Ports = m.vips, []string{"80"}
	for i, b := range m.Balancers {
		c := lab.AgentConfig{
			Name: fmt.Sprintf("lb%d", i+1), Address: b.V4, Interfaces: []string{"eth0"}, Mode: "tc",
			L2: []string{"eth0"}, L2SecretFile: gossipKeyFile, Services: []lab.AgentService{service},
		}
		for _, other := range m.Balancers {
			if other.Host != b.Host {
				c.L2Members = append(c.L2Members, other.V4)
			}
		}
		if err := b.WriteFile(gossipKeyFile, "a secret of the members\n", 0o600); err != nil {
			t.Fatal(err)
		}
		m.config = append(m.config, c)
		m.agents = append(m.agents, labtest.Agent(t, b.Host, binary, c))
	}
	m.settled(t, m.agents...)
	return m
}

// routes returns the routes of an agent.
func routesOf(t *testing.T, a *lab.Agent) (routes []lb.RouteStatus, err error) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	err = a.Get(ctx, "/v1/routes", &routes)
	return routes, err
}

// owners returns the agents that announce each address. It fails when another one has no reason that names a member.
func (m *members) owners(t *testing.T, agents ...*lab.Agent) (map[netip.Addr]*lab.Agent, error) {
	t.Helper()
	owners := map[netip.Addr]*lab.Agent{}
	for _, a := range agents {
		routes, err := routesOf(t, a)
		if err != nil {
			return nil, err
		}
		for _, r := range routes {
			switch other := owners[r.Address]; {
			case r.Announced && other != nil:
				return nil, fmt.Errorf("%s is announced by %s and %s", r.Address, other, a)
			case r.Announced:
				owners[r.Address] = a
			case !strings.HasPrefix(r.Reason, "standby: lb") || r.State != lb.RouteWithheld:
				return nil, fmt.Errorf("%s: %s at %s: %q", a, r.State, r.Address, r.Reason)
			}
		}
	}
	if len(owners) != len(m.vips) {
		return nil, fmt.Errorf("%d of %d addresses are announced", len(owners), len(m.vips))
	}
	return owners, nil
}

// settled waits until each address has one owner among these agents.
func (m *members) settled(t *testing.T, agents ...*lab.Agent) (owners map[netip.Addr]*lab.Agent) {
	t.Helper()
	labtest.Until(t, 20*time.Second, "each address has one owner", func() (err error) {
		owners, err = m.owners(t, agents...)
		return err
	})
	return owners
}

// gap sends a request to an address every few milliseconds until stop is called, which returns the longest time between
// the starts of two requests that were answered, and how many were not.
func (m *members) gap(
	t *testing.T, vip netip.Addr, timeout time.Duration,
) (stop func() (longest time.Duration, lost int)) {
	t.Helper()
	client := m.client()
	var mu sync.Mutex
	var answered []time.Time
	var requests sync.WaitGroup
	lost := 0
	done, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		tick := time.NewTicker(15 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-done:
				return
			case <-tick.C:
			}
			requests.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), timeout)
				defer cancel()
				start := time.Now()
				_, err := client.Get(ctx, url(vip))
				mu.Lock()
				defer mu.Unlock()
				if err != nil {
					lost++
				} else {
					answered = append(answered, start)
				}
			})
		}
	}()
	return func() (longest time.Duration, _ int) {
		close(done)
		<-ended
		requests.Wait()
		slices.SortFunc(answered, time.Time.Compare)
		for i := 1; i < len(answered); i++ {
			longest = max(longest, answered[i].Sub(answered[i-1]))
		}
		return longest, lost
	}
}

// forget makes the router resolve an address again.
func (m *members) forget(t *testing.T, vip netip.Addr) {
	t.Helper()
	m.Topology.Router.Run(t.Context(), "ip", "neigh", "del", vip.String(), "dev", "segment") // may be gone already
}

// port returns the switch port of an agent's host.
func (m *members) port(a *lab.Agent) string {
	i := slices.IndexFunc(m.Balancers, func(n lab.Node) bool { return n.Host == a.Host })
	return m.Balancers[i].Port
}

// others returns the agents without one.
func (m *members) others(a *lab.Agent) []*lab.Agent {
	return slices.DeleteFunc(slices.Clone(m.agents), func(x *lab.Agent) bool { return x == a })
}

// takeOver is what a member suffers, and how it comes back.
type takeOver struct {
	name    string
	fail    func(t *testing.T, a *lab.Agent)
	back    func(t *testing.T, a *lab.Agent)
	planned bool // no request may be lost
}

// takeOverLimit is more than the second that it takes at most on a machine that is not busy with other tests.
const takeOverLimit = 3 * time.Second

// TestMembersTakeOver: each address has one owner, and another member takes over from one that fails. A member that
// comes back takes nothing back, nor does one that starts later. On a busy machine that may be all but one, so what
// each has is only printed.
func TestMembersTakeOver(t *testing.T) {
	m := newMembers(t, 3)
	spread := map[*lab.Agent]int{}
	for _, a := range m.settled(t, m.agents...) {
		spread[a]++
	}
	t.Logf("addresses of each member: %v", spread)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	signal := func(s syscall.Signal) func(*testing.T, *lab.Agent) {
		return func(_ *testing.T, a *lab.Agent) { must(a.Process().Signal(s)) }
	}
	start := func(_ *testing.T, a *lab.Agent) { must(a.Start()) }
	end := func(t *testing.T, a *lab.Agent) { must(a.Terminate(t.Context(), 10*time.Second)) }
	for _, k := range []takeOver{
		{"killed", func(_ *testing.T, a *lab.Agent) { a.Kill() }, start, false},
		{"stopped by SIGSTOP", signal(syscall.SIGSTOP), signal(syscall.SIGCONT), false},
		{"link down", func(_ *testing.T, a *lab.Agent) { must(m.Switch.SetDown(m.port(a))) },
			func(_ *testing.T, a *lab.Agent) { must(m.Switch.SetUp(m.port(a))) }, false},
		{"power off", func(_ *testing.T, a *lab.Agent) { must(a.PowerOff()) },
			func(t *testing.T, a *lab.Agent) {
				must(a.PowerOn())
				must(a.WriteFile(gossipKeyFile, "a secret of the members\n", 0o600))
				must(a.Start())
			}, false},
		{"planned end", end, start, true},
	} {
		t.Run(k.name, func(t *testing.T) {
			for _, vip := range m.vips[:2] {
				m.takesOver(t, vip, k)
			}
		})
	}
}

func (m *members) takesOver(t *testing.T, vip netip.Addr, k takeOver) {
	before := m.settled(t, m.agents...)
	failed := before[vip]
	timeout := 200 * time.Millisecond
	if k.planned {
		timeout = 5 * time.Second
	}
	stop := m.gap(t, vip, timeout)
	time.Sleep(200 * time.Millisecond)
	start := time.Now()
	k.fail(t, failed)
	if !k.planned {
		m.forget(t, vip)
	}
	after := m.settled(t, m.others(failed)...)
	known := time.Since(start)
	time.Sleep(time.Second)
	longest, lost := stop()
	t.Logf("%s: %s: %s after %s; longest gap at the client %s, %d requests without an answer", vip, k.name,
		after[vip], known.Round(time.Millisecond), longest.Round(time.Millisecond), lost)
	switch {
	case k.planned && lost > 0:
		t.Errorf("%d requests were lost", lost)
	case !k.planned && longest > takeOverLimit:
		t.Errorf("no request was answered for %s; want at most %s", longest, takeOverLimit)
	}
	k.back(t, failed)
	returned := m.settled(t, m.agents...)
	for _, vip := range m.vips {
		if before[vip] == failed && returned[vip] == failed {
			t.Errorf("%s took %s back from %s", failed, vip, after[vip])
		}
	}
}
