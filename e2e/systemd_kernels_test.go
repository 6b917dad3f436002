//go:build kernels

package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

// TestSystemd covers systemd as process 1 with the unit, which was installed and enabled before the boot
// (e2e/kernels/init). The uplink and its router come up three seconds late (e2e/kernels/network.sh).
func TestSystemd(t *testing.T) {
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(command(t, "journalctl", "--unit", "steelyard", "--no-pager", "--lines", "60"))
		}
	})
	t.Run("is started at boot, after the network", startedAtBoot)
	t.Run("is reloaded", reloadedBySystemd)
	t.Run("is restarted by the watchdog", restartedByWatchdog)
	t.Run("withdraws its routes when it is stopped", stoppedBySystemd)
	t.Run("is uninstalled", uninstalled)
}

const steelyardToml = "/etc/steelyard/steelyard.toml"

func startedAtBoot(t *testing.T) {
	labtest.Until(t, "the unit has started", func() error {
		if n := property(t, "steelyard", "NRestarts"); n != "0" {
			return lab.Permanent(fmt.Errorf("%s restarts; want none", n))
		}
		state := property(t, "steelyard", "ActiveState")
		return labtest.ErrorIf(state != "active", "%s", state)
	})
	online := number(t, "network", "ActiveEnterTimestampMonotonic")
	started := number(t, "steelyard", "ExecMainStartTimestampMonotonic")
	must.True(t, online > 0 && started >= online, "started %d µs after the boot, the network %d µs", started, online)
	// The unit becomes active once the agent is ready.
	out, err := runHere(t, "steelyard", "status")
	must.True(t, err == nil, "%v\n%s", err, out)
	waitRoute(t, "203.0.113.10", true)
	server := must.Get(net.Listen("tcp", "192.0.2.2:8081"))(t)
	defer server.Close()
	labtest.Until(t, "the machine reaches its own VIP", func() error {
		conn, err := net.DialTimeout("tcp", "203.0.113.20:80", 10*time.Second)
		if err == nil {
			conn.Close()
		}
		return err
	})
}

func reloadedBySystemd(t *testing.T) {
	text := must.Get(os.ReadFile(steelyardToml))(t)
	write := func(text string) { must.Do(t, os.WriteFile(steelyardToml, []byte(text), 0o640)) }
	pid, restarts := property(t, "steelyard", "MainPID"), property(t, "steelyard", "NRestarts")
	write(strings.Replace(string(text), `"203.0.113.10"`, `["203.0.113.10", "203.0.113.11"]`, 1))
	command(t, "systemctl", "reload", "steelyard")
	waitRoute(t, "203.0.113.11", true)
	write(string(text) + "\n[nonsense]\n")
	out, err := runHere(t, "systemctl", "reload", "steelyard")
	must.True(t, err != nil, "the reload of an invalid file succeeded: %s", out)
	write(string(text))
	command(t, "systemctl", "reload", "steelyard")
	waitRoute(t, "203.0.113.11", false)
	waitRoute(t, "203.0.113.10", true)
	now := property(t, "steelyard", "MainPID")
	must.True(t, now == pid && property(t, "steelyard", "NRestarts") == restarts, "process %s became %s", pid, now)
}

// restartedByWatchdog checks that a stopped agent is replaced. The router keeps the route (graceful restart).
func restartedByWatchdog(t *testing.T) {
	by := property(t, "steelyard", "RestartKillSignal")
	must.True(t, by == "10", "a restart is told by signal %s; want 10, SIGUSR1", by)
	pid, restarts := number(t, "steelyard", "MainPID"), number(t, "steelyard", "NRestarts")
	must.Do(t, syscall.Kill(pid, syscall.SIGSTOP))
	labtest.Until(t, "systemd has restarted the agent", func() error {
		n, state := number(t, "steelyard", "NRestarts"), property(t, "steelyard", "ActiveState")
		return labtest.ErrorIf(n != restarts+1 || state != "active", "%d restarts, %s", n, state)
	})
	now := number(t, "steelyard", "MainPID")
	must.True(t, now != pid, "still process %d", now)
	waitRoute(t, "203.0.113.10", true)
	out, err := runHere(t, "steelyard", "status")
	must.True(t, err == nil, "%v\n%s", err, out)
}

func stoppedBySystemd(t *testing.T) {
	command(t, "systemctl", "stop", "steelyard")
	must.Row(t, "a route remains", "", command(t, "ip", "-n", "router", "route", "show", "203.0.113.10"))
	for name, want := range map[string]string{
		"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0", "ExecMainCode": "1", // CLD_EXITED
	} {
		got := property(t, "steelyard", name)
		must.True(t, got == want, "%s=%s; want %s", name, got, want)
	}
}

func uninstalled(t *testing.T) {
	out, err := runHere(t, os.Getenv("STEELYARD_BINARY"), "uninstall")
	must.True(t, err != nil && strings.Contains(out, `run "steelyard cleanup" first`),
		"uninstall before cleanup: %v\n%s", err, out)
	command(t, "steelyard", "cleanup")
	command(t, os.Getenv("STEELYARD_BINARY"), "uninstall")
	must.Row(t, "the unit is", "not-found", property(t, "steelyard", "LoadState"))
}

// waitRoute waits until the router has a route to a VIP, or none if want is false.
func waitRoute(t *testing.T, vip string, want bool) {
	t.Helper()
	labtest.Until(t, fmt.Sprintf("the router has a route to %s: %t", vip, want), func() error {
		out := command(t, "ip", "-n", "router", "route", "show", vip)
		return labtest.ErrorIf((out != "") != want, "%q", out)
	})
}

func property(t *testing.T, unit, name string) string {
	t.Helper()
	return strings.TrimSpace(command(t, "systemctl", "show", "--value", "--property", name, unit))
}

func number(t *testing.T, unit, name string) int {
	t.Helper()
	n := must.Get(strconv.Atoi(property(t, unit, name)))(t)
	return n
}

// command runs a program on the machine, which must succeed.
func command(t *testing.T, name string, args ...string) string {
	t.Helper()
	out := must.Get(runHere(t, name, args...))(t)
	return out
}

func runHere(t *testing.T, name string, args ...string) (string, error) {
	t.Helper()
	out, err := exec.CommandContext(context.WithoutCancel(t.Context()), name, args...).CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out), err
}
