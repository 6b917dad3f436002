package e2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf/link"

	"github.com/steelyard-lb/steelyard/datapath/dptest"
	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// vandal is a change that someone else makes on a running load balancer.
type vandal struct {
	name     string
	do, undo func(*lab.Host) error
	// withdrawn means that no packet can be answered during the change, so the address must not be announced. Otherwise
	// requests must be answered.
	withdrawn bool
	// mode is the hook, or "" for every hook. If no packet can be answered, both hooks make the agent withdraw in the
	// same way.
	mode   string
	within time.Duration // limit for the detection; 0 for noticed
	// astray means that during the change, the router does not lead to the servers.
	astray bool
}

// noticed limits the time until a change is detected. A router must miss several requests before it is considered down.
const noticed, neighbourDown = 3 * time.Second, 10 * time.Second

func commands(lines ...string) func(*lab.Host) error {
	return func(h *lab.Host) error {
		for _, line := range lines {
			words := strings.Fields(line)
			if out, err := h.Run(context.Background(), words[0], words[1:]...); err != nil {
				return fmt.Errorf("%s: %w\n%s", line, err, out)
			}
		}
		return nil
	}
}

// sysctls returns a function that changes kernel parameters in this order.
func sysctls(changes ...string) func(*lab.Host) error {
	return func(h *lab.Host) error {
		for _, change := range changes {
			name, value, _ := strings.Cut(change, "=")
			if err := h.Sysctl(map[string]string{name: value}); err != nil {
				return err
			}
		}
		return nil
	}
}

const linkPins = "/sys/fs/bpf/steelyard/v*/links/"

// detachLinks returns a function that detaches our programs' links, like "bpftool link detach".
func detachLinks(pattern string) func(*lab.Host) error {
	return func(h *lab.Host) error {
		return h.Do(func() error {
			paths, err := filepath.Glob(linkPins + pattern)
			if err != nil || len(paths) == 0 {
				return fmt.Errorf("no link %s: %w", pattern, err)
			}
			for _, p := range paths {
				l, err := link.LoadPinnedLink(p, nil)
				if err != nil {
					return err
				}
				d, ok := l.(interface{ Detach() error })
				if !ok {
					return fmt.Errorf("%T cannot be detached", l)
				}
				if err := errors.Join(d.Detach(), l.Close()); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

func removePins(pattern string) func(*lab.Host) error {
	return func(h *lab.Host) error {
		return h.Do(func() error {
			paths, err := filepath.Glob(pattern)
			for _, p := range paths {
				err = errors.Join(err, os.RemoveAll(p))
			}
			return err
		})
	}
}

// attachXDP returns a function that replaces our program on eth0 with one that has a constant result.
func attachXDP(result int32) func(*lab.Host) error {
	return func(h *lab.Host) error { return h.Do(func() error { return dptest.AttachXDP("eth0", result) }) }
}

func detachXDP(h *lab.Host) error {
	return h.Do(func() error { return dptest.DetachXDP("eth0") })
}

func nothing(*lab.Host) error { return nil }

// The load balancer has 192.0.2.130 on eth0, towards the router, and 192.0.2.100 on eth1, towards the servers.
var vandals = []vandal{
	{name: "programs of tc detached", do: detachLinks("eth*tcx*"), undo: nothing},
	{name: "XDP detached", do: detachLinks("eth0:xdp"), undo: nothing, mode: "xdp"},
	{name: "pins of links removed", do: removePins(linkPins + "*"), undo: nothing},
	{name: "all pins removed", do: removePins("/sys/fs/bpf/steelyard"), undo: nothing},
	{name: "bpffs mounted over the pins", do: commands("mount -t bpf bpf /sys/fs/bpf"),
		undo: commands("umount -l /sys/fs/bpf")},
	{name: "forwarding switched off", undo: nothing, do: sysctls("net.ipv4.ip_forward=1", "net.ipv4.ip_forward=0")},
	{name: "strict reverse path filter",
		do:   sysctls("net.ipv4.conf.all.rp_filter=1", "net.ipv4.conf.eth0.rp_filter=1"),
		undo: sysctls("net.ipv4.conf.all.rp_filter=0", "net.ipv4.conf.eth0.rp_filter=0")},
	{name: "link to the servers down", withdrawn: false, do: commands("ip link set eth1 down"),
		undo: commands("ip link set eth1 up")},
	{name: "address towards the servers removed", do: commands("ip address del 192.0.2.100/25 dev eth1"),
		undo: commands("ip address add 192.0.2.100/25 dev eth1")},
	{name: "link to the servers down, and another way that leads nowhere", withdrawn: true, astray: true, mode: "tc",
		do: commands("ip link set eth1 down"), undo: commands("ip link set eth1 up")},
	{name: "address towards the servers removed, and another way that leads nowhere", withdrawn: true, astray: true,
		mode: "xdp", do: commands("ip address del 192.0.2.100/25 dev eth1"),
		undo: commands("ip address add 192.0.2.100/25 dev eth1")},
	{name: "route to the servers deleted", do: commands("ip route del 192.0.2.0/25 dev eth1"),
		undo: commands("ip route add 192.0.2.0/25 dev eth1 src 192.0.2.100")},
	{name: "blackhole towards the servers", withdrawn: true, mode: "tc",
		do:   commands("ip rule add priority 10 to 192.0.2.0/25 blackhole"),
		undo: commands("ip rule del priority 10")},
	{name: "blackhole routes to each server", withdrawn: true, mode: "xdp",
		do: commands("ip route add blackhole 192.0.2.21", "ip route add blackhole 192.0.2.22",
			"ip route add blackhole 192.0.2.23"),
		undo: commands("ip route del blackhole 192.0.2.21", "ip route del blackhole 192.0.2.22",
			"ip route del blackhole 192.0.2.23")},
	{name: "default route deleted", withdrawn: true, mode: "tc", do: commands("ip route del default"),
		undo: commands("ip route add default via 192.0.2.129")},
	{name: "default route deleted, and a route to private networks", withdrawn: true, mode: "xdp",
		do:   commands("ip route add 10.0.0.0/8 via 192.0.2.21", "ip route del default"),
		undo: commands("ip route add default via 192.0.2.129", "ip route del 10.0.0.0/8")},
	{name: "default route to a router that is down", withdrawn: true, within: neighbourDown, mode: "tc",
		do:   commands("ip route replace default via 192.0.2.99 dev eth1"),
		undo: commands("ip route replace default via 192.0.2.129 dev eth0")},
	{name: "MAC address of the uplink changed", do: commands("ip link set eth0 address 02:00:00:00:aa:01"),
		undo: nothing},
	{name: "MTU lowered", do: commands("ip link set eth1 mtu 1400"), undo: commands("ip link set eth1 mtu 1500")},
	{name: "another XDP program that passes", mode: "tc", do: attachXDP(dptest.XDPPass), undo: detachXDP},
	{name: "another XDP program that drops", mode: "tc", withdrawn: true,
		do: attachXDP(dptest.XDPDrop), undo: detachXDP},
	{name: "our XDP program replaced", mode: "xdp",
		do:   func(h *lab.Host) error { return errors.Join(detachLinks("eth0:xdp")(h), attachXDP(dptest.XDPPass)(h)) },
		undo: detachXDP},
	{name: "NIC towards the servers deleted", do: commands("ip link delete eth1"), undo: nothing},
}

// TestVandals breaks a running load balancer with two NICs, neither of them configured, and no health checks, so only
// its datapath can detect the damage. It must never announce an address that does not respond.
func TestVandals(t *testing.T) {
	for _, mode := range []string{"tc", "xdp"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel() // only with each other, because time limits are asserted
			s := newSite(t, peers.BIRD, mode, 1, 3)
			balancer, agent := s.Balancers[0], s.Agents[0]
			must.Do(t, agent.Terminate(t.Context(), 10*time.Second))
			s.Config[0].Interfaces = nil
			s.Config[0].Services[0].Check = lab.AgentCheck{Type: "none"}
			must.Do(t, errors.Join(agent.Configure(s.Config[0].TOML()), agent.Start()))
			s.waitRoutes(t, balancer)
			s.waitAnswered(t)
			t.Run("a NIC towards the servers appears", func(t *testing.T) {
				s.linkToServers(t, mode)
				s.neverDead(t, false, noticed)
				must.Do(t, shows(t, agent, "eth1: ", "status"))
			})
			for _, v := range vandals {
				if v.mode != "" && v.mode != mode {
					continue
				}
				t.Run(v.name, func(t *testing.T) {
					if v.astray {
						s.leadAstray(t)
					}
					must.Do(t, v.do(balancer.Host))
					s.neverDead(t, v.withdrawn, cmp.Or(v.within, noticed))
					must.Do(t, v.undo(balancer.Host))
					labtest.Until(t, "requests are answered again", func() error { return s.try(t) })
				})
			}
			t.Run("one of the servers is not reached", s.oneNotReached)
			t.Run("no peer", s.noPeer)
		})
	}
}

// leadAstray makes the router drop packets to the servers until the test ends.
func (s *site) leadAstray(t *testing.T) {
	t.Helper()
	time.Sleep(time.Second) // the agent must detect that the link leads to the servers again
	rule := func(what string) string { return "ip rule " + what + " priority 10 to 192.0.2.0/25 blackhole" }
	must.Do(t, commands(rule("add"))(s.Topology.Router))
	t.Cleanup(func() { must.Do(t, commands(rule("del"))(s.Topology.Router)) })
}

// try sends a few requests to the IPv4 VIP.
func (s *site) try(t *testing.T) error {
	return s.Client().Load(t.Context(),
		traffic.Load{URL: labtest.URL(vip4), Requests: 10, Timeout: 500 * time.Millisecond}).Err()
}

// neverDead waits until the VIP is withdrawn, if that is wanted, or responds. explain must agree.
func (s *site) neverDead(t *testing.T, withdrawn bool, within time.Duration) {
	t.Helper()
	start := time.Now()
	if !withdrawn {
		time.Sleep(time.Second) // what a change stops may continue for a moment
	}
	labtest.Within(t, within, "it is withdrawn, or answers", func() error {
		hops, err := s.Topology.Router.NextHops(labtest.HostRoute(vip4))
		if err != nil {
			return lab.Permanent(err)
		}
		if withdrawn {
			return labtest.ErrorIf(len(hops) > 0, "announced by %v", hops)
		}
		if len(hops) == 0 {
			return errors.New("not announced")
		}
		return s.try(t)
	})
	if withdrawn {
		t.Logf("withdrawn after %s", time.Since(start).Round(time.Millisecond))
	}
	out, err := s.Agents[0].CLI(t.Context(), "explain", s.Clients[0].V4.String(), vip4.String()+":80")
	must.True(t, (err != nil) == withdrawn && strings.Contains(out, "no answer:") == withdrawn,
		"explain: %v\n%s", err, out)
}

// oneNotReached checks that the address stays announced, and that the status is a warning as long as clients of one
// server receive no response.
func (s *site) oneNotReached(t *testing.T) {
	status := func(want string) {
		t.Helper()
		labtest.Until(t, "the status is "+want, func() error {
			out, err := s.Agents[0].CLI(t.Context(), "status")
			return errors.Join(err, labtest.ErrorIf(!strings.HasPrefix(out, want), "%s", out))
		})
	}
	status("OK\n")
	way := " blackhole " + s.Servers[0].V4.String()
	must.Do(t, commands("ip route add"+way)(s.Balancers[0].Host))
	status("DEGRADED: client packets do not reach a server: " + s.Servers[0].V4.String() + ":")
	hops, err := s.Topology.Router.NextHops(labtest.HostRoute(vip4))
	must.True(t, err == nil && len(hops) > 0, "next hops %v, %v", hops, err)
	must.Do(t, commands("ip route del"+way)(s.Balancers[0].Host))
	status("OK\n")
}

// noPeer checks that without a session, an address is offered but not announced.
func (s *site) noPeer(t *testing.T) {
	b := s.Balancers[0]
	cut := commands("ip route add blackhole "+b.Gateway4.String(), "ip -6 route add blackhole "+b.Gateway6.String())
	must.Do(t, cut(b.Host))
	labtest.Until(t, "the address is offered",
		func() error { return shows(t, s.Agents[0], "offered", "routes") })
}
