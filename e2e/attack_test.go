package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestAttack runs all attacks in attack_packets_test.go concurrently, while servers come and go and the agent is
// killed. No live connection may end, and no new one may fail. ATTACK_TIME, set by "make attack", is divided between
// the methods and hooks. Without it, each method runs with one hook.
func TestAttack(t *testing.T) {
	took, text := 40*time.Second, os.Getenv("ATTACK_TIME")
	if text != "" {
		var err error
		took, err = time.ParseDuration(text)
		must.Need(t, err == nil, "ATTACK_TIME: %v", err)
	}
	nat, tunnel := []string{"xdp"}, []string{"tc"}
	if text != "" {
		nat, tunnel = []string{"xdp", "tc"}, []string{"xdp", "tc"}
	}
	for _, mode := range nat {
		t.Run("nat/"+mode, func(t *testing.T) {
			s := newSite(t, peers.BIRD, mode, 1, 3)
			s.withstandsAttack(t, took/4, s.services)
		})
	}
	for _, mode := range tunnel {
		t.Run("tunnel/"+mode, func(t *testing.T) {
			m := method{mode: mode, forward: "tunnel", extra: gue, keyed: true}
			s := newDirectSite(t, lab.Shape{Clients: 1, Balancers: 1, Servers: 3, Wired: true}, m, 3)
			s.withstandsAttack(t, took/4, func(active int) []lab.AgentService {
				return []lab.AgentService{s.directService(m, active)}
			})
		})
	}
}

// roundTrip is the clients' round-trip time during floods. Half-open flows must live at least as long.
const roundTrip = 50 * time.Millisecond

// victims are the connections that an attack must not end.
type victims struct {
	long []*traffic.Conns
	udp  []*udpFlow

	mu      sync.Mutex
	opened  int
	slowest time.Duration
	lost    []string
}

func (v *victims) fail(format string, args ...any) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.lost = append(v.lost, time.Now().Format(time.StampMilli+" ")+fmt.Sprintf(format, args...))
}

func (s *site) withstandsAttack(t *testing.T, took time.Duration, services func(active int) []lab.AgentService) {
	must.Do(t, s.Balancers[0].SoftwareChecksums("eth0")) // XDP frames arrive on veth only with GRO
	must.Do(t, s.Delay(s.Clients[0], roundTrip))
	for _, net := range []string{invented4.String(), invented6.String()} { // responses to invented sources
		must.Get(s.Topology.Router.Run(t.Context(), "ip", "route", "add", "blackhole", net))(t)
	}
	v := &victims{}
	for _, vip := range vips {
		v.long = append(v.long, labtest.Connect(t, s.Client(), netip.AddrPortFrom(vip, 9000), 100))
		for range 10 {
			v.udp = append(v.udp, s.openUDP(t, vip))
		}
	}
	var all sync.WaitGroup
	for _, f := range v.udp { // with tunnels, one datagram in eight stores its flow
		all.Go(func() {
			for range 80 {
				if _, err := f.ask(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), took)
	defer cancel()
	var syns [2]int
	for i, vip := range vips {
		all.Go(func() { syns[i] = s.flood(t, ctx, vip, attackSYNs/2) })
		all.Go(func() { s.opens(ctx, v, vip) })
	}
	packets := s.attack(t, ctx, &all, v)
	all.Go(func() { s.disturb(t, ctx, took, services) })
	for _, c := range v.long {
		all.Go(func() { exchanges(ctx, v, c) })
	}
	for _, f := range v.udp {
		all.Go(func() { f.exchanges(ctx, v) })
	}
	all.Wait()
	v.report(t, took, syns[0]+syns[1], packets())
	t.Log(labtest.Metrics(t, s.Agents[0], "steelyard_datapath_packets_total"))
}

func (v *victims) report(t *testing.T, took time.Duration, syns int, packets string) {
	alive := 0
	for _, c := range v.long {
		alive += c.Alive()
	}
	lost := 0
	for _, f := range v.udp {
		lost += f.moved
	}
	t.Logf("sent: %d SYNs from invented sources\n%s", syns, packets)
	t.Logf("%d of 200 live TCP connections go on, %d of %d UDP flows changed their server; %d new connections, "+
		"the slowest took %s", alive, lost, len(v.udp), v.opened, v.slowest.Round(time.Millisecond))
	n := len(v.lost)
	must.True(t, n == 0, "%d lost:\n%s", n, strings.Join(v.lost[:min(n, 10)], "\n"))
	want := int(took.Seconds())
	must.True(t, v.opened >= want, "only %d new connections in %s; want %d", v.opened, took, want)
}

// slowChecks allows servers, which share two CPUs with an attacker, to respond slowly, because this test is not about
// checks.
func slowChecks(services []lab.AgentService) {
	check := &services[0].Check
	check.Interval, check.Timeout, check.Fall = time.Second, time.Second, 20
}

// exchanges exchanges messages over live connections until ctx ends.
func exchanges(ctx context.Context, v *victims, c *traffic.Conns) {
	for ctx.Err() == nil {
		// Allow time for two retransmissions, because host and attacker share two CPUs.
		each, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
		for _, err := range c.Exchange(each) {
			v.fail("live: %v", err)
		}
		cancel()
		sleep(ctx, 100*time.Millisecond)
	}
}

// opens opens connections sequentially, and sends a request over each.
func (s *site) opens(ctx context.Context, v *victims, vip netip.Addr) {
	to := netip.AddrPortFrom(vip, 9000)
	for ctx.Err() == nil {
		each, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
		start := time.Now()
		c, err := s.Client().Connect(each, to, 1)
		took := time.Since(start)
		if err == nil {
			c.Close()
		}
		cancel()
		if err != nil {
			v.fail("new: %v", err)
		}
		v.mu.Lock()
		v.opened++
		v.slowest = max(v.slowest, took)
		v.mu.Unlock()
		sleep(ctx, 20*time.Millisecond)
	}
}

type udpFlow struct {
	to     netip.AddrPort
	ask    func(context.Context) (server string, err error)
	server string
	moved  int
}

// openUDP opens a flow and learns its server.
func (s *site) openUDP(t *testing.T, vip netip.Addr) *udpFlow {
	t.Helper()
	f := &udpFlow{to: netip.AddrPortFrom(vip, 5353)}
	conn := must.Get(s.Client().Dial(t.Context(), "udp", f.to.String()))(t)
	t.Cleanup(func() { conn.Close() })
	buf, n := make([]byte, 256), 0
	f.ask = func(ctx context.Context) (string, error) {
		n++
		text := fmt.Sprintf("message %d", n)
		for ctx.Err() == nil {
			if _, err := conn.Write([]byte(text)); err != nil && ctx.Err() != nil {
				return "", err
			}
			if err := conn.SetReadDeadline(time.Now().Add(300 * time.Millisecond)); err != nil {
				return "", err
			}
			got, err := conn.Read(buf)
			server, echo, _ := strings.Cut(strings.TrimSpace(string(buf[:got])), " ")
			if err == nil && echo == text {
				return server, nil
			}
		}
		return "", fmt.Errorf("no answer: %w", ctx.Err())
	}
	f.server = must.Get(f.ask(t.Context()))(t)
	return f
}

func (f *udpFlow) exchanges(ctx context.Context, v *victims) {
	for ctx.Err() == nil {
		each, cancel := context.WithTimeout(context.WithoutCancel(ctx), 20*time.Second)
		switch server, err := f.ask(each); {
		case err != nil:
			v.fail("UDP to %s: %v", f.to, err)
			cancel()
			return
		case server != f.server:
			f.moved++
			v.fail("UDP to %s: %s answers instead of %s", f.to, server, f.server)
			f.server = server
		}
		cancel()
		sleep(ctx, 200*time.Millisecond)
	}
}

// disturb removes and adds a server, and kills and restarts the agent, until ctx ends. In a long attack, one time in
// four, the agent stays away until packets themselves remove flows, but less than restart_time, including its start on
// a busy machine.
func (s *site) disturb(
	t *testing.T, ctx context.Context, took time.Duration, services func(active int) []lab.AgentService,
) {
	a, c := s.Agents[0], s.Config[0]
	c.BGP = append(c.BGP, `restart_time = "2m"`)
	for i := 0; ctx.Err() == nil; i++ {
		c.Services = services(3 - (i+1)%2)
		slowChecks(c.Services)
		if err := a.Configure(c.TOML()); err != nil {
			t.Error(err)
		}
		if i%3 == 1 {
			away := time.Second
			if i%12 == 4 && took > 2*time.Minute {
				away = 25 * time.Second
			}
			a.Kill()
			sleep(ctx, away)
			if err := errors.Join(a.Start(), a.WaitReady(context.WithoutCancel(ctx), 60*time.Second)); err != nil {
				t.Error(err)
			}
		} else if err := a.Reload(); err != nil {
			t.Error(err)
		}
		sleep(ctx, 2*time.Second)
	}
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// tally counts sent packets by the name of the attack.
type tally struct {
	names []string
	n     []atomic.Int64
}

func (y *tally) String() string {
	var lines []string
	for i, name := range y.names {
		lines = append(lines, fmt.Sprintf("  %8d %s", y.n[i].Load(), name))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
