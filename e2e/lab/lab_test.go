package lab_test

import (
	"bufio"
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
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/e2e/lab/traffic"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

func TestPowerOffStopsAndPowerOnRestores(t *testing.T) {
	topo := labtest.Topology(t, lab.Shape{Servers: 2, Balancers: 1, Wired: true})
	client, lb := traffic.From(topo.Clients[0].Host), topo.Balancers[0]
	labtest.HTTP(t, lb, 80)
	labtest.UDPEcho(t, lb, 53)
	vip := netip.MustParsePrefix("203.0.113.1/32")
	must.Do(t, topo.Router.AddRoute(vip, lb.V4))
	must.Do(t, lb.WriteFile("/run/x", "x", 0o600))
	sleeper := must.Get(lb.Start(lab.Command{Path: "sleep", Args: []string{"60"}}))(t)
	request := func() error {
		all := errors.Join(client.Ping(t.Context(), lb.V4), client.Ping(t.Context(), lb.V6))
		for i := range lb.At(0) {
			const timeout = 300 * time.Millisecond
			load := traffic.Load{URL: "http://" + lb.At(80)[i].String(), Requests: 3, Timeout: timeout}
			all = errors.Join(all, client.Load(t.Context(), load).Err(),
				client.UDP(t.Context(), lb.At(53)[i], 3, 0, timeout).Err())
		}
		return all
	}
	must.Do(t, request())
	must.Do(t, lb.PowerOff())
	_, err := lb.ReadFile("/run/x")
	must.True(t, errors.Is(err, os.ErrNotExist), "want no file in /run after PowerOff, got %v", err)
	must.True(t, !sleeper.Running(), "a process runs after PowerOff")
	must.True(t, request() != nil, "a host responds after PowerOff")
	hops, err := topo.Router.NextHops(vip)
	must.True(t, err == nil && len(hops) == 0, "want no next hop behind a link without carrier, got %v, %v", hops, err)
	must.Do(t, lb.PowerOn())
	labtest.Until(t, "the host responds again", request)
}

func TestDelay(t *testing.T) {
	topo := labtest.Topology(t, lab.Shape{})
	server, client := topo.Servers[0], topo.Clients[0]
	web := labtest.HTTP(t, server, 8080)
	const roundTrip = 60 * time.Millisecond
	must.Do(t, topo.Delay(client, roundTrip))
	for _, at := range server.At(8080) {
		start := time.Now()
		conn := must.Get(client.Dial(t.Context(), "tcp", at.String()))(t)
		conn.Close()
		took := time.Since(start)
		must.True(t, took >= roundTrip, "%s: connected after %v", at, took)
	}
	// Large frames must arrive, with correct checksums.
	upload, err := traffic.From(client.Host).Upload(t.Context(), "http://"+server.At(8080)[0].String()+"/", 1<<20)
	must.True(t, err == nil, "upload: %v, %+v, %d requests", err, upload, web.Requests())
}

// Two agents on one kernel share neither files nor pins.
func TestHostsHaveTheirOwnSystemDirectories(t *testing.T) {
	topo := labtest.Topology(t, lab.Shape{})
	a, b := topo.Balancers[0], topo.Servers[0]
	must.Do(t, a.WriteFile("/run/steelyard/x", "here", 0o600))
	_, err := b.ReadFile("/run/steelyard/x")
	must.True(t, errors.Is(err, os.ErrNotExist), "want no such file in another host, got %v", err)
	_, err = os.Stat("/run/steelyard/x")
	must.True(t, err != nil, "a file of the host's /run is in ours")
	const script = "cat /run/steelyard/x; mkdir /sys/fs/bpf/mine; ls /sys/class/net /sys/fs/bpf; ls -d /sys/fs/cgroup/*"
	out := must.Get(a.Run(t.Context(), "sh", "-c", script))(t)
	for _, want := range []string{"here", "\neth0\n", "\nmine\n", "/sys/fs/cgroup/"} {
		must.True(t, strings.Contains(out, want), "want %q in\n%s", want, out)
	}
	out = must.Get(b.Run(t.Context(), "ls", "/sys/fs/bpf"))(t)
	must.True(t, !strings.Contains(out, "mine"), "want an empty bpffs in another host, got %q", out)
}

func TestStopAndKillEndProcesses(t *testing.T) {
	topo := labtest.Topology(t, lab.Shape{})
	h := topo.Servers[0]
	const script = "trap 'echo stopped; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
	process := must.Get(h.Start(lab.Command{Path: "sh", Args: []string{"-c", script}}))(t)
	labtest.Until(t, "the trap is set", func() error {
		return labtest.ErrorIf(!process.Log.Contains("ready"), "not yet")
	})
	must.Do(t, process.Stop())
	var exit *exec.ExitError
	if err := process.Wait(t.Context()); !errors.As(err, &exit) || exit.ExitCode() != 3 ||
		!process.Log.Contains("stopped") {
		t.Errorf("want exit status 3 and the output of the trap, got %v and %q", err, process.Log.Lines())
	}
	_, err := h.Run(t.Context(), "sh", "-c", "echo reason >&2; exit 4")
	must.True(t, err != nil && strings.Contains(err.Error(), "reason"),
		"want an error with the output of the program, got %v", err)
	grandchild := must.Get(h.Start(lab.Command{Path: "sh", Args: []string{"-c", "sleep 61 & echo $!; wait"}}))(t)
	labtest.Until(t, "the grandchild runs", func() error {
		return labtest.ErrorIf(len(grandchild.Log.Lines()) == 0, "not yet")
	})
	grandchild.Kill()
	pid := must.Get(strconv.Atoi(strings.TrimSpace(grandchild.Log.Tail(1))))(t)
	labtest.Until(t, "the grandchild has ended", func() error { return notRunning(pid) })
}

func TestDoReturnsErrorsAndPanics(t *testing.T) {
	h := labtest.Host(t, labtest.New(t), "h")
	want := errors.New("no")
	err := h.Do(func() error { return want })
	must.True(t, errors.Is(err, want), "want %v, got %v", want, err)
	defer func() {
		if p := recover(); p == nil || !strings.Contains(fmt.Sprint(p), "panic of the test") {
			t.Errorf("want the panic of the function, got %v", p)
		}
	}()
	h.Do(func() error { panic("panic of the test") })
}

// After a Lab with processes, servers and traffic is closed, this process has the same descriptors, child processes and
// files in its namespaces as before.
func TestCloseLeavesNothing(t *testing.T) {
	labtest.Root(t)
	use := func() {
		topo := must.Get(lab.NewTopology(lab.Shape{Servers: 2}))(t)
		defer func() {
			must.Do(t, errors.Join(topo.Close(), topo.Close()))
		}()
		server, client := topo.Servers[0], traffic.From(topo.Clients[0].Host)
		labtest.HTTP(t, server, 80)
		labtest.TCPEcho(t, server, 7)
		labtest.UDPEcho(t, server, 53)
		must.Get(server.Start(lab.Command{Path: "sleep", Args: []string{"62"}}))(t)
		conns := must.Get(client.Connect(t.Context(), server.At(7)[0], 3))(t)
		defer conns.Close()
		stream := client.Stream(t.Context(), "http://"+server.At(80)[0].String(), 5*time.Millisecond, time.Second)
		defer stream.Stop()
		labtest.Until(t, "traffic flows", func() error {
			r := stream.Between(time.Time{}, time.Time{})
			return labtest.ErrorIf(r.Answered() < 5, "%s", r.String())
		})
		must.Do(t, stream.Between(time.Time{}, time.Time{}).Err())
	}
	use() // the runtime and the resolver open some descriptors permanently
	before := traces(t)
	use()
	labtest.Until(t, "the traces are as before", func() error {
		diff := cmp.Diff(before, traces(t))
		return labtest.ErrorIf(diff != "", "%s", diff)
	})
}

// traces returns objects that a lab could fail to remove.
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
	ns := must.Get(os.Readlink("/proc/self/ns/net"))(t)
	all["namespace"] = []string{ns}
	return all
}

func glob(pattern string) []string {
	names, _ := filepath.Glob(pattern) // the pattern is a constant
	return names
}

// ownerEnv makes this test program build a lab with processes, print their process IDs, and wait for SIGKILL.
const ownerEnv = "STEELYARD_LAB_OWNER"

func TestMain(m *testing.M) {
	if os.Getenv(ownerEnv) == "" {
		os.Exit(m.Run())
	}
	if err := ownLab(); err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
}

func ownLab() error {
	topo, err := lab.NewTopology(lab.Shape{})
	if err != nil {
		return err
	}
	sleep, err := topo.Servers[0].Start(lab.Command{Path: "sleep", Args: []string{"63"}})
	if err != nil {
		return err
	}
	all := []*lab.Process{sleep}
	for i, kind := range peers.RouterKinds {
		if kind.Installed() != nil {
			continue
		}
		h := []*lab.Host{topo.Router, topo.Balancers[0].Host}[i]
		config := peers.RouterConfig{ID: netip.MustParseAddr("192.0.2.1"), ASN: 64500}
		r, err := peers.StartRouter(context.Background(), h, kind, config)
		if err != nil {
			return err
		}
		all = append(all, r.Processes...)
	}
	for _, p := range all {
		fmt.Println(p.Pid())
	}
	fmt.Println("ready")
	time.Sleep(time.Minute) // the test kills it before; this limits its life after a broken test
	return topo.Close()
}

// The kernel kills a lab's programs when the process that started them is killed (PR_SET_PDEATHSIG).
func TestProcessesEndWithAKilledOwner(t *testing.T) {
	labtest.Root(t)
	self := must.Get(os.Executable())(t)
	owner := exec.Command(self)
	owner.Env = append(os.Environ(), ownerEnv+"=1")
	out := must.Get(owner.StdoutPipe())(t)
	must.Do(t, owner.Start())
	t.Cleanup(func() {
		owner.Process.Kill()
		owner.Wait()
	})
	var pids []int
	lines := bufio.NewScanner(out)
	for lines.Scan() && lines.Text() != "ready" {
		pid, err := strconv.Atoi(lines.Text())
		if err != nil {
			t.Fatal(lines.Text())
		}
		pids = append(pids, pid)
	}
	must.Need(t, len(pids) > 0, "want some processes")
	must.Do(t, owner.Process.Kill())
	labtest.Until(t, "its processes have ended", func() error {
		var all error
		for _, pid := range pids {
			all = errors.Join(all, notRunning(pid))
		}
		return all
	})
}

// notRunning returns nil if the process has ended or is a zombie.
func notRunning(pid int) error {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}
	if _, rest, _ := strings.Cut(string(b), ") "); strings.HasPrefix(rest, "Z") {
		return nil
	}
	return fmt.Errorf("process %d runs: %s", pid, b)
}
