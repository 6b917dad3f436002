package agent

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/steelyard-lb/steelyard/e2e/lab"
	"github.com/steelyard-lb/steelyard/e2e/lab/labtest"
)

// A SIGTERM during a restart ends the agent: no new one follows.
func TestStopDuringARestart(t *testing.T) {
	labtest.Root(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	h := labtest.Host(t, labtest.New(t), "lb")
	agent := labtest.Agent(t, h, self, lab.AgentConfig{Name: "lb1", Mode: "tc", Interfaces: []string{"lo"}})
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return h.Dial(ctx, "unix", lab.AgentSocketPath)
		},
	}}
	resp, err := client.Post("http://agent/v1/restart", "", nil)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%v, %v", resp, err)
	}
	resp.Body.Close()
	process := agent.Process()
	// The end of the first agent takes withdrawGrace at least.
	labtest.Until(t, stepTimeout, "it restarts", func() error {
		if log := process.Log.Tail(100); !strings.Contains(log, "agent restarts") {
			return errors.New(log)
		}
		return nil
	})
	if err := process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), stepTimeout)
	defer cancel()
	if err := process.Wait(ctx); err != nil {
		t.Errorf("%v\n%s", err, process.Log.Tail(20))
	}
	if log := process.Log.Tail(100); strings.Count(log, "agent started") != 1 {
		t.Errorf("a new agent followed:\n%s", log)
	}
}
