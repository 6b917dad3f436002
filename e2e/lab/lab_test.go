package lab_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

func TestRequestsGoThroughTheRouter(t *testing.T) {
	for _, shape := range []lab.Shape{
		{Servers: 2, Balancers: 2},
		{Servers: 2, Balancers: 2, Wired: true},
		{Servers: 2, Links: lab.LinkOptions{SoftwareChecksums: true, MTU: 1400}},
	} {
		t.Run(fmt.Sprintf("%+v", shape), func(t *testing.T) {
			topo := labtest.Topology(t, shape)
			client := topo.Clients[0]
			for _, s := range topo.Servers {
				labtest.HTTP(t, s, 8080)
				for i, at := range s.At(8080) {
					a, err := client.Get(t.Context(), "http://"+at.String()+"/?size=100000")
					if err != nil {
						t.Fatal(err)
					}
					want := []netip.Addr{client.V4, client.V6}[i]
					if a.Server != s.Name() || a.Client.Addr() != want || len(a.Body) < 100000 {
						t.Errorf("want %s answering %s with 100000 bytes, got %s answering %s with %d", s, want, a.Server, a.Client, len(a.Body))
					}
				}
			}
			for _, b := range topo.Balancers { // a balancer reaches the servers too, and the router forwards for it when wired
				if r := b.Load(t.Context(), lab.Load{URL: "http://" + topo.Servers[0].At(8080)[0].String(), Requests: 1}); r.Err() != nil {
					t.Error(r.Err())
				}
			}
		})
	}
}

func TestRoutesSpreadFlowsOverNextHops(t *testing.T) {
	topo := labtest.Topology(t, lab.Shape{Servers: 3})
	client, router := topo.Clients[0], topo.Router
	for f, vip := range []string{"203.0.113.1/32", "2001:db8:1::1/128"} {
		vip := netip.MustParsePrefix(vip)
		var hops []netip.Addr
		for _, s := range topo.Servers {
			if err := s.AddAddress("lo", vip); err != nil {
				t.Fatal(err)
			}
			at := netip.AddrPortFrom(vip.Addr(), 80)
			if _, err := s.ServeHTTP(s.Name(), at); err != nil {
				t.Fatal(err)
			}
			hops = append(hops, s.At(0)[f].Addr())
		}
		if err := router.AddRoute(vip, hops...); err != nil {
			t.Fatal(err)
		}
		if _, err := router.WaitNextHops(t.Context(), time.Second, vip, hops...); err != nil {
			t.Fatal(err)
		}
		r := client.Load(t.Context(), lab.Load{URL: "http://" + netip.AddrPortFrom(vip.Addr(), 80).String(), Requests: 150})
		if r.Err() != nil || len(r.Servers) != 3 {
			t.Errorf("want answers of 3 servers, got %v (%v)", r, r.Err())
		}
		if err := router.DeleteRoute(vip); err != nil {
			t.Fatal(err)
		}
		if _, err := router.WaitNextHops(t.Context(), time.Second, vip); err != nil {
			t.Error(err)
		}
	}
}

func TestStoppedServerResetsAndComesBack(t *testing.T) {
	topo := labtest.Topology(t, lab.Shape{})
	client, server := topo.Clients[0], topo.Servers[0]
	echo := labtest.TCPEcho(t, server, 7)
	web := labtest.HTTP(t, server, 80)
	conns := labtest.Connect(t, client.Host, server.At(7)[0], 10)
	if err := errors.Join(echo.Stop(), web.Stop()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	for _, err := range conns.Exchange(ctx) {
		if !strings.Contains(err.Error(), "reset") && !strings.Contains(err.Error(), "broken pipe") {
			t.Errorf("want a reset, got %v", err)
		}
	}
	if conns.Alive() != 0 || echo.Connections() != 0 {
		t.Errorf("want no connection, got %d at the client and %d at the server", conns.Alive(), echo.Connections())
	}
	if _, err := client.Get(ctx, "http://"+server.At(80)[0].String()); err == nil || !strings.Contains(err.Error(), "refused") {
		t.Errorf("want connection refused, got %v", err)
	}
	if err := errors.Join(echo.Start(), web.Start()); err != nil {
		t.Fatal(err)
	}
	web.SetHealthy(false)
	a, err := client.Get(ctx, "http://"+server.At(80)[1].String()+"/healthz")
	if err != nil || a.Status != 503 {
		t.Errorf("want status 503 from /healthz, got %+v, %v", a, err)
	}
	labtest.Connect(t, client.Host, server.At(7)[1], 1)
}

func TestPowerOffIsSilentAndPowerOnHeals(t *testing.T) {
	topo := labtest.Topology(t, lab.Shape{Servers: 2, Balancers: 1, Wired: true})
	client, lb := topo.Clients[0], topo.Balancers[0]
	labtest.HTTP(t, lb, 80)
	labtest.UDPEcho(t, lb, 53)
	vip := netip.MustParsePrefix("203.0.113.1/32")
	if err := topo.Router.AddRoute(vip, lb.V4); err != nil {
		t.Fatal(err)
	}
	if err := lb.WriteFile("/run/x", "x", 0o600); err != nil {
		t.Fatal(err)
	}
	sleeper, err := lb.Start(lab.Command{Path: "sleep", Args: []string{"60"}})
	if err != nil {
		t.Fatal(err)
	}
	ask := func() error {
		all := errors.Join(client.Ping(t.Context(), lb.V4), client.Ping(t.Context(), lb.V6))
		for i := range lb.At(0) {
			all = errors.Join(all, client.Load(t.Context(), lab.Load{URL: "http://" + lb.At(80)[i].String(), Requests: 3, Timeout: 300 * time.Millisecond}).Err(),
				client.UDP(t.Context(), lb.At(53)[i], 3, 0, 300*time.Millisecond).Err())
		}
		return all
	}
	if err := ask(); err != nil {
		t.Fatal(err)
	}
	if err := lb.PowerOff(); err != nil {
		t.Fatal(err)
	}
	if _, err := lb.ReadFile("/run/x"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("want a file in memory lost with the power, got %v", err)
	}
	if sleeper.Running() {
		t.Error("a process outlived the power of its host")
	}
	if err := ask(); err == nil {
		t.Error("a host without power answers")
	}
	if hops, err := topo.Router.NextHops(vip); err != nil || len(hops) != 0 {
		t.Errorf("want no next hop behind a link without carrier, got %v, %v", hops, err)
	}
	if err := lb.PowerOn(); err != nil {
		t.Fatal(err)
	}
	labtest.Until(t, 5*time.Second, "the host answers again", ask)
}

// TestHostsHaveTheirOwnSystemDirectories is what lets two agents run on one kernel.
func TestHostsHaveTheirOwnSystemDirectories(t *testing.T) {
	topo := labtest.Topology(t, lab.Shape{})
	a, b := topo.Balancers[0], topo.Servers[0]
	if err := a.WriteFile("/run/steelyard/x", "here", 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := b.ReadFile("/run/steelyard/x"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("want no such file in another host, got %v", err)
	}
	if _, err := os.Stat("/run/steelyard/x"); err == nil {
		t.Error("a file of the host's /run is in ours")
	}
	out, err := a.Run(t.Context(), "sh", "-c", "cat /run/steelyard/x; mkdir /sys/fs/bpf/mine; ls /sys/class/net /sys/fs/bpf; ls -d /sys/fs/cgroup/*")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"here", "\neth0\n", "\nmine\n", "/sys/fs/cgroup/"} {
		if !strings.Contains(out, want) {
			t.Errorf("want %q in\n%s", want, out)
		}
	}
	if out, err = b.Run(t.Context(), "ls", "/sys/fs/bpf"); err != nil || strings.Contains(out, "mine") {
		t.Errorf("want an empty bpffs in another host, got %q, %v", out, err)
	}
}

func TestProcessesAreEndedInOrderAndByForce(t *testing.T) {
	topo := labtest.Topology(t, lab.Shape{})
	h := topo.Servers[0]
	polite, err := h.Start(lab.Command{Path: "sh", Args: []string{"-c", "trap 'echo bye; exit 3' TERM; echo ready; while :; do sleep 0.05; done"}})
	if err != nil {
		t.Fatal(err)
	}
	labtest.Until(t, 5*time.Second, "the trap is set", func() error {
		if !polite.Log.Contains("ready") {
			return errors.New("not yet")
		}
		return nil
	})
	if err := polite.Stop(); err != nil {
		t.Fatal(err)
	}
	var exit *exec.ExitError
	if err := polite.Wait(t.Context()); !errors.As(err, &exit) || exit.ExitCode() != 3 || !polite.Log.Contains("bye") {
		t.Errorf("want exit status 3 and a goodbye, got %v and %q", err, polite.Log.Lines())
	}
	if _, err := h.Run(t.Context(), "sh", "-c", "echo why >&2; exit 4"); err == nil || !strings.Contains(err.Error(), "why") {
		t.Errorf("want an error with what the program said, got %v", err)
	}
	grandchild, err := h.Start(lab.Command{Path: "sh", Args: []string{"-c", "sleep 61 & echo $!; wait"}})
	if err != nil {
		t.Fatal(err)
	}
	labtest.Until(t, 5*time.Second, "the grandchild runs", func() error {
		if len(grandchild.Log.Lines()) == 0 {
			return errors.New("not yet")
		}
		return nil
	})
	grandchild.Kill()
	pid, err := strconv.Atoi(strings.TrimSpace(grandchild.Log.Tail(1)))
	if err != nil {
		t.Fatal(err)
	}
	labtest.Until(t, 2*time.Second, "the grandchild is gone", func() error { return notRunning(pid) })
}

func TestPanicsAndErrorsComeOutOfDo(t *testing.T) {
	h := labtest.Host(t, labtest.New(t), "h")
	want := errors.New("no")
	if err := h.Do(func() error { return want }); !errors.Is(err, want) {
		t.Errorf("want %v, got %v", want, err)
	}
	defer func() {
		if p := recover(); p == nil || !strings.Contains(fmt.Sprint(p), "ouch") {
			t.Errorf("want the panic of the function, got %v", p)
		}
	}()
	h.Do(func() error { panic("ouch") })
}

// TestNothingStays: descriptors, processes, and what is in this process's own namespaces are after a Lab what they
// were before, although the lab was full of life when it was closed.
func TestNothingStays(t *testing.T) {
	labtest.Root(t)
	fill := func() {
		topo, err := lab.NewTopology(lab.Shape{Servers: 2})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := errors.Join(topo.Close(), topo.Close()); err != nil {
				t.Error(err)
			}
		}()
		server := topo.Servers[0]
		labtest.HTTP(t, server, 80)
		labtest.TCPEcho(t, server, 7)
		labtest.UDPEcho(t, server, 53)
		if _, err := server.Start(lab.Command{Path: "sleep", Args: []string{"62"}}); err != nil {
			t.Fatal(err)
		}
		conns, err := topo.Clients[0].Connect(t.Context(), server.At(7)[0], 3)
		if err != nil {
			t.Fatal(err)
		}
		defer conns.Close()
		traffic := topo.Clients[0].Traffic(t.Context(), "http://"+server.At(80)[0].String(), 5*time.Millisecond, time.Second)
		defer traffic.Stop()
		labtest.Until(t, 5*time.Second, "traffic flows", func() error {
			if r := traffic.Between(time.Time{}, time.Time{}); r.Answered() < 5 {
				return errors.New(r.String())
			}
			return nil
		})
		if r := traffic.Between(time.Time{}, time.Time{}); r.Err() != nil {
			t.Error(r.Err())
		}
	}
	fill() // what the runtime and the resolver open once, they may keep
	before := traces(t)
	fill()
	labtest.Until(t, 5*time.Second, "nothing is left", func() error {
		if diff := cmp.Diff(before, traces(t)); diff != "" {
			return errors.New(diff)
		}
		return nil
	})
}

// traces are the marks a lab could leave.
func traces(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, dir := range []string{"/sys/class/net", "/run/netns", "/sys/fs/bpf", "/run"} {
		all["files"] = append(all["files"], glob(dir+"/*")...)
	}
	for _, fd := range glob("/proc/self/fd/*") {
		if to, err := os.Readlink(fd); err == nil && !strings.HasPrefix(to, "/proc/") {
			kind, _, _ := strings.Cut(to, "[")
			all["descriptors"] = append(all["descriptors"], kind)
		}
	}
	slices.Sort(all["descriptors"])
	self := strconv.Itoa(os.Getpid())
	for _, stat := range glob("/proc/[0-9]*/stat") {
		b, _ := os.ReadFile(stat)
		if _, rest, ok := strings.Cut(string(b), ") "); ok && strings.Fields(rest)[1] == self {
			all["children"] = append(all["children"], stat)
		}
	}
	ns, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	all["namespace"] = []string{ns}
	return all
}

func glob(pattern string) []string {
	names, _ := filepath.Glob(pattern) // the pattern is a constant
	return names
}
