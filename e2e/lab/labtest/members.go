package labtest

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/lb"
)

// Members are load balancers that share addresses through ARP and NDP.
type Members struct {
	*Site
	VIPs []netip.Addr
}

// RoutesOf returns an agent's routes.
func RoutesOf(t *testing.T, a *lab.Agent) (routes []lb.RouteStatus, err error) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	err = a.Get(ctx, "/v1/routes", &routes)
	return routes, err
}

// Owners returns the agents that announce each of the addresses. It fails if another agent's reason does not name a
// member.
func (m *Members) Owners(t *testing.T, agents ...*lab.Agent) (map[netip.Addr]*lab.Agent, error) {
	t.Helper()
	owners := map[netip.Addr]*lab.Agent{}
	for _, a := range agents {
		routes, err := RoutesOf(t, a)
		if err != nil {
			return nil, err
		}
		for _, r := range routes {
			switch other := owners[r.Address]; {
			case !slices.Contains(m.VIPs, r.Address): // announced in another way
			case r.Announced && other != nil:
				return nil, fmt.Errorf("%s is announced by %s and %s", r.Address, other, a)
			case r.Announced:
				owners[r.Address] = a
			case !strings.HasPrefix(r.Reason, "standby: lb") || r.State != lb.RouteWithheld:
				return nil, fmt.Errorf("%s: %s at %s: %q", a, r.State, r.Address, r.Reason)
			}
		}
	}
	if len(owners) != len(m.VIPs) {
		return nil, fmt.Errorf("%d of %d addresses are announced", len(owners), len(m.VIPs))
	}
	return owners, nil
}

// Settled waits until each address has one owner among these agents.
func (m *Members) Settled(t *testing.T, agents ...*lab.Agent) (owners map[netip.Addr]*lab.Agent) {
	t.Helper()
	Until(t, "each address has one owner", func() (err error) {
		owners, err = m.Owners(t, agents...)
		return err
	})
	return owners
}

// Gap sends a request to an address every few milliseconds until stop is called. stop returns the longest time between
// the starts of two answered requests, and the number of unanswered ones.
func (m *Members) Gap(
	t *testing.T, vip netip.Addr, timeout time.Duration,
) (stop func() (longest time.Duration, lost int)) {
	t.Helper()
	client := m.Client()
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
				_, err := client.Get(ctx, URL(vip))
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

// Forget makes the router resolve an address again.
func (m *Members) Forget(t *testing.T, vip netip.Addr) {
	t.Helper()
	m.Topology.Router.Run(t.Context(), "ip", "neigh", "del", vip.String(), "dev", "segment") // may already be gone
}

// Port returns the switch port of an agent's host.
func (m *Members) Port(a *lab.Agent) string {
	i := slices.IndexFunc(m.Balancers, func(n lab.Node) bool { return n.Host == a.Host })
	return m.Balancers[i].Port
}

// Others returns all agents except one.
func (m *Members) Others(a *lab.Agent) []*lab.Agent {
	return slices.DeleteFunc(slices.Clone(m.Agents), func(x *lab.Agent) bool { return x == a })
}

// TakeOver is a failure of a member, and its repair.
type TakeOver struct {
	Name    string
	Fail    func(t *testing.T, a *lab.Agent)
	Back    func(t *testing.T, a *lab.Agent)
	Planned bool // no request may be lost
}

// TakeOverLimit exceeds the second that a takeover takes at most, because other tests keep the machine busy.
const TakeOverLimit = 2 * time.Second

// TakesOver makes the owner of an address fail as in k, and measures how long requests are not answered.
func (m *Members) TakesOver(t *testing.T, vip netip.Addr, k TakeOver) {
	before := m.Settled(t, m.Agents...)
	failed := before[vip]
	timeout := 200 * time.Millisecond
	if k.Planned {
		timeout = 5 * time.Second
	}
	stop := m.Gap(t, vip, timeout)
	time.Sleep(200 * time.Millisecond)
	start := time.Now()
	k.Fail(t, failed)
	if !k.Planned {
		m.Forget(t, vip)
	}
	after := m.Settled(t, m.Others(failed)...)
	known := time.Since(start)
	time.Sleep(time.Second)
	longest, lost := stop()
	t.Logf("%s: %s: %s after %s; longest gap at the client %s, %d requests without an answer", vip, k.Name,
		after[vip], known.Round(time.Millisecond), longest.Round(time.Millisecond), lost)
	switch {
	case k.Planned && lost > 0:
		t.Errorf("%d requests were lost", lost)
	case !k.Planned && longest > TakeOverLimit:
		t.Errorf("no request was answered for %s; want at most %s", longest, TakeOverLimit)
	}
	k.Back(t, failed)
	returned := m.Settled(t, m.Agents...)
	for _, vip := range m.VIPs {
		if before[vip] == failed && returned[vip] == failed {
			t.Errorf("%s took %s back from %s", failed, vip, after[vip])
		}
	}
}

// Apart waits until each of these agents has one of m's addresses per family.
func (m *Members) Apart(t *testing.T, agents ...*lab.Agent) {
	t.Helper()
	Until(t, "each member has an address of each family", func() error {
		owners, err := m.Owners(t, agents...)
		if err != nil {
			return err
		}
		for _, is4 := range []bool{true, false} {
			has := map[*lab.Agent][]netip.Addr{}
			for vip, a := range owners {
				if vip.Is4() == is4 {
					has[a] = append(has[a], vip)
				}
			}
			if len(has) != len(agents) {
				return fmt.Errorf("%d of %d agents have one: %v", len(has), len(agents), has)
			}
		}
		return nil
	})
}
