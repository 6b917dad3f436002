package lab_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
	"github.com/steelyard-lb/steelyard/e2e/lab/peers"
	"github.com/steelyard-lb/steelyard/lb/lbtest/must"
)

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
	time.Sleep(time.Minute) // the test kills it earlier; this bounds the time after a broken test
	return topo.Close()
}

// TestProcessesEndWithAKilledOwner: the kernel ends the programs of a lab when the process that started them is killed
// (PR_SET_PDEATHSIG).
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
	if len(pids) == 0 {
		t.Fatal("want some processes")
	}
	must.Do(t, owner.Process.Kill())
	labtest.Until(t, 5*time.Second, "its processes have ended", func() error {
		var all error
		for _, pid := range pids {
			all = errors.Join(all, notRunning(pid))
		}
		return all
	})
}

// notRunning returns nil when the process has ended or is a zombie.
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
